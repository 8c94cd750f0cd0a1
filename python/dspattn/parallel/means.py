"""``rest="mean"`` for rows whose keys are cut over ranks: which mean of V a row's pruned keys bring.

It is the mean over the whole blocks of 128 keys in the interval that the row sees by diagonal, window and length; where
those hold no key that counts, over the interval itself, of which then only its two ends matter. Ranks add up a table of
sums by block once, a 128th of V; the ends' keys are met as they pass by on the ring.

Sums over stretches are put together from sums over 1, 2, 4, ... neighbours. Nothing is subtracted, so what a row does
not see, NaN or not, reaches none of its numbers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..patterns import INTERLEAVE_BLOCK
from .call import Call
from .layout import Chunk

FARTHEST = 2**41  # of what a window reaches: past every key from every offset that there is, and sums of it fit 64 bits


def stretch_sums(values: Tensor, start: Tensor, stop: Tensor) -> Tensor:
    """Sums of ``values[:, :, start:stop]``, none where stop <= start: values [batch, heads, n, width], start and stop
    [batch, rows], the result [batch, heads, rows, width].

    Example:
        >>> values = torch.arange(5.0).view(1, 1, 5, 1)
        >>> stretch_sums(values, torch.tensor([[0, 1, 3]]), torch.tensor([[5, 3, 3]])).tolist()
        [[[[10.0], [3.0], [0.0]]]]
    """
    batch, heads, _, width = values.shape
    place, left = start, (stop - start).clamp(min=0)
    total = values.new_zeros((batch, heads, start.shape[1], width))
    neighbours = 1  # of which every entry of `values` is the sum
    while values.shape[2] > 0 and bool((left > 0).any()):
        taken = (left & neighbours) > 0
        index = place.clamp(0, values.shape[2] - 1)[:, None, :, None].expand(-1, heads, -1, width)
        total = total + values.gather(2, index).where(taken[:, None, :, None], 0.0)
        place, left = place + taken * neighbours, left - taken * neighbours
        values = values[:, :, :-neighbours] + values[:, :, neighbours:]
        neighbours *= 2
    return total


class RowMeans:
    """The means of this rank's rows of cut sequences: made from its own V, then shown every part of V that passes."""

    def __init__(self, call: Call, q: Tensor, v: Tensor) -> None:
        self.call = call
        masks = [mask for mask in (call.masks.allowed, call.masks.bias) if mask is not None]
        # Masks may differ from query head to query head; the means then do, and V is repeated.
        self.repeats = q.shape[1] // v.shape[1] if any(mask.shape[1] > 1 for mask in masks) else 1
        self.shared = q.shape[1] // v.shape[1] // self.repeats
        begins = [0]
        for length in call.keys.lengths:
            begins.append(begins[-1] + -(-length // INTERLEAVE_BLOCK))
        self.first, self.stop = self._intervals(q)
        whole, whole_stop = -(-self.first // INTERLEAVE_BLOCK), self.stop // INTERLEAVE_BLOCK
        self.inner = whole * INTERLEAVE_BLOCK, whole_stop * INTERLEAVE_BLOCK  # empty where the second is not larger
        table = v.new_zeros((q.shape[0], v.shape[1] * self.repeats, begins[-1], v.shape[3] + 1), dtype=torch.float32)
        row = 0
        for chunk in call.keys.cut[call.ranks.rank]:
            values = self._counted(chunk, v[:, :, row : row + chunk.rows])
            blocks = torch.arange(chunk.start, chunk.stop, device=v.device) // INTERLEAVE_BLOCK + begins[chunk.sequence]
            table.index_add_(2, blocks, values)
            row += chunk.rows
        call.ranks.add_up(table)
        base = torch.empty(0, dtype=torch.int64, device=v.device)
        base = torch.cat([base, *(base.new_full((c.rows,), begins[c.sequence]) for c in self._chunks())])
        self.sums = stretch_sums(table, whole + base, whole_stop + base)
        self.ends = torch.zeros_like(self.sums)

    def _chunks(self) -> tuple[Chunk, ...]:
        return self.call.queries.cut[self.call.ranks.rank]

    def _intervals(self, q: Tensor) -> tuple[Tensor, Tensor]:
        """[batch, rows]: the first key that each row sees, and the one behind the last."""
        rule, keys = self.call.rule, self.call.keys
        left, right = (side if side is None else min(side, FARTHEST) for side in (rule.left, rule.right))
        right = 0 if rule.causal else right
        first, stop = [], []
        for chunk in self._chunks():
            place = torch.arange(chunk.start, chunk.stop, device=q.device) + self.call.diagonal(chunk.sequence)
            length = keys.lengths[chunk.sequence]
            first.append(torch.zeros_like(place) if left is None else (place - left).clamp(min=0))
            seen = torch.full_like(place, length) if right is None else (place + right + 1).clamp(max=length)
            stop.append(seen)
        empty = torch.empty(0, dtype=torch.int64, device=q.device)
        starts, stops = (torch.cat(parts or [empty]).expand(q.shape[0], -1) for parts in (first, stop))
        if self.call.masks.key_lengths is not None:
            stops = stops.minimum(self.call.masks.key_lengths.to(q.device, torch.int64)[:, None])
        return starts, stops.maximum(starts)

    def _counted(self, chunk: Chunk, v: Tensor) -> Tensor:
        """Values of a chunk in fp32, and behind them 1; 0 where a mask hides a key."""
        v = v.float().repeat_interleave(self.repeats, 1)
        counted = torch.nn.functional.pad(v, (0, 1), value=1.0)
        of_masks = self.call.masks.of(slice(0, 1), chunk)
        for name, mask in of_masks.items():
            if mask is not None and name != "key_lengths":
                seen = mask if mask.dtype == torch.bool else mask > float("-inf")
                counted = counted.where(seen.transpose(2, 3), 0.0)
        return counted

    def pass_by(self, rows: slice, chunk: Chunk, v: Tensor) -> None:
        """Adds what a chunk of keys has of the ends of some rows' intervals."""
        first, stop = self.first[:, rows], self.stop[:, rows]
        inner, inner_stop = (t[:, rows] for t in self.inner)
        hollow = inner_stop > inner
        ends = ((first, inner.where(hollow, stop)), (inner_stop.where(hollow, stop), stop))
        values: Tensor | None = None
        for begin, end in ends:
            begin, end = ((t - chunk.start).clamp(0, chunk.rows) for t in (begin, end))
            if bool((end > begin).any()):
                values = self._counted(chunk, v) if values is None else values
                self.ends[:, :, rows] += stretch_sums(values, begin, end)

    def means(self) -> Tensor:
        """[batch, heads, rows, d_v], fp32; 0 for a row without keys."""
        sums = self.sums.where(self.sums[..., -1:] > 0, self.ends)
        return (sums[..., :-1] / sums[..., -1:].clamp(min=1.0)).repeat_interleave(self.shared, 1)


def with_means(out: Tensor, lse: Tensor, dense_lse: Tensor, means: Tensor) -> Tensor:
    """Results of the kept keys with the pruned ones' weight brought in; ``lse`` is of the kept scores."""
    seen = dense_lse > float("-inf")
    kept = (lse - dense_lse.where(seen, 0.0)).clamp(max=0.0).unsqueeze(-1)
    pruned = -torch.expm1(kept)
    return kept.exp() * out + (pruned * means).where((pruned > 0) & seen.unsqueeze(-1), 0.0)
