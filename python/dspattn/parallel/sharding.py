"""Cutting tensors over ranks and joining them again."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .._inputs import require_kinds
from ..errors import DspattnError
from .layout import Layout, integers, layout_of
from .transfers import Ranks


def shard(
    x: Tensor,
    dim: int,
    group: Any = None,
    *,
    cu_seqlens: Tensor | Sequence[int] | None = None,
    layout: Layout | None = None,
) -> Tensor:
    """This rank's rows of a tensor that every rank has whole.

    Args:
        x: any tensor; ``dim`` is the sequence's.
        dim: the dimension to cut.
        group: a process group, a ``DeviceMesh`` of one dimension, or None for the default group.
        cu_seqlens: of a packed batch along ``dim``, where each sequence starts, and the end.
        layout: another way to cut than the default, from :func:`layout_of`.

    Example:
        >>> shard(torch.arange(5), 0)  # without torch.distributed, a group of one
        tensor([0, 1, 2, 3, 4])
    """
    _require_dim("x", x, dim)
    ranks = Ranks(group)
    chosen = resolve(ranks, x.shape[dim], cu_seqlens, layout)
    return x.index_select(dim, chosen.index(ranks.rank).to(x.device))


def unshard(
    x: Tensor,
    dim: int,
    group: Any = None,
    *,
    cu_seqlens: Tensor | Sequence[int] | None = None,
    layout: Layout | None = None,
) -> Tensor:
    """The whole tensor, on every rank, from the pieces that :func:`shard` cut.

    Differentiable for results that every rank computes alike: the gradient of a piece is its part of this rank's own
    gradient of the whole.
    """
    ranks = Ranks(group)
    error: Exception | None = None
    facts: dict[str, Any] = {}
    rows: list[int] = [0]
    try:
        _require_dim("x", x, dim)
        require_pieces({"x": x})
        dim %= x.dim()
        facts = {
            "x.shape": [extent for i, extent in enumerate(x.shape) if i != dim],
            "x.dtype": x.dtype,
            "x.device": ranks.route(x),
            "dim": dim,
            "cu_seqlens": None if cu_seqlens is None else lengths_of(cu_seqlens),
            "layout": brief(layout),
        }
        rows = [x.shape[dim]]
    except Exception as refusal:  # whatever it is, the other ranks wait for this one
        error = refusal
    device = x.device if isinstance(x, Tensor) else None
    every = ranks.agree("unshard", error, facts, rows, device)[:, 0].tolist()
    chosen = resolve(ranks, sum(every), cu_seqlens, layout)
    check_rows("x", every, chosen)
    return _Unshard.apply(ranks, chosen, dim, x)


def shard_labels(
    labels: Tensor,
    dim: int = -1,
    group: Any = None,
    *,
    ignore: int = -100,
    cu_seqlens: Tensor | Sequence[int] | None = None,
    layout: Layout | None = None,
) -> Tensor:
    """This rank's rows of the labels of a causal language model, each moved one place ahead *before* the cut: what a
    row is to predict is the next token of its sequence, which another rank may hold. The last row of a sequence has
    ``ignore``.

    transformers takes them as ``shift_labels``; see docs/parallel.md.

    Example:
        >>> shard_labels(torch.tensor([[3, 4, 5]]))
        tensor([[   4,    5, -100]])
    """
    _require_dim("labels", labels, dim)
    integers("ignore", (ignore,))
    ranks = Ranks(group)
    chosen = resolve(ranks, labels.shape[dim], cu_seqlens, layout)
    moved = labels.roll(-1, dim)
    ends = [end - 1 for begin, end in itertools.pairwise(chosen.begins()) if end > begin]
    moved = moved.index_fill(dim, torch.tensor(ends, dtype=torch.int64, device=labels.device), ignore)
    return moved.index_select(dim, chosen.index(ranks.rank).to(labels.device))


def position_ids(
    length: int | Sequence[int], group: Any = None, *, layout: Layout | None = None, device: Any = None
) -> Tensor:
    """Of each of this rank's rows its position within its own sequence: int64 ``[rows]``.

    Args:
        length: rows of the whole sequence, or of each sequence of a packed batch.
        group: as in :func:`shard`.
        layout: as in :func:`shard`.
        device: where the result goes.
    """
    ranks = Ranks(group)
    wanted = layout_of(length, ranks.world)
    chosen = resolve(ranks, wanted.total, None, layout)
    if chosen.lengths != wanted.lengths:
        raise DspattnError([f"layout: expected one of lengths {wanted.lengths}, got one of {chosen.lengths}"])
    return chosen.positions(ranks.rank).to(torch.get_default_device() if device is None else device)


def resolve(ranks: Ranks, total: int, cu_seqlens: Tensor | Sequence[int] | None, layout: Layout | None) -> Layout:
    """The layout that is meant, which must fit the rows that there are."""
    brief(layout)
    if layout is None:
        layout = layout_of(total if cu_seqlens is None else lengths_of(cu_seqlens), ranks.world)
    elif cu_seqlens is not None and layout.lengths != lengths_of(cu_seqlens):
        raise DspattnError([f"cu_seqlens: expected lengths {layout.lengths}, got {lengths_of(cu_seqlens)}"])
    reasons = []
    if layout.world != ranks.world:
        reasons.append(f"layout: expected one of {ranks.world} ranks, got one of {layout.world}")
    if layout.total != total:
        what = "cu_seqlens" if cu_seqlens is not None else "layout"
        reasons.append(f"{what}: expected {total} rows, those of all ranks together, got {layout.total}")
    if reasons:
        raise DspattnError(reasons)
    return layout


def require_pieces(tensors: dict[str, Tensor]) -> None:
    """Raise for what fails when it is to travel, perhaps on one rank alone."""
    require_kinds(tensors)
    reasons = []
    for name, tensor in tensors.items():
        if hasattr(tensor, "device_mesh"):
            reasons.append(f"{name}: expected this rank's piece, got a DTensor (its to_local() is one)")
        elif tensor.is_meta:
            reasons.append(f"{name}: expected a tensor with memory, got one on meta")
    if reasons:
        raise DspattnError(reasons)


def brief(layout: Any) -> Any:
    """What says a layout in short, None where there is none. Raises unless it is what layout_of() makes."""
    if layout is None:
        return None
    if not isinstance(layout, Layout):
        raise DspattnError([f"layout: expected one of layout_of(), got {type(layout).__name__}"])
    given = (layout.lengths, layout.world, layout.block, layout.balanced)
    if layout != layout_of(layout.lengths, layout.world, block=layout.block, balanced=layout.balanced):
        raise DspattnError([f"layout: expected one of layout_of(), got one with other chunks for {given}"])
    return given


def _require_dim(name: str, tensor: Any, dim: int) -> None:
    if not isinstance(tensor, Tensor):
        raise DspattnError([f"{name}: expected a tensor, got {type(tensor).__name__}"])
    if not isinstance(dim, int) or not -tensor.dim() <= dim < tensor.dim():
        raise DspattnError([f"dim: expected one of {name}'s {tensor.dim()} dimensions, got {dim!r}"])


def read_lengths(cu_seqlens: Tensor | Sequence[int]) -> list[int]:
    if not isinstance(cu_seqlens, Tensor):
        return list(integers("cu_seqlens", cu_seqlens))
    if cu_seqlens.is_meta:
        raise DspattnError(["cu_seqlens: expected lengths that can be read, got a tensor on meta"])
    return list(integers("cu_seqlens", cu_seqlens.tolist()))


def lengths_of(cu_seqlens: Tensor | Sequence[int]) -> tuple[int, ...]:
    given = read_lengths(cu_seqlens)
    lengths = tuple(int(end) - int(begin) for begin, end in itertools.pairwise(given))
    if not given or given[0] != 0 or any(length < 0 for length in lengths):
        raise DspattnError([f"cu_seqlens: expected [batch + 1] integers from 0 on that never decrease, got {given}"])
    return lengths


def check_rows(name: str, rows: Sequence[int], layout: Layout) -> None:
    """That each rank has the rows that the layout gives it."""
    wanted = [layout.rows(rank) for rank in range(layout.world)]
    if list(rows) != wanted:
        raise DspattnError(
            [f"{name}: expected the pieces that shard() cuts, {wanted} rows of {layout.total}, got {list(rows)}"]
        )


class _Unshard(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ranks: Ranks, layout: Layout, dim: int, x: Tensor) -> Tensor:
        ctx.index, ctx.dim = layout.index(ranks.rank).to(x.device), dim
        parts = ranks.gather(x.movedim(dim, 0).contiguous(), [layout.rows(rank) for rank in range(ranks.world)])
        return torch.cat(parts)[layout.inverse().to(x.device)].movedim(0, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, None, grad.index_select(ctx.dim, ctx.index)
