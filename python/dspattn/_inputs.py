"""What the functions of the package make of their arguments before the operator sees them: four dimensions, masks of
one kind, lengths of one type. Whatever is not understood is refused by name."""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from . import _ops
from ._flags import _kind_name
from .errors import DspattnError

Alignment = Literal["top_left", "bottom_right"]
Window = int | tuple[int | None, int | None] | list[int | None] | None

INT32_MAX = 2**31 - 1
_FLOATS = (torch.float32, torch.float16, torch.bfloat16)
_LENGTH_TYPES = (torch.int32, torch.int64, torch.int16, torch.int8, torch.uint8)
# Tensors whose elements are all there is to them. Others may mean something that is not in their memory.
_PLAIN = (Tensor, torch.nn.Parameter)


def is_plain(*tensors: Any) -> bool:
    """Whether all are tensors of PyTorch's own class."""
    return all(type(tensor) in _PLAIN for tensor in tensors)


def require_known(name: str, tensor: Any) -> None:
    """Raise unless the elements of the tensor are what it means, or its class is asked about every operator.

    A subclass that only overrides what PyTorch's functions do with it (``__torch_function__``) may hold anything: the
    memory of :class:`torch.nn.attention.bias.CausalBias` is not even initialised.
    """
    kind = type(tensor)
    if kind in _PLAIN:
        return
    if not isinstance(tensor, Tensor):
        raise DspattnError([f"{name}: expected a tensor, got {_kind_name(kind)}"])
    if tensor.is_nested:
        raise DspattnError([_nested(name)])
    if kind.__torch_dispatch__ is Tensor.__torch_dispatch__:
        raise DspattnError(
            [
                f"{name}: expected a plain tensor, got the subclass {_kind_name(kind)}, whose meaning is not known "
                "here; .as_subclass(torch.Tensor) says that its elements are all it means"
            ]
        )
    from .integrations.dtensor import register_if_distributed

    register_if_distributed(kind)


def _causal_bias_alignment(name: str, mask: Any, q: Tensor, k: Tensor) -> bool | None:
    """Whether a mask that is one of torch.nn.attention.bias' causal biases is aligned top-left; None: it is no such."""
    bias = sys.modules.get("torch.nn.attention.bias")  # who has such a mask has loaded it
    if bias is None or not isinstance(mask, bias.CausalBias):
        return None
    if q.dim() < 2 or k.dim() < 2:
        raise DspattnError([f"query, key: expected at least 2 dimensions, got {list(q.shape)}, {list(k.shape)}"])
    n_q, n_k = q.shape[-2], k.shape[-2]
    if (mask.seq_len_q, mask.seq_len_kv) != (n_q, n_k):
        given = f"{mask.seq_len_q} x {mask.seq_len_kv}"
        raise DspattnError([f"{name}: expected a causal bias for {n_q} queries and {n_k} keys, got one for {given}"])
    return bool(mask.variant == bias.CausalVariant.UPPER_LEFT)


def take_causal_biases(
    masks: dict[str, Tensor | None], q: Tensor, k: Tensor, is_causal: bool, top_left: bool, window: Window
) -> tuple[bool, bool]:
    """(is_causal, top_left) once the masks that are causal biases are taken out of `masks`."""
    for name, mask in masks.items():
        if mask is None or type(mask) in _PLAIN:
            continue
        aligned = _causal_bias_alignment(name, mask, q, k)
        if aligned is None:
            require_known(name, mask)
            continue
        if is_causal:
            raise DspattnError([f"is_causal: expected False beside the causal bias in {name}, got True"])
        if window is not None and aligned != top_left and q.shape[-2] != k.shape[-2]:
            expected, given = _alignment_name(aligned), _alignment_name(top_left)
            raise DspattnError([f"alignment: expected {expected}, as {name} has, for the window, got {given}"])
        masks[name], is_causal, top_left = None, True, aligned
    return is_causal, top_left


def _alignment_name(top_left: bool) -> str:
    return '"top_left"' if top_left else '"bottom_right"'


def parse_alignment(alignment: str) -> bool:
    """True for top_left."""
    if isinstance(alignment, str) and alignment in ("top_left", "bottom_right"):
        return alignment == "top_left"
    raise DspattnError([f'alignment: expected "top_left" or "bottom_right", got {alignment!r}'])


def parse_window(window: Window) -> tuple[int | None, int | None]:
    """The two sides of a window, None for no bound."""
    if window is None:
        return None, None
    if not isinstance(window, (tuple, list)):
        window = (window, window)
    if len(window) != 2:
        raise DspattnError([f"window: expected (left, right), got {window!r}"])
    return _side(window, 0), _side(window, 1)


def _side(window: Any, i: int) -> int | None:
    side = window[i]
    if side is None or isinstance(side, torch.SymInt):
        return side  # type: ignore[return-value]  # as PyTorch's own annotations have it, an int
    try:
        number = side if isinstance(side, int) else operator.index(side)
    except TypeError:
        number = None
    if number is None or isinstance(side, bool) or not -(2**63) <= number < 2**63:
        raise DspattnError([f"window[{i}]: expected a 64-bit integer or None, got {side!r}"])
    return int(number)


def wants_fp32(query: Tensor, out_dtype: torch.dtype) -> bool:
    """Whether results are to be float32 whatever the inputs' type."""
    if not isinstance(out_dtype, torch.dtype):
        raise DspattnError([f"out_dtype: expected a torch.dtype or None, got {out_dtype!r}"])
    if out_dtype == torch.float32:
        return True
    if out_dtype == query.dtype:
        return False
    names = [str(dtype).removeprefix("torch.") for dtype in (query.dtype, out_dtype)]
    own = "" if query.dtype == torch.float32 else f"the query's {names[0]} or "
    raise DspattnError([f"out_dtype: expected {own}float32, got {names[1]}"])


def lengths_as_int32(name: str, lengths: Any) -> Tensor:
    """Lengths in the operator's type. What does not fit raises where it can be read without waiting for a device; on a
    GPU it becomes the largest length there is, which the kernels cut to the tensor's own."""
    require_known(name, lengths)
    if lengths.dtype == torch.int32:
        return lengths
    if lengths.dtype not in _LENGTH_TYPES:
        given = str(lengths.dtype).removeprefix("torch.")
        raise DspattnError([f"{name}.dtype: expected int32 or int64, got {given}"])
    if lengths.dtype != torch.int64:
        return lengths.to(torch.int32)
    if _can_be_read(lengths) and lengths.numel() > 0:
        for reach in torch.aminmax(lengths):
            if not -INT32_MAX <= (value := int(reach)) <= INT32_MAX:
                place = (lengths.flatten() == value).nonzero()[0].item()
                raise DspattnError([f"{name}[{place}]: expected at most {INT32_MAX}, got {value}"])
        return lengths.to(torch.int32)
    return lengths.clamp(-INT32_MAX, INT32_MAX).to(torch.int32)


def _can_be_read(tensor: Tensor) -> bool:
    if torch.compiler.is_compiling() or torch._C._functorch.peek_interpreter_stack() is not None:
        return False
    return type(tensor) in _PLAIN and tensor.is_cpu


def sinks_as_fp32(sinks: Any) -> Tensor | None:
    """Sinks in the operator's type."""
    if sinks is None:
        return None
    require_known("sinks", sinks)
    if sinks.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        given = str(sinks.dtype).removeprefix("torch.")
        raise DspattnError([f"sinks.dtype: expected float32, float16 or bfloat16, got {given}"])
    wide: Tensor = sinks.float()
    return wide


def longest(name: str, cumulative: Tensor) -> int:
    """The longest sequence of cumulative lengths; 0 of lengths without memory, which go with results without memory."""
    if cumulative.is_meta:
        return 0
    if torch._C._functorch.peek_interpreter_stack() is not None and torch._C._functorch.is_batchedtensor(cumulative):
        number = name.replace("cu_seqlens", "max_seqlen")
        raise DspattnError([f"{number}: expected a number where vmap maps {name}, got None"])
    return int(torch.diff(cumulative).max()) if cumulative.numel() > 1 else 0


def fits_operator(q: Tensor, k: Tensor, v: Tensor, enable_gqa: bool) -> bool:
    """Whether the tensors are what the operator takes: four dimensions, one batch, heads that match."""
    of_q, of_k, of_v = q.shape, k.shape, v.shape  # each access makes a new object
    if len(of_q) != 4 or len(of_k) != 4 or len(of_v) != 4:
        return False
    if of_k[0] != of_q[0] or of_v[0] != of_q[0] or of_k[1] != of_v[1]:
        return False
    return enable_gqa or of_k[1] == of_q[1]


def to_four_dims(q: Tensor, k: Tensor, v: Tensor, enable_gqa: bool) -> tuple[Tensor, Tensor, Tensor, tuple[int, ...]]:
    """[batch, heads, n, d] of each, and the leading dimensions the result is to have."""
    for name, tensor in (("query", q), ("key", k), ("value", v)):
        if tensor.dim() < 2:
            raise DspattnError([f"{name}: expected at least 2 dimensions [..., n, d], got {list(tensor.shape)}"])
    if enable_gqa and min(q.dim(), k.dim(), v.dim()) < 3:
        raise DspattnError(["enable_gqa: expected at least 3 dimensions [..., heads, n, d] of query, key and value"])
    heads_of = [t.shape[-3] if t.dim() > 2 else 1 for t in (q, k, v)]
    batch = _broadcast([t.shape[:-3] for t in (q, k, v)])
    if enable_gqa:
        heads, kv_heads = heads_of[0], max(heads_of[1:])
        fits = all(own in (1, kv_heads) for own in heads_of[1:])
    else:
        joined = _broadcast([(own,) for own in heads_of])
        fits = joined is not None
        heads = joined[0] if joined is not None else 0
        # One key head under many query heads needs no copy: that is grouped-query attention.
        kv_heads = max(heads_of[1:]) if max(heads_of[1:]) == 1 else heads
    if batch is None or not fits:
        shapes = ", ".join([str(list(t.shape)) for t in (q, k, v)])
        shared = not enable_gqa and heads_of[1] == heads_of[2] > 1 and heads_of[0] % heads_of[1] == 0
        hint = "; enable_gqa=True lets query heads share those of key and value" if shared else ""
        raise DspattnError(
            [f"query, key, value: expected leading dimensions that broadcast against each other, got {shapes}{hint}"]
        )
    lead = (*batch, heads) if max(q.dim(), k.dim(), v.dim()) > 2 else ()
    q, k, v = (
        t.expand(*batch, h, *t.shape[-2:]).reshape(math.prod(batch), h, *t.shape[-2:])
        for t, h in zip((q, k, v), (heads, kv_heads, kv_heads), strict=True)
    )
    return q, k, v, lead


def _broadcast(shapes: list[Any]) -> tuple[int, ...] | None:
    """The shape that all of them broadcast to, None where there is none. torch.broadcast_shapes raises, which code that
    torch.compile traces cannot catch."""
    out: list[int] = []
    for i in range(1, max([len(shape) for shape in shapes]) + 1):
        sizes = [shape[-i] for shape in shapes if len(shape) >= i]
        size = next((s for s in sizes if s != 1), 1)
        if any(s not in (1, size) for s in sizes):
            return None
        out.insert(0, size)
    return tuple(out)


def split_mask(
    mask: Tensor | None, q: Tensor, k: Tensor, lead: tuple[int, ...] | None, name: str = "attn_mask"
) -> tuple[Tensor | None, Tensor | None]:
    """The mask as (boolean, additive) with four dimensions; one of the two is None."""
    if mask is None:
        return None, None
    if mask.dim() > 4 or lead is not None:
        full = q.shape[:2] if lead is None else lead
        mask = _mask_to_four_dims(mask, full, q, k, name)
    while mask.dim() < 4:
        mask = mask.unsqueeze(0)
    if mask.dtype == torch.bool:
        return mask, None
    if not mask.is_floating_point():
        given = str(mask.dtype).removeprefix("torch.")
        flags = "bool, " if name == "attn_mask" else ""
        raise DspattnError([f"{name}.dtype: expected {flags}float32, float16 or bfloat16, got {given}"])
    return None, mask


def joined_biases(mask: Tensor | None, bias: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """What the floating ``attn_mask``, if there is one, and ``attn_bias`` add together, each of four dimensions. To the
    library they are one argument, so what it would say of them is said here, where it is known which is meant."""
    full = {"batch": q.shape[0], "heads": q.shape[1], "n_q": q.shape[2], "n_k": k.shape[2]}
    reasons = []
    for name, given in (("attn_mask", mask), ("attn_bias", bias)):
        if given is None:
            continue
        if given.device != q.device:
            reasons.append(f"{name}: expected a tensor on {q.device} as query is, got one on {given.device}")
        cast = q.device.type in ("cpu", "cuda") and torch.is_autocast_enabled(q.device.type)
        if given.dtype not in _FLOATS or not (cast or given.dtype in (torch.float32, q.dtype)):
            types = [str(dtype).removeprefix("torch.") for dtype in (q.dtype, given.dtype)]
            reasons.append(f"{name}.dtype: expected float32 or query's type {types[0]}, got {types[1]}")
        for i, (extent, size) in enumerate(full.items()):
            if given.shape[i] not in (1, size):
                reasons.append(f"{name}.shape[{i}]: expected 1 or {extent} = {size}, got {given.shape[i]}")
    if reasons:
        raise DspattnError(reasons)
    return bias if mask is None else mask + bias


def _mask_to_four_dims(mask: Tensor, lead: tuple[int, ...], q: Tensor, k: Tensor, name: str) -> Tensor:
    """The mask of inputs whose leading dimensions were joined: its own are broadcast and joined likewise."""
    full = (*lead, q.shape[-2], k.shape[-2])
    surplus = mask.dim() - len(full)
    batch = lead[:-1]
    extra = list(mask.shape[: max(surplus, 0)])
    own = list(mask.shape[max(surplus, 0) : -3])
    if any(n != 1 for n in extra) or any(a not in (1, b) for a, b in zip(reversed(own), reversed(batch), strict=False)):
        raise DspattnError([f"{name}: expected a shape that broadcasts to {list(full)}, got {list(mask.shape)}"])
    if surplus > 0:
        mask = mask.reshape(mask.shape[surplus:])
    if mask.dim() <= 3 or len(batch) <= 1:
        return mask
    return mask.expand(*batch, *mask.shape[-3:]).reshape(math.prod(batch), *mask.shape[-3:])


# What each argument of the functions is to be, where it is no tensor.
_KINDS: dict[str, tuple[tuple[type, ...], str]] = {
    "is_causal": ((bool,), "a bool"),
    "enable_gqa": ((bool,), "a bool"),
    "dropout_p": ((int, float), "a number"),
    "soft_cap": ((int, float, type(None)), "a number or None"),
    "scale": ((int, float, torch.SymInt, torch.SymFloat, type(None)), "a number or None"),
    "max_seqlen_q": ((int, torch.SymInt, type(None)), "an integer or None"),
    "max_seqlen_k": ((int, torch.SymInt, type(None)), "an integer or None"),
    "kernel": ((str,), "a string"),
    "offset": ((int, torch.SymInt), "an integer"),
    "eps": ((int, float, type(None)), "a number or None"),
}
FOREIGN_ERRORS = (RuntimeError, TypeError, AttributeError, OverflowError)  # of PyTorch, about what it was given
_OPTIONAL_TENSORS = ("attn_mask", "attn_bias", "key_lengths", "sinks", "sums", "cos", "sin")


def explained(error: Exception, arguments: Mapping[str, Any]) -> Exception:
    """An error of PyTorch as one that names the argument, where an argument is not even of the right kind."""
    reasons = [reason for name, given in arguments.items() if (reason := _wrong_kind(name, given))]
    if not reasons and isinstance(error, TypeError):  # a class that is asked about every operator, and has no answer
        reasons = [
            f"{name}: expected a plain tensor, got the subclass {_kind_name(type(given))}, which does not serve it"
            for name, given in arguments.items()
            if isinstance(given, Tensor) and type(given) not in _PLAIN
        ]
    if reasons:
        return DspattnError(reasons)
    return _ops.translated(error)


def require_kinds(arguments: Mapping[str, Any]) -> None:
    """Raise what `explained` would make of an error."""
    reasons = [reason for name, given in arguments.items() if (reason := _wrong_kind(name, given))]
    if reasons:
        raise DspattnError(reasons)


def _wrong_kind(name: str, given: Any) -> str | None:
    if name in _KINDS:
        kinds, expected = _KINDS[name]
        if isinstance(given, kinds) and not (isinstance(given, int) and abs(given) >= 2**63):
            return None
        return f"{name}: expected {expected}, got {given if isinstance(given, int) else _kind_name(type(given))}"
    if given is None and name in _OPTIONAL_TENSORS:
        return None
    if not isinstance(given, Tensor):
        return f"{name}: expected a tensor, got {_kind_name(type(given))}"
    if given.is_nested:
        return _nested(name)
    if given.layout is not torch.strided:
        return f"{name}: expected a strided tensor, got {given.layout}"
    if given.is_quantized:
        return f"{name}: expected a plain tensor, got a quantized one"
    return None


def _nested(name: str) -> str:
    return f"{name}: expected a strided tensor, got a nested one (dspattn.varlen_attention takes packed batches)"
