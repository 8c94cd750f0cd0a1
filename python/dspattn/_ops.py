"""The operators ``torch.ops.dspattn.*``: the shared object, its errors, and the operators' meta implementations.

Nothing here checks arguments or changes shapes; ``functional`` does, and the C++ library has the last word. Gradients
are in ``_autograd``.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from . import versions
from ._schema import ProblemArguments
from .errors import DspattnError
from .patterns import INTERLEAVE_BLOCK, MAX_GROUP

LIBRARY = "dspattn_torch.so"
LIBRARY_VARIABLE = "DSPATTN_TORCH_LIBRARY"
ERROR_PREFIX = "dspattn: "  # of every error of the C++ library, see bindings/torch


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
attention_qkv = torch.ops.dspattn._attention_qkv.default
attention_qkv_backward = torch.ops.dspattn._attention_qkv_backward.default
nm_prune = torch.ops.dspattn.nm_prune.default
nm_encode = torch.ops.dspattn.nm_encode.default
nm_decode = torch.ops.dspattn.nm_decode.default
sparse_scores = torch.ops.dspattn.sparse_scores.default
sparse_softmax_ = torch.ops.dspattn.sparse_softmax_.default
sparse_product = torch.ops.dspattn.sparse_product.default
norm_rope = torch.ops.dspattn.norm_rope.default
update_value_sums = torch.ops.dspattn.update_value_sums.default


def translated(error: Exception) -> Exception:
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
    "dropout": "dropout_p",
    "dropout.probability": "dropout_p",
    "d_bias": "attn_mask",
    "d_sinks": "sinks",
    "mask.window_left": "window[0]",
    "mask.window_right": "window[1]",
    "mask.key_lengths": "key_lengths",
    "choice": "selection",
    "cu_q": "cu_seqlens_q",
    "packed.cu_q": "cu_seqlens_q",
    "packed.cu_k": "cu_seqlens_k",
    "packed.max_q": "max_seqlen_q",
    "packed.max_k": "max_seqlen_k",
    "value_sums": "sums",
    "q_weight": "query_weight",
    "k_weight": "key_weight",
}
# Where a reason names an argument: at its start, and where it compares with another one ("q's type", "as q is").
_ARGUMENT = re.compile(r"^(?:mask\.|packed\.|dropout\.)?\w+|\b\w+(?='s )|(?<=\bas )\w+(?= is\b)")


def _in_python_names(reason: str) -> str:
    return _ARGUMENT.sub(lambda match: PYTHON_NAMES.get(match.group(), match.group()), reason)


def _require_one_device(tensors: dict[str, Tensor | None], of: str = "q") -> None:
    """Raise as the C++ library does, which never sees tensors without memory: PyTorch sends a call with any of them
    here, whatever the others are."""
    device = tensors[of].device  # type: ignore[union-attr]
    for name, tensor in tensors.items():
        if tensor is not None and tensor.device != device:
            raise RuntimeError(
                f"{ERROR_PREFIX}{name}: expected a tensor on {device} as {of} is, got one on {tensor.device}"
            )


def _heads(like: Tensor, d: Any, fp32: bool) -> Tensor:
    """[batch, heads, n, d] laid out as the operators do: the heads of one position side by side."""
    batch, heads, n, _ = like.shape
    return like.new_empty((batch, n, heads, d), dtype=torch.float32 if fp32 else like.dtype).transpose(1, 2)


@torch.library.register_fake("dspattn::attention")
def _attention_meta(*arguments: Any) -> tuple[Tensor, Tensor]:
    problem = ProblemArguments(*arguments)
    _require_one_device(problem.tensors())
    q = problem.q
    return _heads(q, problem.v.shape[3], problem.fp32_results), q.new_empty(q.shape[:3], dtype=torch.float32)


@torch.library.register_fake("dspattn::_attention_qkv")
def _attention_qkv_meta(q: Tensor, k: Tensor, v: Tensor, options: int, scale: float | None) -> tuple[Tensor, Tensor]:
    out, lse = _attention_meta(q, k, v)
    return out.transpose(1, 2) if options >> 62 else out, lse  # heads_last, the highest bit


@torch.library.register_fake("dspattn::_attention_qkv_backward")
def _attention_qkv_backward_meta(
    d_out: Tensor, out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, options: int, scale: float | None
) -> tuple[Tensor, ...]:
    return _attention_backward_meta(d_out, out, lse, None, False, False, q, k, v)[:3]


@torch.library.register_fake("dspattn::update_value_sums")
def _update_value_sums_meta(
    sums: Tensor, v: Tensor, new_keys: Any, key_lengths: Tensor | None = None, block_table: Tensor | None = None
) -> None:
    _require_one_device({"v": v, "sums": sums, "key_lengths": key_lengths, "block_table": block_table}, "v")


@torch.library.register_fake("dspattn::norm_rope")
def _norm_rope_meta(
    q: list[Tensor], k: list[Tensor], q_weight: list[Tensor], k_weight: list[Tensor], eps: Any, cos: Any, *rest: Any
) -> tuple[Tensor, Tensor]:
    named = {f"{name}[{i}]": t for name, parts in (("q", q), ("k", k)) for i, t in enumerate(parts)}
    _require_one_device({"q": q[0], **named, "cos": cos, "sin": rest[0]})

    def joined(parts: list[Tensor]) -> Tensor:
        batch, _, heads, d = parts[0].shape
        return parts[0].new_empty((batch, sum(part.shape[1] for part in parts), heads, d))

    return joined(q), joined(k)


@torch.library.register_fake("dspattn::attention_backward")
def _attention_backward_meta(
    d_out: Tensor,
    out: Tensor,
    lse: Tensor,
    d_lse: Tensor | None,
    wants_d_bias: bool,
    wants_d_sinks: bool,
    *arguments: Any,
) -> tuple[Tensor, ...]:
    problem = ProblemArguments(*arguments)
    _require_one_device(problem.tensors() | {"d_out": d_out, "out": out, "lse": lse, "d_lse": d_lse})
    fp32 = problem.fp32_results
    grads = [_heads(t, t.shape[3], fp32) for t in (problem.q, problem.k, problem.v)]
    for given, wanted in ((problem.bias, wants_d_bias), (problem.sinks, wants_d_sinks)):
        narrow = wanted and given is not None and not fp32
        shape = given.shape if wanted and given is not None else (0,)
        grads.append(problem.q.new_empty(shape, dtype=given.dtype if narrow else torch.float32))  # type: ignore[union-attr]
    return tuple(grads)


def _slots(columns: Any, keep: int, group: int, interleaved: bool) -> Any:
    """Stored elements of a row, as group_count of the C++ library; the pattern is checked as there."""
    if not 1 <= keep <= group <= MAX_GROUP:
        raise RuntimeError(f"{ERROR_PREFIX}pattern: expected N:M with 1 <= N <= M <= {MAX_GROUP}, got {keep}:{group}")
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
    _require_one_device({"q": q, "k": k, "allowed": allowed, "bias": bias})
    wide = q.dtype == torch.float32
    slots = padded_slots(_slots(k.shape[2], keep, group, interleaved), wide)
    lead = (q.shape[0], q.shape[1], padded_rows(q.shape[2]))
    return q.new_empty((*lead, slots)), q.new_empty((*lead, slots // (4 if wide else 8)), dtype=torch.int16)


@torch.library.register_fake("dspattn::sparse_softmax_")
def _sparse_softmax_meta(nonzeros: Tensor) -> None:
    return None


@torch.library.register_fake("dspattn::sparse_product")
def _sparse_product_meta(nonzeros: Tensor, metadata: Tensor, v: Tensor, n_q: Any, *rest: Any) -> Tensor:
    _require_one_device({"nonzeros": nonzeros, "metadata": metadata, "v": v}, "nonzeros")
    return nonzeros.new_empty((nonzeros.shape[0], nonzeros.shape[1], n_q, v.shape[3]))
