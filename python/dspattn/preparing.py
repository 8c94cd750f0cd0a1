"""What transformers do to queries and keys before attention, in one pass over memory: RMS norm of each head's vector,
rotary embedding, and several parts (text and image) joined into one sequence."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor

from . import _ops
from ._flags import refuse_flags
from ._inputs import explained, require_known
from ._not_offered import not_scriptable, refuse_tangents
from .errors import DspattnError

Pairs = Literal["neighbours", "halves"]
Parts: TypeAlias = "Tensor | Sequence[Tensor]"
PAIRS = ("neighbours", "halves")


@not_scriptable
def norm_rope(
    query: Parts,
    key: Parts,
    *,
    query_weight: Parts | None = None,
    key_weight: Parts | None = None,
    eps: float | None = None,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    pairs: Pairs = "neighbours",
) -> tuple[Tensor, Tensor]:
    """Queries and keys as attention takes them: normalised head by head, turned by their positions, in one sequence.

    A vector ``x`` becomes ``y = x / sqrt(mean(x²) + eps) * weight``, and of two columns a < b that are turned together
    ``y_a cos_a - y_b sin_a`` and ``y_b cos_b + y_a sin_b``. Arithmetic is in fp32; ``y`` and the result are rounded to
    the inputs' type, as ``torch.nn.RMSNorm`` and a rotation after it do. Only the order in which squares are added is
    another: a factor of the norm may differ in its last bit, and an element now and then by one rounding.

    Where gradients are wanted, and in ``torch.vmap``, PyTorch's own operators do it.

    Args:
        query: ``[batch, n, heads, d]`` with d up to 256, or several such parts of one sequence in their order.
        key: the same; as many tokens as the queries, heads of any number.
        query_weight: ``[d]`` of the norm, in the queries' type; one for each part where there are several.
        key_weight: the same for the keys.
        eps: of the norm; default: no norm.
        cos: float32 ``[positions, d]``, row i for token i of the joined sequence; default: no rotation.
        sin: the same.
        pairs: which columns are turned together: ``"neighbours"`` (2i and 2i + 1, as in Flux) or ``"halves"`` (i and
            i + d/2, as in Llama).

    Returns:
        Queries and keys, ``[batch, n of all parts, heads, d]``.

    Example:
        >>> text, image = torch.randn(1, 5, 2, 8), torch.randn(1, 7, 2, 8)
        >>> angles = torch.rand(12, 8)
        >>> q, k = norm_rope([text, image], [text, image], eps=1e-6, cos=angles.cos(), sin=angles.sin())
        >>> q.shape
        torch.Size([1, 12, 2, 8])
    """
    if not isinstance(pairs, str) or pairs not in PAIRS:
        raise DspattnError([f"pairs: expected one of {', '.join(PAIRS)}, got {pairs!r}"])
    queries, keys = _listed("query", query), _listed("key", key)
    of_queries, of_keys = _listed("query_weight", query_weight), _listed("key_weight", key_weight)
    given = {"query": queries, "key": keys}
    empty = [f"{name}: expected at least one part, got none" for name, parts in given.items() if not parts]
    if empty:
        raise DspattnError(empty)
    for name, parts in (given | {"query_weight": of_queries, "key_weight": of_keys}).items():
        for part in parts:
            require_known(name, part)
    for name, table in (("cos", cos), ("sin", sin)):
        if table is not None:
            require_known(name, table)
    refuse_flags(eps=eps)
    tensors = (*queries, *keys, *of_queries, *of_keys, *(t for t in (cos, sin) if t is not None))
    refuse_tangents(tensors)
    in_pytorch = _mapped(tensors) or (torch.is_grad_enabled() and any(t.requires_grad for t in tensors))
    try:
        if not in_pytorch:
            return _ops.norm_rope(queries, keys, of_queries, of_keys, eps, cos, sin, pairs == "halves")
        if not torch.compiler.is_compiling():
            _check(queries, keys, of_queries, of_keys, eps, cos, sin)
    except RuntimeError as error:
        translated = explained(error, {"eps": eps})
        if isinstance(translated, DspattnError):
            translated = DspattnError(_in_python_names(reason, len(queries)) for reason in translated.reasons)
        raise translated from None
    return (
        plain(queries, of_queries, eps, cos, sin, pairs),
        plain(keys, of_keys, eps, cos, sin, pairs),
    )


def _check(
    queries: list[Tensor],
    keys: list[Tensor],
    of_queries: list[Tensor],
    of_keys: list[Tensor],
    eps: float | None,
    cos: Tensor | None,
    sin: Tensor | None,
) -> None:
    """What the operator says to such a call, for one that PyTorch's own would serve in part or broadcast: it is called
    with a batch of none."""

    def without_batch(parts: list[Tensor]) -> list[Tensor]:
        return [torch.empty((0, *part.shape[1:]), dtype=part.dtype, device=part.device) for part in parts]

    def own(tensor: Tensor | None) -> Tensor | None:
        if tensor is None or not is_functorch_wrapped_tensor(tensor):
            return tensor
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)

    weights: Any = [[own(weight) for weight in each] for each in (of_queries, of_keys)]
    with torch._C._AutoDispatchBelowAutograd():
        _ops.norm_rope(without_batch(queries), without_batch(keys), *weights, eps, own(cos), own(sin), False)


def plain(
    parts: Sequence[Tensor],
    weights: Sequence[Tensor],
    eps: float | None,
    cos: Tensor | None,
    sin: Tensor | None,
    pairs: Pairs,
) -> Tensor:
    """The same of queries or of keys in PyTorch's own operators."""
    if eps is not None:
        d = parts[0].shape[-1:]
        parts = [torch.nn.functional.rms_norm(x, d, weights[i] if weights else None, eps) for i, x in enumerate(parts)]
    x = torch.cat(list(parts), 1) if len(parts) > 1 else parts[0]
    if cos is None or sin is None:
        return x
    n = x.shape[1]
    if pairs == "halves":
        first, second = x.chunk(2, -1)
        beside = torch.cat([-second, first], -1)
    else:
        beside = torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2)
    return (x.float() * cos[:n, None] + beside.float() * sin[:n, None]).to(x.dtype)


def _listed(name: str, parts: Parts | None) -> list[Tensor]:
    if parts is None:
        return []
    if isinstance(parts, Tensor):
        return [parts]
    if not isinstance(parts, (list, tuple)):
        raise DspattnError([f"{name}: expected a tensor or a list of tensors, got {type(parts).__name__}"])
    return list(parts)


def _mapped(tensors: Sequence[Tensor]) -> bool:
    """Whether torch.vmap or another of PyTorch's transforms holds one of them."""
    return not torch.compiler.is_compiling() and any(is_functorch_wrapped_tensor(tensor) for tensor in tensors)


def _in_python_names(reason: str, queries: int) -> str:
    """The library counts the parts of queries and keys through."""

    def renamed(match: re.Match[str]) -> str:
        index, field = int(match[1]), match[2]
        name, own = ("query", index) if index < queries else ("key", index - queries)
        return f"{name}_weight[{own}]" if field == "weight" else f"{name}[{own}]"

    return re.sub(r"parts\[(\d+)\]\.?(x|out|weight)?", renamed, reason)
