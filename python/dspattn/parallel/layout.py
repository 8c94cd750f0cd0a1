"""Which rank holds which rows of a sequence that is cut along its length.

A sequence is cut at multiples of 128 rows, where no group of keys is divided, into twice as many chunks as there are
ranks; rank r holds chunk r from the head and chunk r from the tail, so that under a causal mask every rank has the same
number of scores to compute. Chunks differ by a block at most; the last one of a sequence may be short, and some are
empty where there are fewer blocks than chunks.

In a packed batch every sequence is cut by itself, and one shorter than a block for each chunk stays whole, on the rank
that has the least to do. A rank's rows are first its chunks of cut sequences, in order, then its whole sequences.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .._flags import as_flag
from ..errors import DspattnError
from ..patterns import INTERLEAVE_BLOCK


@dataclass(frozen=True)
class Chunk:
    """Rows [start, stop) of a sequence."""

    sequence: int
    start: int
    stop: int

    @property
    def rows(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Layout:
    """How sequences of ``lengths`` rows are shared out. Make one with :func:`layout_of`.

    Attributes:
        lengths: rows of each sequence; a batch of equal sequences is one.
        world: how many ranks there are.
        block: chunks start at multiples of it.
        balanced: head and tail to each rank; otherwise one stretch.
        cut: of each rank its chunks of cut sequences.
        whole: of each rank the sequences that it holds alone.
    """

    lengths: tuple[int, ...]
    world: int
    block: int
    balanced: bool
    cut: tuple[tuple[Chunk, ...], ...]
    whole: tuple[tuple[Chunk, ...], ...]

    @property
    def total(self) -> int:
        return sum(self.lengths)

    def chunks(self, rank: int) -> tuple[Chunk, ...]:
        """A rank's chunks in the order of its rows."""
        return self.cut[rank] + self.whole[rank]

    def rows(self, rank: int) -> int:
        return sum(chunk.rows for chunk in self.chunks(rank))

    def cut_rows(self, rank: int) -> int:
        """Rows that other ranks have to see; they come first."""
        return sum(chunk.rows for chunk in self.cut[rank])

    def positions(self, rank: int) -> Tensor:
        """Of each of the rank's rows its position within its own sequence."""
        return _joined([torch.arange(chunk.start, chunk.stop, device="cpu") for chunk in self.chunks(rank)])

    def index(self, rank: int) -> Tensor:
        """Of each of the rank's rows its place in the whole batch."""
        begins = self.begins()
        return _joined(
            [
                torch.arange(chunk.start, chunk.stop, device="cpu") + begins[chunk.sequence]
                for chunk in self.chunks(rank)
            ]
        )

    def inverse(self) -> Tensor:
        """Of each row of the whole batch its place among all ranks' rows laid end to end."""
        order = _joined([self.index(rank) for rank in range(self.world)])
        places = torch.empty_like(order)
        places[order] = torch.arange(len(order), device="cpu")
        return places

    def begins(self) -> list[int]:
        """Where each sequence begins, and the end."""
        begins = [0]
        for length in self.lengths:
            begins.append(begins[-1] + length)
        return begins


def layout_of(
    lengths: int | Sequence[int], world: int, *, block: int = INTERLEAVE_BLOCK, balanced: bool = True
) -> Layout:
    """The layout of a sequence length, or of the lengths of a packed batch.

    Args:
        lengths: rows of the whole sequence, or of each sequence of a packed batch.
        world: number of ranks.
        block: where chunks may start. A multiple of 128 serves every interleaved pattern and consecutive groups of 2,
            4, 8, 16 and 32; other groups need a multiple of their own size.
        balanced: head and tail to each rank. False gives each rank one stretch.

    Example:
        >>> layout = layout_of(1000, 2)
        >>> [(chunk.start, chunk.stop) for chunk in layout.chunks(0)], layout.rows(1)
        ([(0, 256), (768, 1000)], 512)
    """
    given = integers("lengths", (lengths,) if isinstance(lengths, int) else lengths)
    integers("world, block", (world, block))
    reasons = []
    if any(length < 0 for length in given):
        reasons.append(f"lengths: expected lengths >= 0, got {list(given)}")
    if world < 1:
        reasons.append(f"world: expected at least 1, got {world}")
    if block < 1:
        reasons.append(f"block: expected at least 1, got {block}")
    if reasons:
        raise DspattnError(reasons)
    return _layout_of(given, world, block, as_flag("balanced", balanced))


def integers(name: str, numbers: Any) -> tuple[int, ...]:
    """The numbers, none of which is cut to be one."""
    try:
        if isinstance(numbers, str):
            raise TypeError
        return tuple(operator.index(number) for number in numbers)
    except TypeError:
        raise DspattnError([f"{name}: expected integers, got {numbers!r}"]) from None


@functools.lru_cache(maxsize=256)
def _layout_of(lengths: tuple[int, ...], world: int, block: int, balanced: bool) -> Layout:
    cut: list[list[Chunk]] = [[] for _ in range(world)]
    whole: list[list[Chunk]] = [[] for _ in range(world)]
    work = [0.0] * world  # scores to compute, as the square of the rows
    short = []
    for sequence, length in enumerate(lengths):
        blocks = -(-length // block)
        if len(lengths) > 1 and blocks < 2 * world:
            short.append(sequence)
            continue
        for rank, chunks in enumerate(_cut(sequence, length, blocks, world, block, balanced)):
            cut[rank] += chunks
            work[rank] += length * sum(chunk.rows for chunk in chunks)
    for sequence in sorted(short, key=lambda s: -lengths[s]):
        rank = min(range(world), key=lambda r: work[r])
        if lengths[sequence] > 0:
            whole[rank].append(Chunk(sequence, 0, lengths[sequence]))
            work[rank] += lengths[sequence] ** 2
    return Layout(
        lengths,
        world,
        block,
        balanced,
        tuple(tuple(chunks) for chunks in cut),
        tuple(tuple(sorted(chunks, key=lambda chunk: chunk.sequence)) for chunks in whole),
    )


def _cut(sequence: int, length: int, blocks: int, world: int, block: int, balanced: bool) -> list[list[Chunk]]:
    """Of each rank its chunks of one sequence, in order, neighbours joined."""
    parts = 2 * world if balanced else world
    chunks: list[list[Chunk]] = [[] for _ in range(world)]
    first = 0
    for part in range(parts):
        rank = part if part < world else parts - 1 - part
        last = first + blocks // parts + (part < blocks % parts)
        start, stop = first * block, min(last * block, length)
        first = last
        if stop <= start:
            continue
        if chunks[rank] and chunks[rank][-1].stop == start:
            start = chunks[rank].pop().start
        chunks[rank].append(Chunk(sequence, start, stop))
    return chunks


def _joined(parts: list[Tensor]) -> Tensor:
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64, device="cpu")
