"""The batching rule of the attention operators: what ``torch.vmap`` maps over becomes part of the batch.

In a packed batch, which has its sequences laid end to end, it becomes part of the heads instead. Only where the
sequences' own lengths are mapped is there nothing to join them to, and the calls run one after the other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ._schema import ProblemArguments
from .errors import DspattnError

# What joins nothing where it is mapped: samples run one by one.
APART = ("cu_q", "cu_k", "sinks", "dropout_state")

Run = Callable[..., tuple[Tensor, ...]]
Rule = Callable[..., tuple[tuple[Tensor, ...], tuple[int, ...]]]


def batching_rule(run: Run, extras: int) -> Rule:
    """The rule of ``run(*extras, *problem)``, whose extra tensors and results are all [batch, heads, ...], but for
    empty results and those of samples that ran one by one."""

    def rule(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        size: int = info.batch_size
        if size == 0:
            raise DspattnError(["torch.vmap: expected a mapped dimension of 1 or more, got 0"])
        problem = ProblemArguments(*arguments[extras:])
        mapped = ProblemArguments(*in_dims[extras:])
        if _apart(arguments[:extras], problem, mapped):
            samples = [run(*_sample(arguments, in_dims, i)) for i in range(size)]
            return tuple(torch.stack(one) for one in zip(*samples, strict=True)), (0,) * len(samples[0])
        axis = 0 if problem.cu_q is None else 1
        whole = [
            _joined(t, dim, size, axis) if isinstance(t, Tensor) else t
            for t, dim in zip(arguments[:extras], in_dims[:extras], strict=True)
        ]
        results = run(*whole, *_joined_problem(problem, mapped, size, axis))
        parted = []
        for one in results:  # an empty result, of something not wanted, has one dimension and is every sample's
            many = one.unsqueeze(0).expand(size, -1) if one.dim() == 1 else None
            parted.append(one.unflatten(axis, (size, one.shape[axis] // size)) if many is None else many)
        return tuple(parted), tuple(0 if one.dim() == 1 else axis for one in results)

    return rule


def _apart(extras: tuple[Any, ...], problem: ProblemArguments, mapped: ProblemArguments) -> bool:
    """Whether samples cannot be one call: dropout counts batch and heads, sinks have one entry for each head, pages and
    sums of a cache are not joined, and gradients of biases and sinks (flags among the extras) are sums over the batch.
    """
    wanted = any(extra is True for extra in extras)
    per_head = problem.sinks is not None and problem.cu_q is not None
    cached = problem.block_table is not None or problem.value_sums is not None
    return wanted or per_head or cached or problem.dropout > 0 or any(getattr(mapped, n) is not None for n in APART)


def _sample(arguments: tuple[Any, ...], in_dims: tuple[Any, ...], i: int) -> list[Any]:
    return [given if dim is None else given.select(dim, i) for given, dim in zip(arguments, in_dims, strict=True)]


def _joined_problem(problem: ProblemArguments, mapped: ProblemArguments, size: int, axis: int) -> ProblemArguments:
    dims: dict[str, Any] = mapped._asdict()
    q_extents = list(problem.q.shape)
    if dims["q"] is not None:
        del q_extents[dims["q"]]
    full = q_extents[axis]  # the batch or the heads of one sample
    joined: dict[str, Any] = {name: _joined(getattr(problem, name), dims[name], size, axis) for name in ("q", "k", "v")}
    for name in ("allowed", "bias"):
        mask = getattr(problem, name)
        if mask is not None:
            joined[name] = _joined_mask(mask, dims[name], size, axis, full)
    if problem.key_lengths is not None:
        joined["key_lengths"] = _joined(problem.key_lengths, dims["key_lengths"], size, 0)
    return problem._replace(**joined)


def _joined(tensor: Tensor, dim: int | None, size: int, axis: int) -> Tensor:
    """The mapped dimension in front of `axis` and one with it; a tensor that is not mapped is the same for all."""
    if dim is None:
        extents = list(tensor.shape)
        tensor = tensor.unsqueeze(axis).expand(*extents[:axis], size, *extents[axis:])
    else:
        tensor = tensor.movedim(dim, axis)
    return tensor.flatten(axis, axis + 1)


def _joined_mask(mask: Tensor, dim: int | None, size: int, axis: int, full: int) -> Tensor:
    """As above; an extent of 1 broadcasts, and stays so where it can."""
    if dim is None:
        return mask if mask.shape[axis] == 1 else _joined(mask, None, size, axis)
    mask = mask.movedim(dim, axis)
    extents = list(mask.shape)
    extents[axis + 1] = full
    return mask.expand(extents).flatten(axis, axis + 1)
