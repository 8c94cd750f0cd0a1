"""Distributed tensors (``torch.distributed.tensor.DTensor``): how the attention operators may be sharded.

The batch and the heads may be split over the devices of a mesh, each of its dimensions in its own way; whatever else
the tensors are split by is gathered first, as DTensor does for PyTorch's own operators. Query heads that share a key
head stay on one device; with a single key head for all of them, each device holds it whole.

It registers itself when the package first sees a DTensor, so that nothing distributed is imported before.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

from .. import _ops
from .._schema import BackwardArguments, ProblemArguments


def register_if_distributed(kind: type) -> None:
    """Register where tensors of this class are distributed ones."""
    loaded = sys.modules.get("torch.distributed.tensor")  # who has a DTensor has loaded it
    if loaded is not None and issubclass(kind, loaded.DTensor):
        _register()


@functools.cache
def _register() -> None:
    from torch.distributed.tensor.experimental import register_sharding

    register_sharding(_ops.attention)(_forward)
    register_sharding(_ops.attention_backward)(_backward)


Sharding = tuple[list[Any], list[Any]]  # placements of the results and of the arguments, for one dimension of the mesh


def _forward(*arguments: Any) -> list[Sharding]:
    return [([outputs, outputs], inputs) for outputs, _, inputs in _shardings(ProblemArguments(*arguments))]


def _backward(*arguments: Any) -> list[Sharding]:
    """The gradients are split as what they are gradients of; those of something that is whole on every device, a key
    head, a bias or sinks, are sums over the devices."""
    from torch.distributed.tensor import Partial, Replicate

    before = len(BackwardArguments._fields)
    given = BackwardArguments(*arguments[:before])
    problem = ProblemArguments(*arguments[before:])
    names = problem._fields
    found: list[Sharding] = []
    for outputs, d_key, inputs in _shardings(problem):
        placed = dict(zip(names, inputs, strict=True))
        results = [outputs, d_key, d_key]
        for name, wanted in (("bias", given.wants_d_bias), ("sinks", given.wants_d_sinks)):
            whole = not wanted or not outputs.is_shard()  # an empty tensor is whole
            summed = Partial() if wanted and placed[name] == Replicate() else placed[name]
            results.append(Replicate() if whole else summed)
        tensors = [outputs] * 3 + [None if given.d_lse is None else outputs, None, None]
        found.append((results, tensors + inputs))
    return found


def _shardings(problem: ProblemArguments) -> list[tuple[Any, Any, list[Any]]]:
    """(placement of what is shaped as q, placement of the gradients of k and v, placements of the arguments)."""
    from torch.distributed.tensor import Partial, Replicate, Shard

    whole, batch, heads = Replicate(), Shard(0), Shard(1)
    found: list[tuple[Any, Any, list[Any]]] = [(whole, whole, _placements(problem, whole, whole, whole))]
    if problem.dropout > 0:  # its random numbers belong to places in the whole batch
        return found
    if problem.cu_q is None and problem.q.shape[0] > 1:
        found.append((batch, batch, _placements(problem, batch, batch, batch)))
    n_heads, n_kv_heads = problem.q.shape[1], problem.k.shape[1]
    devices: int = problem.q.mesh.size()  # type: ignore[attr-defined]
    if n_heads == n_kv_heads or n_kv_heads % devices == 0:
        found.append((heads, heads, _placements(problem, heads, heads, whole)))
    elif n_kv_heads == 1:
        found.append((heads, Partial(), _placements(problem, heads, whole, whole)))
    return found


def _placements(problem: ProblemArguments, query: Any, key: Any, lengths: Any) -> list[Any]:
    """One for every argument of the operator; None where there is no tensor."""
    from torch.distributed.tensor import Replicate, Shard

    placed: dict[str, Any] = dict.fromkeys(problem._fields)
    placed.update(q=query, k=key, v=key)
    for name in ("allowed", "bias"):
        mask = getattr(problem, name)
        if mask is not None:
            placed[name] = _of_mask(mask, query)
    for name in ("key_lengths", "cu_q", "cu_k"):
        if getattr(problem, name) is not None:
            placed[name] = lengths
    if problem.sinks is not None:
        placed["sinks"] = Shard(0) if query == Shard(1) else Replicate()
    if problem.dropout_state is not None:
        placed["dropout_state"] = Replicate()
    return list(placed.values())


def _of_mask(mask: Any, query: Any) -> Any:
    """As the query is split, unless the mask broadcasts there."""
    from torch.distributed.tensor import Replicate

    return query if query.is_shard() and mask.shape[query.dim] > 1 else Replicate()
