"""Attention by exchanging heads for rows: each rank computes some of the heads over the whole sequence.

One exchange of all ranks with all gives a rank its heads' rows of q, k and v, a second one brings the results home.
Query heads are shared out evenly, a head more to the first ranks where they do not divide; key heads go to the ranks
whose query heads use them, to several only where a group of query heads is divided. More ranks than heads leave some
with nothing to do. No rank holds more than heads / world of the whole sequence.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .._autograd import first_order
from . import call as calls
from .call import Call, Masks, Pair
from .ring import kept_for_backward


@dataclass(frozen=True)
class Share:
    """The heads of one rank: query heads [begin, end) and the key heads [kv_begin, kv_end) that they use."""

    begin: int
    end: int
    kv_begin: int
    kv_end: int


def shares(heads: int, kv_heads: int, world: int) -> list[Share]:
    """How heads are shared out.

    Example:
        >>> [(s.begin, s.end, s.kv_begin, s.kv_end) for s in shares(6, 2, 4)]
        [(0, 2, 0, 1), (2, 4, 0, 2), (4, 5, 1, 2), (5, 6, 1, 2)]
    """
    group = max(1, heads // max(1, kv_heads))
    result = []
    begin = 0
    for rank in range(world):
        end = begin + heads // world + (rank < heads % world)
        kv = (begin // group, -(-end // group)) if end > begin else (0, 0)
        result.append(Share(begin, end, *kv))
        begin = end
    return result


def repeats_heads(heads: int, kv_heads: int, world: int) -> bool:
    """Whether several ranks have the same key head, whose gradients are then added up."""
    return sum(share.kv_end - share.kv_begin for share in shares(heads, kv_heads, world)) > kv_heads


def runs(share: Share, group: int) -> Iterator[tuple[slice, slice]]:
    """Stretches of a rank's query and key heads, counted from its own first, in each of which every key head serves as
    many query heads."""
    begin = share.begin
    while begin < share.end:
        head = begin // group
        if begin % group == 0 and share.end - begin >= group:
            end = begin + (share.end - begin) // group * group  # all the whole groups
        else:
            end = min(share.end, (head + 1) * group)
        last = (end - 1) // group + 1
        yield slice(begin - share.begin, end - share.begin), slice(head - share.kv_begin, last - share.kv_begin)
        begin = end


class Exchange:
    """The two ways: this rank's rows of all heads <-> all rows of this rank's heads."""

    def __init__(self, call: Call, q: Tensor, k: Tensor, v: Tensor) -> None:
        self.call = call
        self.batch, self.heads, self.kv_heads = q.shape[0], q.shape[1], k.shape[1]
        self.shares = shares(self.heads, self.kv_heads, call.ranks.world)
        self.mine = self.shares[call.ranks.rank]
        self.repeated = repeats_heads(self.heads, self.kv_heads, call.ranks.world)

    def heads_of(self, share: Share, kv: bool) -> slice:
        return slice(share.kv_begin, share.kv_end) if kv else slice(share.begin, share.end)

    def to_heads(self, tensors: Sequence[Tensor], kv: Sequence[bool]) -> list[Tensor]:
        """All rows, in the order of the sequence, of this rank's heads of each tensor."""
        ranks = self.call.ranks
        layouts = [self.call.keys if of_keys else self.call.queries for of_keys in kv]
        send = [
            torch.cat([t[:, self.heads_of(share, of)].reshape(-1) for t, of in zip(tensors, kv, strict=True)])
            for share in self.shares
        ]
        counts = [self.mine.kv_end - self.mine.kv_begin if of else self.mine.end - self.mine.begin for of in kv]
        shapes = [
            [
                (self.batch, count, layout.rows(source), t.shape[3])
                for t, count, layout in zip(tensors, counts, layouts, strict=True)
            ]
            for source in range(ranks.world)
        ]
        sizes = [[torch.Size(shape).numel() for shape in of_source] for of_source in shapes]
        received = ranks.exchange(send, [sum(of_source) for of_source in sizes])
        pieces = [
            [part.view(shape) for part, shape in zip(message.split(size), shape_of, strict=True)]
            for message, size, shape_of in zip(received, sizes, shapes, strict=True)
        ]
        return [
            torch.cat([of_source[i] for of_source in pieces], 2)[:, :, layout.inverse().to(tensors[i].device)]
            for i, layout in enumerate(layouts)
        ]

    def to_rows(self, tensors: Sequence[Tensor], kv: Sequence[bool]) -> list[Tensor]:
        """This rank's rows of all heads of each tensor, what several ranks have of a head added up."""
        ranks = self.call.ranks
        layouts = [self.call.keys if of_keys else self.call.queries for of_keys in kv]
        send = [
            torch.cat(
                [t[:, :, layout.index(to).to(t.device)].reshape(-1) for t, layout in zip(tensors, layouts, strict=True)]
            )
            for to in range(ranks.world)
        ]
        shapes = [
            [
                (self.batch, self._count(share, of), layout.rows(ranks.rank), t.shape[3])
                for t, of, layout in zip(tensors, kv, layouts, strict=True)
            ]
            for share in self.shares
        ]
        sizes = [[torch.Size(shape).numel() for shape in of_share] for of_share in shapes]
        received = ranks.exchange(send, [sum(of_share) for of_share in sizes])
        results = [
            t.new_zeros((self.batch, self.kv_heads if of else self.heads, layout.rows(ranks.rank), t.shape[3]))
            for t, of, layout in zip(tensors, kv, layouts, strict=True)
        ]
        for share, message, size, shape_of in zip(self.shares, received, sizes, shapes, strict=True):
            for total, part, shape, of in zip(results, message.split(size), shape_of, kv, strict=True):
                total[:, self.heads_of(share, of)] += part.view(shape)
        return results

    def _count(self, share: Share, kv: bool) -> int:
        heads = self.heads_of(share, kv)
        return heads.stop - heads.start

    def pairs(self, masks: Masks, fp32: bool, like: Tensor) -> Iterator[tuple[slice, slice, Pair]]:
        """What this rank has to compute: query heads, key heads, and what the operator takes besides them."""
        call = self.call
        queries, keys = call.queries, call.keys
        cu: Tensor | None = None
        longest = 0
        if len(queries.lengths) != 1:
            cu = torch.tensor(queries.begins(), dtype=torch.int32, device=like.device)
            longest = max(queries.lengths, default=0)
        options = call.rule.options(call.rule.offset, call.rule.top_left, longest, fp32)
        whole_q, whole_k = slice(0, queries.total), slice(0, keys.total)
        for q_heads, kv_heads in runs(self.mine, self.heads // self.kv_heads):
            own = slice(self.mine.begin + q_heads.start, self.mine.begin + q_heads.stop)
            allowed, bias = (t if t is None or t.shape[1] == 1 else t[:, own] for t in (masks.allowed, masks.bias))
            tensors = {"allowed": allowed, "bias": bias, "key_lengths": masks.key_lengths, "cu_q": cu, "cu_k": cu}
            yield q_heads, kv_heads, Pair(whole_q, whole_k, tensors | options)


class Heads(torch.autograd.Function):
    """Attention by heads with its gradients."""

    @staticmethod
    def forward(ctx: Any, call: Call, dtype: torch.dtype, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        exchange = Exchange(call, q, k, v)
        masks = whole_masks(call)
        fp32 = dtype == torch.float32
        q_all, k_all, v_all = exchange.to_heads((q, k, v), (False, True, True))
        out = q_all.new_zeros((*q_all.shape[:3], v.shape[3]), dtype=dtype)
        lse = q_all.new_full((*q_all.shape[:3], 1), float("-inf"), dtype=torch.float32)
        for heads, kv_heads, pair in exchange.pairs(masks, fp32, q):
            part, part_lse = calls.forward(pair, q_all[:, heads], k_all[:, kv_heads], v_all[:, kv_heads])
            out[:, heads] = part
            lse[:, heads] = part_lse.unsqueeze(-1)
        ctx.exchange, ctx.masks, ctx.fp32, ctx.device = exchange, masks, fp32, q.device
        ctx.save_for_backward(q_all, k_all, v_all, out, lse)
        ctx.set_materialize_grads(False)
        (mine,) = exchange.to_rows((out,), (False,))
        (mine_lse,) = exchange.to_rows((lse,), (False,))
        return mine, mine_lse.squeeze(-1)

    @staticmethod
    @first_order
    def backward(ctx: Any, d_out: Tensor | None, d_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        exchange: Exchange = ctx.exchange
        q, k, v, out, lse = kept_for_backward(ctx, exchange.call, d_lse)
        rows = exchange.call.queries.rows(exchange.call.ranks.rank)
        if d_out is None:  # the other ranks may have one, and wait for this one's
            d_out = out.new_zeros((exchange.batch, exchange.heads, rows, v.shape[3]))
        (d_all,) = exchange.to_heads((d_out,), (False,))
        # Gradients of a key head that several ranks have are added up before they are rounded.
        wide = exchange.repeated or ctx.fp32
        dtype = torch.float32 if wide else q.dtype
        d_q, d_k, d_v = (torch.zeros(t.shape, dtype=dtype, device=t.device) for t in (q, k, v))
        for heads, kv, pair in exchange.pairs(ctx.masks, wide, q):
            of_q, of_k, of_v = calls.backward(
                pair, d_all[:, heads], out[:, heads], lse[:, heads, :, 0], q[:, heads], k[:, kv], v[:, kv]
            )
            d_q[:, heads] = of_q
            d_k[:, kv] += of_k
            d_v[:, kv] += of_v
        grads = exchange.to_rows((d_q, d_k, d_v), (False, True, True))
        return None, None, *(grad.to(q.dtype) for grad in grads)


def whole_masks(call: Call) -> Masks:
    """Masks with the rows of all queries."""
    masks = call.masks
    allowed, bias = (
        _all_rows(call, mask) if own else mask
        for mask, own in zip((masks.allowed, masks.bias), masks.own_rows, strict=True)
    )
    return Masks(allowed, bias, masks.key_lengths, masks.own_rows)


def _all_rows(call: Call, mask: Tensor | None) -> Tensor | None:
    if mask is None:
        return None
    rows = [call.queries.rows(rank) for rank in range(call.ranks.world)]
    parts = call.ranks.gather(mask.transpose(0, 2).contiguous(), rows)
    return torch.cat(parts)[call.queries.inverse().to(mask.device)].transpose(0, 2)
