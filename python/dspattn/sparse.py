"""The paper's three steps as functions of their own, with the sparse matrix between them in your hands:

    nonzeros, metadata = dspattn.sddmm(query, key)          # scores, pruned
    weights = dspattn.softmax(nonzeros)                     # on what is kept
    out = dspattn.spmm(weights, metadata, value)            # sparse times dense

Nonzeros and metadata are laid out as PyTorch's semi-structured tensors (CUTLASS's layout): see
:func:`to_semi_structured` and :func:`from_semi_structured`. On the CPU the steps compute through dense scores, so they
cost the memory that :func:`dspattn.attention` saves; they are for looking at the matrix, not for speed.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from . import _ops
from .errors import DspattnError
from .functional import Alignment, parse_alignment
from .patterns import INTERLEAVE_BLOCK, Grouping, parse_grouping, parse_pattern

FP16_MAX = 65504.0


def default_pattern(dtype: torch.dtype) -> str:
    """What sparse tensor cores take: 1:2 for float32, 2:4 for 16-bit types.

    Example:
        >>> default_pattern(torch.float32), default_pattern(torch.bfloat16)
        ('1:2', '2:4')
    """
    if dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise DspattnError([f"dtype: expected float32, float16 or bfloat16, got {dtype}"])
    return "1:2" if dtype == torch.float32 else "2:4"


def sddmm(
    query: Tensor,
    key: Tensor,
    attn_mask: Tensor | None = None,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    pattern: str | None = None,
    grouping: Grouping = "consecutive",
    alignment: Alignment = "top_left",
) -> tuple[Tensor, Tensor]:
    """Scores of queries and keys, pruned: of every group of M keys the N largest scores stay.

    Args:
        query: ``[..., n_q, d]``, float32, float16 or bfloat16, on the CPU.
        key: ``[..., n_k, d]``; the leading dimensions broadcast.
        attn_mask: broadcasts to ``[..., n_q, n_k]``; boolean (True takes part) or added to the scaled scores.
        is_causal: a query sees keys up to its own position.
        scale: factor of the scores, default ``d ** -0.5``.
        pattern: ``"1:2"`` or ``"2:4"`` (metadata exists for 1:2 of float32 and for both of 16-bit types); default:
            1:2 for float32, 2:4 for 16-bit types.
        grouping: ``"consecutive"``, as in the paper, or ``"interleaved"``; the columns are then stored group by group.
        alignment: as in :func:`dspattn.attention`.

    Returns:
        ``nonzeros`` ``[..., n_q, slots]`` in the query's type, N for each group, -inf where fewer keys are visible;
        and ``metadata``, int16 ``[..., rows, blocks]`` with the rows rounded up to 32. The nonzeros are differentiable.

    Example:
        >>> q, k = torch.randn(32, 16), torch.randn(64, 16)
        >>> nonzeros, metadata = sddmm(q, k)
        >>> nonzeros.shape, metadata.shape
        (torch.Size([32, 32]), torch.Size([32, 8]))
    """
    _require_cpu("query", query)
    pattern = default_pattern(query.dtype) if pattern is None else pattern
    keep, group = parse_pattern(pattern)
    interleaved = parse_grouping(grouping)
    top_left = parse_alignment(alignment)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    if not (math.isfinite(scale) and scale > 0):
        raise DspattnError([f"scale: expected a finite positive number, got {scale}"])
    unscaled = query.float() @ key.float().transpose(-1, -2)
    n_q, n_k = unscaled.shape[-2:]
    if attn_mask is not None:
        if attn_mask.dtype == torch.bool:
            unscaled = unscaled.masked_fill(~attn_mask, float("-inf"))
        else:
            unscaled = unscaled + attn_mask.float() / scale
    if is_causal:
        hidden = torch.ones(n_q, n_k, dtype=torch.bool, device=query.device).triu(1 + (0 if top_left else n_k - n_q))
        unscaled = unscaled.masked_fill(hidden, float("-inf"))
    matrices = _selection_key(unscaled.detach(), scale, query.dtype).reshape(-1, n_q, n_k).contiguous()
    try:
        indices = _ops.nm_prune(matrices, keep, group, interleaved)
        metadata = _ops.nm_encode(indices, n_k, keep, group, interleaved, query.dtype == torch.float32)
    except RuntimeError as error:
        raise _ops.translated(error) from None
    lead = unscaled.shape[:-2]
    columns = _columns(indices, keep, group, interleaved).reshape(*lead, n_q, -1)
    missing = int(columns.max()) - n_k + 1 if columns.numel() else 0
    scores = torch.nn.functional.pad(unscaled * scale, (0, max(missing, 0)), value=float("-inf"))
    nonzeros = scores.gather(-1, columns).to(query.dtype)
    return nonzeros, metadata.reshape(*lead, *metadata.shape[1:])


def softmax(nonzeros: Tensor) -> Tensor:
    """Softmax of each row over what was kept; a row with nothing kept (all -inf) gives 0.

    Args:
        nonzeros: ``[..., n_q, slots]`` of :func:`sddmm`.

    Returns:
        The weights, in the same shape, type and places.

    Example:
        >>> softmax(torch.tensor([[0.0, 0.0], [float("-inf"), float("-inf")]])).tolist()
        [[0.5, 0.5], [0.0, 0.0]]
    """
    hidden = (nonzeros == float("-inf")).all(-1, keepdim=True)
    weights = torch.softmax(nonzeros.float().masked_fill(hidden, 0), -1)
    return weights.masked_fill(hidden, 0).to(nonzeros.dtype)


def spmm(
    nonzeros: Tensor,
    metadata: Tensor,
    value: Tensor,
    *,
    pattern: str | None = None,
    grouping: Grouping = "consecutive",
) -> Tensor:
    """The sparse matrix of nonzeros and metadata times a dense one.

    Args:
        nonzeros: ``[..., n_q, slots]``, usually the weights of :func:`softmax`.
        metadata: of :func:`sddmm`, with the same leading dimensions.
        value: ``[..., n_k, d_v]``.
        pattern: as given to :func:`sddmm`.
        grouping: as given to :func:`sddmm`.

    Returns:
        ``[..., n_q, d_v]`` in the nonzeros' type; differentiable with respect to nonzeros and value.

    Example:
        >>> q, k, v = torch.randn(32, 16), torch.randn(64, 16), torch.randn(64, 16)
        >>> nonzeros, metadata = sddmm(q, k)
        >>> spmm(softmax(nonzeros), metadata, v).shape
        torch.Size([32, 16])
    """
    dense = to_dense(nonzeros, metadata, value.shape[-2], pattern=pattern, grouping=grouping)
    return (dense.float() @ value.float()).to(nonzeros.dtype)


def to_dense(
    nonzeros: Tensor,
    metadata: Tensor,
    columns: int,
    *,
    pattern: str | None = None,
    grouping: Grouping = "consecutive",
    fill: float = 0.0,
) -> Tensor:
    """The matrix with every element in its place.

    Args:
        nonzeros: ``[..., n_q, slots]``.
        metadata: ``[..., rows, blocks]``.
        columns: n_k.
        pattern: as given to :func:`sddmm`.
        grouping: as given to :func:`sddmm`.
        fill: what the dropped elements are: 0 for weights, -inf for scores.

    Returns:
        ``[..., n_q, columns]``.

    Example:
        >>> q, k = torch.randn(32, 16), torch.randn(64, 16)
        >>> nonzeros, metadata = sddmm(q, k)
        >>> from dspattn import attention_weights
        >>> weights = to_dense(softmax(nonzeros), metadata, 64)
        >>> torch.allclose(weights, attention_weights(q, k, pattern="1:2", grouping="consecutive"), atol=1e-6)
        True
    """
    _require_cpu("nonzeros", nonzeros)
    pattern = default_pattern(nonzeros.dtype) if pattern is None else pattern
    keep, group = parse_pattern(pattern)
    interleaved = parse_grouping(grouping)
    lead, n_q = nonzeros.shape[:-2], nonzeros.shape[-2]
    if metadata.shape[:-2] != lead:
        raise DspattnError(
            [f"metadata: expected the leading dimensions of nonzeros {list(lead)}, got {list(metadata.shape[:-2])}"]
        )
    flat = metadata.reshape(math.prod(lead), *metadata.shape[-2:]).contiguous()
    try:
        indices = _ops.nm_decode(flat, n_q, columns, keep, group, interleaved, nonzeros.dtype == torch.float32)
    except RuntimeError as error:
        raise _ops.translated(error) from None
    if indices.shape[-1] != nonzeros.shape[-1]:
        raise DspattnError(
            [f"nonzeros: expected {indices.shape[-1]} per row for {columns} columns, got {nonzeros.shape[-1]}"]
        )
    places = _columns(indices, keep, group, interleaved).reshape(*lead, n_q, -1)
    width = max(columns, int(places.max()) + 1 if places.numel() else 0)
    empty = nonzeros.new_full((*lead, n_q, width), fill)
    return empty.scatter(-1, places, nonzeros)[..., :columns]


def to_semi_structured(nonzeros: Tensor, metadata: Tensor, columns: int) -> Tensor:
    """The matrix as PyTorch's semi-structured tensor, which its sparse GEMMs take.

    Args:
        nonzeros: ``[n_q, slots]`` of one matrix, 2:4 of a 16-bit type or 1:2 of float32, consecutive grouping.
        metadata: ``[n_q, blocks]``.
        columns: n_k; PyTorch takes rows in multiples of 32 and columns in multiples of 32 (float32) or 64.

    Returns:
        ``torch.sparse.SparseSemiStructuredTensorCUTLASS`` of shape ``[n_q, columns]`` that shares the memory.

    Example:
        >>> nonzeros, metadata = sddmm(torch.randn(32, 16), torch.randn(64, 16))
        >>> to_semi_structured(nonzeros, metadata, 64).shape
        torch.Size([32, 64])
    """
    from torch.sparse import SparseSemiStructuredTensorCUTLASS

    reasons = []
    if nonzeros.dim() != 2 or metadata.dim() != 2:
        reasons.append(f"nonzeros, metadata: expected one matrix each, got {nonzeros.dim()} and {metadata.dim()} dims")
    elif nonzeros.shape[0] % 32 != 0:
        reasons.append(f"nonzeros.shape[0]: expected a multiple of 32, got {nonzeros.shape[0]}")
    multiple = 32 if nonzeros.dtype == torch.float32 else 64
    if columns % multiple != 0:
        reasons.append(f"columns: expected a multiple of {multiple}, got {columns}")
    if not reasons and nonzeros.shape[1] * 2 != columns:
        reasons.append(f"nonzeros.shape[1]: expected columns / 2 = {columns // 2}, got {nonzeros.shape[1]}")
    if reasons:
        raise DspattnError(reasons)
    return SparseSemiStructuredTensorCUTLASS(
        torch.Size((nonzeros.shape[0], columns)),
        packed=nonzeros,
        meta=metadata,
        packed_t=None,
        meta_t=None,
        compressed_swizzled_bitmask=None,
    )


def from_semi_structured(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """(nonzeros, metadata) of one of PyTorch's semi-structured tensors (CUTLASS's layout), sharing its memory.

    Args:
        matrix: ``torch.sparse.SparseSemiStructuredTensorCUTLASS``.

    Returns:
        ``[rows, columns / 2]`` and ``[rows, blocks]``, as :func:`spmm` takes them.

    Example:
        >>> nonzeros, metadata = sddmm(torch.randn(32, 16), torch.randn(64, 16))
        >>> again, _ = from_semi_structured(to_semi_structured(nonzeros, metadata, 64))
        >>> again is nonzeros
        True
    """
    packed, meta = getattr(matrix, "packed", None), getattr(matrix, "meta", None)
    if not isinstance(packed, Tensor) or not isinstance(meta, Tensor):
        raise DspattnError(
            [f"matrix: expected a SparseSemiStructuredTensorCUTLASS with packed and meta, got {type(matrix).__name__}"]
        )
    return packed, meta


def _require_cpu(name: str, tensor: Tensor) -> None:
    if tensor.device.type != "cpu":
        raise DspattnError([f"{name}: expected a tensor on cpu, got one on {tensor.device}"])


def _selection_key(unscaled: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """What is compared: the unscaled score in float32, for 16-bit inputs times the largest power of two not above the
    scale and rounded to float16, so that the choice is that of the fused kernels."""
    if dtype == torch.float32:
        return unscaled
    shifted = unscaled * 2.0 ** math.floor(math.log2(scale))
    return torch.where(shifted == float("-inf"), shifted, shifted.clamp(-FP16_MAX, FP16_MAX)).to(torch.float16)


def _columns(indices: Tensor, keep: int, group: int, interleaved: bool) -> Tensor:
    """The column of each stored element; past the end of the row for one that completes the last group."""
    slots = indices.shape[-1]
    number = torch.arange(slots, device=indices.device) // keep
    element = indices.long()
    if not interleaved:
        return number * group + element
    per_block = INTERLEAVE_BLOCK // group
    return number // per_block * INTERLEAVE_BLOCK + element * per_block + number % per_block
