"""One attention call cut over ranks, with everything resolved: what each pair of a query chunk and a key chunk is to
the operators, whichever way the pieces travel."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .. import _ops
from .._autograd import general_kernel
from .._schema import BackwardArguments, ProblemArguments
from .layout import Chunk, Layout
from .transfers import Ranks


@dataclass(frozen=True)
class Rule:
    """The arguments of dspattn.attention that every rank agrees on, as the operator takes them."""

    keep: int
    group: int
    interleaved: bool
    causal: bool
    top_left: bool
    left: int | None
    right: int | None
    scale: float | None
    full_fp32: bool
    kernel: str
    offset: int
    soft_cap: float | None = None
    rest_mean: bool = False

    def options(
        self, offset: int, top_left: bool, longest: int, fp32: bool = True, *, merged: bool = False
    ) -> dict[str, Any]:
        """Arguments of the operator by name. Results that are to be merged are in fp32, and of the kept keys alone."""
        return {
            "max_q": longest, "max_k": longest, "keep": self.keep, "group": self.group,
            "interleaved": self.interleaved, "causal": self.causal, "top_left": top_left, "window_left": self.left,
            "window_right": self.right, "scale": self.scale, "full_fp32": self.full_fp32, "kernel": self.kernel,
            "offset": offset, "fp32_results": fp32, "soft_cap": self.soft_cap,
            "rest_mean": self.rest_mean and not merged,
        }  # fmt: skip


@dataclass(frozen=True)
class Masks:
    """Masks as tensors: rows of this rank's queries (or one), columns of all keys (or one)."""

    allowed: Tensor | None = None
    bias: Tensor | None = None
    key_lengths: Tensor | None = None
    own_rows: tuple[bool, bool] = (False, False)  # of allowed and bias: not one row that serves every query

    def of(self, rows: slice, keys: Chunk) -> dict[str, Tensor | None]:
        lengths = None if self.key_lengths is None else (self.key_lengths - keys.start).clamp(0, keys.rows)
        return {
            "allowed": _cut(self.allowed, rows, keys), "bias": _cut(self.bias, rows, keys), "key_lengths": lengths,
        }  # fmt: skip


def _cut(mask: Tensor | None, rows: slice, keys: Chunk) -> Tensor | None:
    if mask is None:
        return None
    if mask.shape[2] != 1:
        mask = mask[:, :, rows]
    return mask if mask.shape[3] == 1 else mask[..., keys.start : keys.stop]


@dataclass(frozen=True)
class Pair:
    """A stretch of this rank's queries, a stretch of some rank's keys, and what the operator takes besides them."""

    rows: slice
    keys: slice
    arguments: dict[str, Any]  # by the names of ProblemArguments
    chunk: Chunk | None = None  # the keys' place in their sequence, where it is cut

    def dense(self) -> Pair:
        """The same with nothing pruned."""
        return replace(self, arguments=self.arguments | {"keep": 1, "group": 1})


@dataclass(frozen=True)
class Plan:
    """What a way of computing asks of the operators."""

    fp32: bool  # results of forward in fp32
    wide: bool  # gradients in fp32
    backward: bool  # whether gradients are wanted
    merged: bool = False  # whether results of parts of the keys are put together


@dataclass(frozen=True)
class Call:
    """q, k and v are [batch, heads, rows, d]: of a packed batch, [1, heads, rows of all sequences, d]."""

    ranks: Ranks
    queries: Layout
    keys: Layout
    rule: Rule
    masks: Masks

    def pairs(self, source: int) -> Iterator[Pair]:
        """What this rank has to compute with the keys that travel from rank ``source``."""
        row = 0
        for q in self.queries.cut[self.ranks.rank]:
            rows = slice(row, row + q.rows)
            row += q.rows
            key = 0
            for k in self.keys.cut[source]:
                keys = slice(key, key + k.rows)
                key += k.rows
                if k.sequence != q.sequence:
                    continue
                offset = self.diagonal(q.sequence) + q.start - k.start
                if self._sees(offset, q.rows, k.rows):
                    arguments = self.masks.of(rows, k) | self.rule.options(offset, True, 0, merged=True)
                    yield Pair(rows, keys, arguments, k)

    def local_pair(self, like: Tensor) -> Pair | None:
        """The sequences that this rank holds alone, as one packed batch. None where there are none."""
        lengths = [chunk.rows for chunk in self.queries.whole[self.ranks.rank]]
        if not lengths:
            return None
        begin = self.queries.cut_rows(self.ranks.rank)
        cumulative = torch.tensor([0, *lengths], dtype=torch.int32, device=like.device).cumsum(0, dtype=torch.int32)
        options = self.rule.options(self.rule.offset, self.rule.top_left, max(lengths))
        stretch = slice(begin, begin + sum(lengths))
        return Pair(stretch, stretch, {"cu_q": cumulative, "cu_k": cumulative} | options)

    def diagonal(self, sequence: int) -> int:
        """Where query 0 of a sequence stands among its keys."""
        aligned = 0 if self.rule.top_left else self.keys.lengths[sequence] - self.queries.lengths[sequence]
        return aligned + self.rule.offset

    def _sees(self, offset: int, rows: int, keys: int) -> bool:
        """Whether any of the queries sees any of the keys."""
        right = 0 if self.rule.causal else self.rule.right
        first, last = offset, offset + rows - 1
        return (right is None or last + right >= 0) and (self.rule.left is None or first - self.rule.left <= keys - 1)


def repeatable(rule: Rule, plan: Plan, q: Tensor) -> Rule:
    """The same with one kernel for both passes where the table might choose two: gradients in fp32 are not every
    kernel's, and each pass selects the keys anew (dspattn._autograd.repeatable)."""
    if rule.kernel or not (plan.backward and plan.wide):
        return rule
    return replace(rule, kernel=general_kernel(q))


def require_served(rule: Rule, masks: Masks, tensors: tuple[Tensor, Tensor, Tensor], packed: bool, plan: Plan) -> None:
    """Raise what the operators would say to pieces like these, before anything travels: a rank that raises later
    leaves the others waiting. Asked with an empty batch of 128 rows and keys, or of no rows where packed, which checks
    everything but elements, strides and lengths, and computes nothing."""
    q, k, v = tensors
    rows = 128  # kernels choose among themselves by lengths; that one serves does not depend on them
    for is_packed in {False, packed}:
        shape = (1, 0) if is_packed else (0, rows)
        q_like, k_like, v_like = (t.new_zeros((shape[0], t.shape[1], shape[1], t.shape[3])) for t in (q, k, v))
        arguments: dict[str, Any] = rule.options(rule.offset, True, 0, plan.fp32)
        if is_packed:
            cu = torch.zeros(2, dtype=torch.int32, device=q.device)
            arguments |= {"cu_q": cu, "cu_k": cu}
        else:
            extents = (0, q.shape[1], rows, rows)
            arguments |= {
                name: None if mask is None else _like(mask, extents)
                for name, mask in (("allowed", masks.allowed), ("bias", masks.bias))
            }
            if masks.key_lengths is not None:
                arguments["key_lengths"] = masks.key_lengths.new_zeros(0)
        pair = Pair(slice(0), slice(0), arguments)
        if rule.rest_mean and plan.merged and not is_packed:
            pair = replace(pair, arguments=arguments | {"rest_mean": False})
            forward(pair.dense(), q_like, k_like, v_like)
        out, lse = forward(pair, q_like, k_like, v_like)
        if plan.backward:
            d_out = torch.zeros_like(out)
            wide = arguments | {"fp32_results": plan.wide}
            backward(Pair(slice(0), slice(0), wide), d_out, out, lse, q_like, k_like, v_like)


def _like(mask: Tensor, extents: tuple[int, ...]) -> Tensor:
    """An empty mask that is broadcast where ``mask`` is; the batch is empty, or one for all."""
    shape = [1 if given == 1 else extent for given, extent in zip(mask.shape, extents, strict=True)]
    return torch.zeros(1, dtype=mask.dtype, device=mask.device).expand(shape)


def forward(pair: Pair, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Output in fp32 and LSE of one pair. q, k and v are the stretches themselves."""
    try:
        return _ops.attention(*ProblemArguments(q, k, v, **pair.arguments))
    except RuntimeError as error:
        raise _ops.translated(error) from None


def backward(
    pair: Pair, d_out: Tensor, out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The share of the gradients, in fp32; ``out`` and ``lse`` are those of the whole row."""
    try:
        results = BackwardArguments(d_out, out, lse, None, False, False)
        d_q, d_k, d_v, *_ = _ops.attention_backward(*results, *ProblemArguments(q, k, v, **pair.arguments))
        return d_q, d_k, d_v
    except RuntimeError as error:
        raise _ops.translated(error) from None
