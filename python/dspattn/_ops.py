"""The operators ``torch.ops.dspattn.*``: the shared object, their meta implementations and their gradients.

Nothing here checks arguments or changes shapes; ``functional`` does, and the C++ library has the last word.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from . import versions
from .errors import DspattnError
from .patterns import INTERLEAVE_BLOCK

LIBRARY = "dspattn_torch.so"
LIBRARY_VARIABLE = "DSPATTN_TORCH_LIBRARY"
ERROR_PREFIX = "dspattn: "  # of every error of the C++ library, see bindings/torch

# Positions within the arguments of attention(): see the schema in bindings/torch/attention_ops.cpp.
TENSOR_ARGUMENTS = 8  # q, k, v, allowed, bias, key_lengths, cu_q, cu_k
BIAS = 4
SCALE = 9  # among the options that follow the tensors
FP32_RESULTS = 13


def _library_file() -> Path:
    """The shared object: where the variable says, inside the package, or in the build folder of a source tree."""
    here = Path(__file__)
    chosen = os.environ.get(LIBRARY_VARIABLE)
    places = [Path(chosen)] if chosen else [here.with_name(LIBRARY), here.parents[2] / "build" / "python" / LIBRARY]
    for place in places:
        if place.is_file():
            return place
    raise ImportError(
        f"dspattn's operators were not found in {' or '.join(map(str, places))}. Install the package with "
        f"`pip install .` in the project's folder, or set {LIBRARY_VARIABLE} to a built {LIBRARY}."
    )


versions.require_torch(torch.__version__)
torch.ops.load_library(_library_file())

attention = torch.ops.dspattn.attention.default
attention_backward = torch.ops.dspattn.attention_backward.default
nm_prune = torch.ops.dspattn.nm_prune.default
nm_encode = torch.ops.dspattn.nm_encode.default
nm_decode = torch.ops.dspattn.nm_decode.default
sparse_scores = torch.ops.dspattn.sparse_scores.default
sparse_softmax_ = torch.ops.dspattn.sparse_softmax_.default
sparse_product = torch.ops.dspattn.sparse_product.default


def translated(error: RuntimeError) -> Exception:
    """An error of the C++ library as DspattnError; any other error as it is."""
    text = str(error)
    if not text.startswith(ERROR_PREFIX):
        return error
    return DspattnError(_in_python_names(reason) for reason in text[len(ERROR_PREFIX) :].split("\n"))


# What the C++ library calls the arguments of dspattn.attention and dspattn.varlen_attention.
PYTHON_NAMES = {
    "q": "query",
    "k": "key",
    "v": "value",
    "allowed": "attn_mask",
    "bias": "attn_mask",
    "mask.allowed": "attn_mask",
    "mask.bias": "attn_mask",
    "mask.offset": "offset",
    "mask.window_left": "window[0]",
    "mask.window_right": "window[1]",
    "mask.key_lengths": "key_lengths",
    "cu_q": "cu_seqlens_q",
    "packed.cu_q": "cu_seqlens_q",
    "packed.cu_k": "cu_seqlens_k",
    "packed.max_q": "max_seqlen_q",
    "packed.max_k": "max_seqlen_k",
}
# Where a reason names an argument: at its start, and where it compares with another one ("q's type").
_ARGUMENT = re.compile(r"^(?:mask\.|packed\.)?\w+|\b\w+(?='s )")


def _in_python_names(reason: str) -> str:
    return _ARGUMENT.sub(lambda match: PYTHON_NAMES.get(match.group(), match.group()), reason)


def _heads(like: Tensor, d: Any, fp32: bool) -> Tensor:
    """[batch, heads, n, d] laid out as the operators do: the heads of one position side by side."""
    batch, heads, n, _ = like.shape
    return like.new_empty((batch, n, heads, d), dtype=torch.float32 if fp32 else like.dtype).transpose(1, 2)


def _fp32_results(rest: tuple[Any, ...]) -> bool:
    """Of the arguments after q, k, v. Defaults may have been left out."""
    at = TENSOR_ARGUMENTS - 3 + FP32_RESULTS
    return len(rest) > at and bool(rest[at])


@torch.library.register_fake("dspattn::attention")
def _attention_meta(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return _heads(q, v.shape[3], _fp32_results(rest)), q.new_empty(q.shape[:3], dtype=torch.float32)


@torch.library.register_fake("dspattn::attention_backward")
def _attention_backward_meta(
    d_out: Tensor, out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    fp32 = _fp32_results(rest)
    return _heads(q, q.shape[3], fp32), _heads(k, k.shape[3], fp32), _heads(v, v.shape[3], fp32)


def _slots(columns: Any, keep: int, group: int, interleaved: bool) -> Any:
    """Stored elements of a row, as group_count of the C++ library."""
    block = INTERLEAVE_BLOCK if interleaved else group
    return (columns + block - 1) // block * (block // group) * keep


@torch.library.register_fake("dspattn::nm_prune")
def _nm_prune_meta(scores: Tensor, keep: int, group: int, interleaved: bool) -> Tensor:
    matrices, rows, columns = scores.shape
    return scores.new_empty((matrices, rows, _slots(columns, keep, group, interleaved)), dtype=torch.uint8)


@torch.library.register_fake("dspattn::nm_encode")
def _nm_encode_meta(indices: Tensor, columns: Any, keep: int, group: int, interleaved: bool, wide: bool) -> Tensor:
    matrices, rows, slots = indices.shape
    per_block = 4 if wide else 8  # four codes to a block; a code places one 4-byte element or two 2-byte ones
    blocks = (slots + per_block - 1) // per_block
    return indices.new_empty((matrices, (rows + 31) // 32 * 32, (blocks + 1) // 2 * 2), dtype=torch.int16)


@torch.library.register_fake("dspattn::nm_decode")
def _nm_decode_meta(
    metadata: Tensor, rows: Any, columns: Any, keep: int, group: int, interleaved: bool, wide: bool
) -> Tensor:
    slots = _slots(columns, keep, group, interleaved)
    return metadata.new_empty((metadata.shape[0], rows, slots), dtype=torch.uint8)


def padded_rows(rows: Any) -> Any:
    """Rows of a stored sparse matrix: whole tiles of 32, as SparseShape::rows of the C++ library."""
    return (rows + 31) // 32 * 32


def padded_slots(slots: Any, wide: bool) -> Any:
    """Nonzeros of a stored row: whole 4-byte metadata words, as SparseShape::nonzeros_per_row."""
    unit = 8 if wide else 16
    return (slots + unit - 1) // unit * unit


@torch.library.register_fake("dspattn::sparse_scores")
def _sparse_scores_meta(
    q: Tensor, k: Tensor, allowed: Any, bias: Any, keep: int, group: int, interleaved: bool, *rest: Any
) -> tuple[Tensor, Tensor]:
    wide = q.dtype == torch.float32
    slots = padded_slots(_slots(k.shape[2], keep, group, interleaved), wide)
    lead = (q.shape[0], q.shape[1], padded_rows(q.shape[2]))
    return q.new_empty((*lead, slots)), q.new_empty((*lead, slots // (4 if wide else 8)), dtype=torch.int16)


@torch.library.register_fake("dspattn::sparse_softmax_")
def _sparse_softmax_meta(nonzeros: Tensor) -> None:
    return None


@torch.library.register_fake("dspattn::sparse_product")
def _sparse_product_meta(nonzeros: Tensor, metadata: Tensor, v: Tensor, n_q: Any, *rest: Any) -> Tensor:
    return nonzeros.new_empty((nonzeros.shape[0], nonzeros.shape[1], n_q, v.shape[3]))


def _wants_gradients(q: Any, k: Any, v: Any, _: Any, bias: Any) -> bool:
    """Spelt out, which is faster than any()."""
    return q.requires_grad or k.requires_grad or v.requires_grad or (bias is not None and bias.requires_grad)


def run(tensors: tuple[Tensor | None, ...], options: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
    """attention() as PyTorch would run it, without what its Python dispatch costs.

    The gradient registered below serves torch.compile and direct calls of the operator, but takes about 100
    microseconds a call (it re-reads the schema each time) and does not work under torch.func. Outside of compilation,
    the same formulas run through a plain autograd.Function, and nothing at all when no gradient is wanted.
    """
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return _FunctionalAttention.apply(options, *tensors)
    if torch.is_grad_enabled() and _wants_gradients(*tensors[:5]):  # the others are no floating tensors
        return _Attention.apply(options, *tensors)
    with torch._C._AutoDispatchBelowAutograd():
        return attention(*tensors, *options)


class _Attention(torch.autograd.Function):
    """The registered gradient of attention() as a plain autograd function."""

    @staticmethod
    def forward(ctx: Any, options: tuple[Any, ...], *tensors: Tensor | None) -> tuple[Tensor, Tensor]:
        with torch._C._AutoDispatchBelowAutograd():
            output = attention(*tensors, *options)
        _save(ctx, (*tensors, *options), output)
        return output

    @staticmethod
    def backward(ctx: Any, d_out: Tensor | None, d_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        return (None, *_gradients(ctx, d_out, d_lse, ctx.needs_input_grad[1:])[:TENSOR_ARGUMENTS])


class _FunctionalAttention(torch.autograd.Function):
    """The same in the form that torch.func asks for, which costs 20 microseconds more."""

    backward = _Attention.backward

    @staticmethod
    def forward(options: tuple[Any, ...], *tensors: Tensor | None) -> tuple[Tensor, Tensor]:
        with torch._C._AutoDispatchBelowAutograd():
            return attention(*tensors, *options)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        _save(ctx, (*inputs[1:], *inputs[0]), output)


def _run_backward(tensors: tuple[Tensor | None, ...], options: tuple[Any, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """attention_backward() in the same way as run()."""
    if torch.compiler.is_compiling():
        return attention_backward(*tensors, *options)
    return _AttentionBackward.apply(options, *tensors)


class _AttentionBackward(torch.autograd.Function):
    """The gradient itself, which has none."""

    @staticmethod
    def forward(options: tuple[Any, ...], *tensors: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        with torch._C._AutoDispatchBelowAutograd():
            return attention_backward(*tensors, *options)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[None, ...]:
        return _second_order(ctx, *grads)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:TENSOR_ARGUMENTS], *output)
    ctx.options = inputs[TENSOR_ARGUMENTS:]
    ctx.set_materialize_grads(False)


def _registered_gradients(ctx: Any, d_out: Tensor | None, d_lse: Tensor | None) -> tuple[Tensor | None, ...]:
    return _gradients(ctx, d_out, d_lse, ctx.needs_input_grad)


def _gradients(
    ctx: Any, d_out: Tensor | None, d_lse: Tensor | None, needed: tuple[bool, ...]
) -> tuple[Tensor | None, ...]:
    """The gradients of every argument of attention(): None for all but q, k and v."""
    if needed[BIAS]:
        raise NotImplementedError(
            "attn_mask: its gradient is not computed; expected a mask or bias with requires_grad=False"
        )
    *tensors, out, lse = ctx.saved_tensors
    options = ctx.options
    none = (None,) * (len(tensors) - 3 + len(options))
    d_q: Tensor | None = None
    d_k: Tensor | None = None
    d_v: Tensor | None = None
    if d_out is not None:
        d_q, d_k, d_v = _run_backward((_rows(d_out), out, lse, *tensors), options)
    if d_lse is not None:
        more_q, more_k = _lse_gradients(d_lse, lse, tensors, options)
        d_q = more_q if d_q is None else d_q + more_q
        d_k = more_k if d_k is None else d_k + more_k
    dtype = tensors[0].dtype  # fp32 results have fp32 gradients, to be added up before they are rounded
    wanted = (
        grad.to(dtype) if need and grad is not None else None
        for grad, need in zip((d_q, d_k, d_v), needed, strict=False)
    )
    return (*wanted, *none)


def _rows(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _lse_gradients(
    d_lse: Tensor, lse: Tensor, tensors: list[Tensor], options: tuple[Any, ...]
) -> tuple[Tensor, Tensor]:
    """The gradients of q and k through the LSE, whose derivative by a score is its weight.

    d_q = scale * d_lse * (weights k) is the attention of the keys themselves; d_k = weights^T (scale * d_lse * q) is
    the gradient of its values. Both come from the ordinary operators with k in the place of v.
    """
    q, k, _, *masks = tensors
    scale = options[SCALE] if options[SCALE] is not None else q.shape[3] ** -0.5
    factor = (d_lse * scale).masked_fill(lse == float("-inf"), 0).unsqueeze(-1)
    keys_seen, lse = attention(q, k, k, *masks, *options)
    d_seen = (factor * q).to(q.dtype)
    _, _, d_k = _run_backward((_rows(d_seen), keys_seen, lse, q, k, k, *masks), options)
    return (factor * keys_seen).to(q.dtype), d_k


def _second_order(ctx: Any, *grads: Tensor | None) -> tuple[None, ...]:
    raise NotImplementedError(
        "dspattn computes first-order gradients only: a gradient of a gradient (double backward) was asked for"
    )


torch.library.register_autograd("dspattn::attention", _registered_gradients, setup_context=_save)
torch.library.register_autograd("dspattn::attention_backward", _second_order)
