"""Whether the library serves a problem, asked while torch.compile traces it.

The operator itself checks its arguments when it runs, which in compiled code is too late to choose another way, and in
the C++ library's words. So tracing calls it once on tensors of the same types and sizes but with an empty batch: that
checks everything but the tensors' elements and strides, and computes nothing.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor

from . import _ops
from ._schema import TENSORS, ProblemArguments
from .errors import DspattnError

MAX_HEAD_DIM = 512  # of every kernel, kMaxHeadDim of the C++ library
BATCHED = ("q", "k", "v", "allowed", "bias", "key_lengths")  # whose first dimension is the batch
Kind = tuple[tuple[int | None, ...], torch.dtype, torch.device]  # of a tensor; None: a size that is not fixed


def require_served(problem: ProblemArguments) -> None:
    """Raise the reasons that the library has against a problem. For code that is being traced."""
    kinds: list[Kind | None] = []
    tensors: tuple[Any, ...] = problem[:TENSORS]
    servable = _is_servable(problem)
    for tensor in tensors:
        if tensor is None:
            kinds.append(None)
            continue
        shape = tensor.shape if servable else [operator.index(size) for size in tensor.shape]  # which fixes them
        kinds.append((_fixed(shape), tensor.dtype, tensor.device))
    reasons = _reasons(tuple(kinds), _fixed(problem[TENSORS:]))
    if reasons:
        raise DspattnError(reasons.split("\n"))


def _is_servable(problem: ProblemArguments) -> bool:
    """Whether the sizes may be served, as far as they decide it. Of sizes that are not fixed each condition becomes one
    of the compiled code: a call that does not meet it is traced anew, and refused then."""
    (_, heads, _, d), (_, kv_heads, _, d_k), (_, _, _, d_v) = (t.shape for t in (problem.q, problem.k, problem.v))
    return bool(d <= MAX_HEAD_DIM and d_v <= MAX_HEAD_DIM and d == d_k and kv_heads > 0 and heads % kv_heads == 0)


def _fixed(values: Any) -> tuple[Any, ...]:
    """The values, with None for numbers that the compiled code takes as they come. A tracer shows those as plain ints
    and floats; only PyTorch's own function tells."""
    from torch.fx.experimental.symbolic_shapes import has_static_value

    return tuple([v if v is None or isinstance(v, str) or has_static_value(v) else None for v in values])


def _reasons(kinds: tuple[Kind | None, ...], options: tuple[Any, ...]) -> str:
    """What the operator says to such a problem, one reason a line."""
    names = dict(zip(ProblemArguments._fields, kinds, strict=False))
    sizes = _sizes({name: kind[0] for name, kind in names.items() if kind is not None})
    if sizes is None:
        return ""
    with torch.no_grad(), torch._C.DisableTorchFunction(), torch._C._AutoDispatchBelowAutograd():
        tensors = [None if kind is None else _empty(sizes[name], kind) for name, kind in names.items()]
        fixed = ProblemArguments(*tensors, *options)  # type: ignore[arg-type]
        defaults = ProblemArguments._field_defaults
        try:
            _ops.attention(*(defaults.get(n) if v is None else v for n, v in fixed._asdict().items()))
        except RuntimeError as error:
            refusal = _ops.translated(error)
            return "\n".join(refusal.reasons) if isinstance(refusal, DspattnError) else ""
    return ""


# What torch.compiler.assume_constant_result does, which would load the compiler with the package.
_reasons._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _sizes(given: dict[str, Any]) -> dict[str, Any] | None:
    """The sizes that the call is made with: no batch, or no rows where it is packed. None: nothing can be asked."""
    if any(None in shape for shape in given.values()):
        given = _one_of_any_size(given)
    batch, packed = given["q"][0], "cu_q" in given
    if "block_table" in given or "value_sums" in given or any(None in shape for shape in given.values()):
        return None
    if packed:
        return {name: (*shape[:2], 0, shape[3]) if name in ("q", "k", "v") else shape for name, shape in given.items()}
    of_batch = {name: shape for name, shape in given.items() if name in BATCHED}
    if any(shape[0] not in (1, batch) for shape in of_batch.values()):
        return None  # the reason would name the empty batch
    return given | {name: (0, *shape[1:]) for name, shape in of_batch.items() if shape[0] == batch}


def _one_of_any_size(given: dict[str, Any]) -> dict[str, Any]:
    """Sizes for every tensor where some are not fixed: those that are, and small ones that agree with each other."""
    heads, kv_heads, d, d_k, d_v = (
        given[name][dim] for name, dim in (("q", 1), ("k", 1), ("q", 3), ("k", 3), ("v", 3))
    )
    if None in (heads, kv_heads):
        heads = kv_heads = 1
    if None in (d, d_k):
        d = d_k = 64
    d_v = 64 if d_v is None else d_v
    sizes = {"q": (1, heads, 1, d), "k": (1, kv_heads, 1, d_k), "v": (1, kv_heads, 1, d_v), "sinks": (heads,)}
    sizes |= {"allowed": (1, 1, 1, 1), "bias": (1, 1, 1, 1), "key_lengths": (1,), "cu_q": (2,), "cu_k": (2,)}
    return given | {name: size for name, size in sizes.items() if name in given}


def _empty(shape: Any, kind: Kind) -> Tensor:
    """One element stands for all, where there are any: masks may be large."""
    return torch.zeros(1 if 0 not in shape else shape, dtype=kind[1], device=kind[2]).expand(shape)
