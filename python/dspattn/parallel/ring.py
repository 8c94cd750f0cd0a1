"""Ring attention: queries stay, keys and values travel from rank to rank while the last ones are computed.

Forward, step t of rank r: the keys of rank r - t are at hand; they are sent on to rank r + 1 while their part of the
result is computed and merged, in fp32, by LSE. Backward: keys travel the same way, and behind them, in fp32, the sums
of their gradients, which arrive home after a full turn. No rank ever holds more than two ranks' keys and values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .._autograd import first_order
from ..errors import DspattnError
from . import call as calls
from .call import Call
from .means import RowMeans, with_means


class Travelling:
    """Keys and values of cut sequences, of one rank after the other, as one flat message each."""

    def __init__(self, call: Call, k: Tensor, v: Tensor, dtype: torch.dtype) -> None:
        self.call = call
        self.batch, self.heads, _, self.d = k.shape
        self.d_v = v.shape[3]
        self.device, self.dtype, self.wire = k.device, dtype, call.ranks.wire(k)

    def size(self, rank: int) -> int:
        return self.batch * self.heads * self.call.keys.cut_rows(rank) * (self.d + self.d_v)

    def empty(self, rank: int) -> Tensor:
        return torch.empty(self.size(rank), dtype=self.dtype, device=self.wire)

    def views(self, message: Tensor, rank: int) -> tuple[Tensor, Tensor]:
        """Keys and values (or their gradients) of a rank's message."""
        rows = self.call.keys.cut_rows(rank)
        of_k = self.batch * self.heads * rows * self.d
        return (
            message[:of_k].view(self.batch, self.heads, rows, self.d),
            message[of_k:].view(self.batch, self.heads, rows, self.d_v),
        )

    def message(self, k: Tensor, v: Tensor) -> Tensor:
        """This rank's own keys and values as a message."""
        rank = self.call.ranks.rank
        message = torch.empty(self.size(rank), dtype=self.dtype, device=self.device)
        for to, source in zip(self.views(message, rank), (k, v), strict=True):
            to.copy_(source[:, :, : to.shape[2]])
        return message.to(self.wire)


def _each_source(
    call: Call, k: Tensor, v: Tensor, compute: Callable[[int, Tensor, Tensor], None], between: Callable[[int], None]
) -> None:
    """compute(source, k, v) with every rank's keys and values in turn, the next ones on their way meanwhile, then
    between(source)."""
    ranks = call.ranks
    if ranks.world == 1:
        compute(0, k, v)
        between(0)
        return
    travelling = Travelling(call, k, v, k.dtype)
    message = travelling.message(k, v)
    for step in range(ranks.world):
        source = (ranks.rank - step) % ranks.world
        wait: Callable[[], None] | None = None
        coming = message
        if step + 1 < ranks.world:
            coming = travelling.empty((source - 1) % ranks.world)
            wait = ranks.pass_on(message, coming)
        compute(source, *travelling.views(message.to(k.device), source))
        between(source)
        if wait is not None:
            wait()
        message = coming


def ring_forward(call: Call, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """This rank's rows of the result in fp32, and their LSE."""
    batch, heads, rows, _ = q.shape
    out = torch.zeros((batch, rows, heads, v.shape[3]), dtype=torch.float32, device=q.device).transpose(1, 2)
    lse = torch.full((batch, heads, rows), float("-inf"), dtype=torch.float32, device=q.device)

    def compute(source: int, k_part: Tensor, v_part: Tensor) -> None:
        for pair in call.pairs(source):
            result = calls.forward(pair, q[:, :, pair.rows], k_part[:, :, pair.keys], v_part[:, :, pair.keys])
            _merge_into(out[:, :, pair.rows], lse[:, :, pair.rows], *result)
        local = call.local_pair(q) if source == call.ranks.rank else None
        if local is not None:
            result = calls.forward(local, *(t[:, :, local.rows] for t in (q, k, v)))
            _merge_into(out[:, :, local.rows], lse[:, :, local.rows], *result)

    _each_source(call, k, v, compute, lambda source: None)
    return out, lse


def ring_forward_mean(call: Call, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """The same with the pruned keys' weight at the mean of V: beside the kept keys' results, the LSE of all scores says
    how much that is, and the means are put together from every rank's V."""
    batch, heads, rows, _ = q.shape
    cut = slice(0, call.queries.cut_rows(call.ranks.rank))
    row_means = RowMeans(call, q, v)
    out = torch.zeros((batch, rows, heads, v.shape[3]), dtype=torch.float32, device=q.device).transpose(1, 2)
    lse = torch.full((batch, heads, rows), float("-inf"), dtype=torch.float32, device=q.device)
    dense_lse = lse.clone()

    def compute(source: int, k_part: Tensor, v_part: Tensor) -> None:
        for pair in call.pairs(source):
            q_rows, keys, values = q[:, :, pair.rows], k_part[:, :, pair.keys], v_part[:, :, pair.keys]
            _merge_into(out[:, :, pair.rows], lse[:, :, pair.rows], *calls.forward(pair, q_rows, keys, values))
            _, part_lse = calls.forward(pair.dense(), q_rows, keys, values)
            dense_lse[:, :, pair.rows] = torch.logaddexp(dense_lse[:, :, pair.rows], part_lse)
            assert pair.chunk is not None
            row_means.pass_by(pair.rows, pair.chunk, values)

    _each_source(call, k, v, compute, lambda source: None)
    out[:, :, cut] = with_means(out[:, :, cut], lse[:, :, cut], dense_lse[:, :, cut], row_means.means())
    local = call.local_pair(q)
    if local is not None:
        out[:, :, local.rows], dense_lse[:, :, local.rows] = calls.forward(
            local, *(t[:, :, local.rows] for t in (q, k, v))
        )
    return out, dense_lse


def _merge_into(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Adds a part to what is there: as dspattn.merge, in place."""
    joined = torch.logaddexp(lse, part_lse)
    base = joined.masked_fill(joined == float("-inf"), 0.0)
    out.mul_((lse - base).exp_().unsqueeze(-1)).add_(part.mul_((part_lse - base).exp_().unsqueeze(-1)))
    lse.copy_(joined)


def ring_backward(
    call: Call, d_out: Tensor, out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """This rank's rows of the three gradients, in fp32."""
    ranks = call.ranks
    travelling = Travelling(call, k, v, torch.float32)
    d_q = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
    d_k = torch.zeros(k.shape, dtype=torch.float32, device=k.device)
    d_v = torch.zeros(v.shape, dtype=torch.float32, device=v.device)
    state: dict[str, Any] = {"sums": torch.empty(0), "wait": None, "coming": None}

    def add(pair: calls.Pair, k_part: Tensor, v_part: Tensor, k_sum: Tensor, v_sum: Tensor) -> None:
        rows, keys = pair.rows, pair.keys
        of_q, of_k, of_v = calls.backward(
            pair, d_out[:, :, rows], out[:, :, rows], lse[:, :, rows], q[:, :, rows], k_part, v_part
        )
        d_q[:, :, rows] += of_q
        k_sum[:, :, keys] += of_k
        v_sum[:, :, keys] += of_v

    def compute(source: int, k_part: Tensor, v_part: Tensor) -> None:
        sums = torch.zeros(travelling.size(source), dtype=torch.float32, device=k.device)
        k_sum, v_sum = travelling.views(sums, source)
        for pair in call.pairs(source):
            add(pair, k_part[:, :, pair.keys], v_part[:, :, pair.keys], k_sum, v_sum)
        local = call.local_pair(q) if source == ranks.rank else None
        if local is not None:
            add(local, k[:, :, local.keys], v[:, :, local.keys], d_k, d_v)
        state["sums"] = sums

    def pass_gradients(source: int) -> None:
        """What the ranks before this one added has arrived by now; this rank's share goes on with it."""
        if state["wait"] is not None:
            state["wait"]()
            state["sums"] += state["coming"].to(k.device)
        if ranks.world > 1:
            following = (source - 1) % ranks.world
            state["sent"] = state["sums"].to(travelling.wire)  # kept until the transfer is waited for
            state["coming"] = travelling.empty(following)
            state["wait"] = ranks.pass_on(state["sent"], state["coming"])

    _each_source(call, k, v, compute, pass_gradients)
    home = state["sums"]
    if ranks.world > 1:
        state["wait"]()
        home = state["coming"].to(k.device)
    for total, part in zip((d_k, d_v), travelling.views(home, ranks.rank), strict=True):
        total[:, :, : part.shape[2]] += part
    return d_q, d_k, d_v


class Ring(torch.autograd.Function):
    """Ring attention with its gradients."""

    @staticmethod
    def forward(ctx: Any, call: Call, dtype: torch.dtype, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = (ring_forward_mean if call.rule.rest_mean else ring_forward)(call, q, k, v)
        out = out.to(dtype)
        ctx.call, ctx.device = call, q.device
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @first_order
    def backward(ctx: Any, d_out: Tensor | None, d_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = kept_for_backward(ctx, ctx.call, d_lse)
        if d_out is None:  # the other ranks may have one, and wait for this one's keys
            d_out = torch.zeros_like(out)
        if d_out.stride(-1) != 1:
            d_out = d_out.contiguous()
        d_q, d_k, d_v = ring_backward(ctx.call, d_out, out, lse, q, k, v)
        return None, None, d_q.to(q.dtype), d_k.to(k.dtype), d_v.to(v.dtype)


def kept_for_backward(ctx: Any, call: Call, d_lse: Tensor | None) -> tuple[Tensor, ...]:
    """The tensors that forward kept, on every rank or on none: what a rank refuses, and what PyTorch does (a kept
    tensor was written to, a second backward pass), raises on all."""
    error: Exception | None = None
    kept: tuple[Tensor, ...] = ()
    try:
        _refuse_gradients(call, d_lse)
        kept = ctx.saved_tensors
    except Exception as refusal:
        error = refusal
    call.ranks.agree("backward pass of attention", error, {"rule": call.rule}, device=ctx.device)
    return kept


def _refuse_gradients(call: Call, d_lse: Tensor | None) -> None:
    """Raise where gradients are wanted that there are none of."""
    if call.rule.rest_mean:
        raise DspattnError(['rest: expected "drop" for gradients ("mean" is for inference and has none), got "mean"'])
    if d_lse is not None:
        raise NotImplementedError("return_lse: the gradient through the LSE of a parallel call is not computed")
