"""The paper's three steps as functions of their own, with the sparse matrix between them in your hands:

    nonzeros, metadata = dspattn.sddmm(query, key)          # scores, pruned
    weights = dspattn.softmax(nonzeros)                     # on what is kept
    out = dspattn.spmm(weights, metadata, value)            # sparse times dense

Nonzeros and metadata are laid out as PyTorch's semi-structured tensors (CUTLASS's layout): see
:func:`to_semi_structured` and :func:`from_semi_structured`. On a GPU the steps are the paper's three kernels and never
make the dense matrix; their gradients, :func:`to_dense` and all steps on the CPU do. They are for looking at the
matrix; for speed there is :func:`dspattn.attention`.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from . import _ops, _scores
from ._flags import as_flag, refuse_flags
from ._inputs import Alignment, parse_alignment, require_known, take_causal_biases
from ._not_offered import forward_mode, not_scriptable
from ._sparse_inputs import check_product, leading_dims, require_device, require_integer, require_types
from .errors import DspattnError
from .patterns import INTERLEAVE_BLOCK, Grouping, default_pattern, parse_grouping, parse_pattern


@not_scriptable
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
        query: ``[..., n_q, d]``, float32, float16 or bfloat16, on the CPU or a GPU (d up to 256 there).
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
    top_left = parse_alignment(alignment)
    is_causal = as_flag("is_causal", is_causal)
    refuse_flags(scale=scale)
    for name, tensor in (("query", query), ("key", key)):
        require_device(name, tensor)
    masks = {"attn_mask": attn_mask}
    is_causal, top_left = take_causal_biases(masks, query, key, is_causal, top_left, None)
    (attn_mask,) = masks.values()
    lead = leading_dims(query, key, attn_mask)
    pattern = default_pattern(query.dtype) if pattern is None else pattern
    keep, group = parse_pattern(pattern)
    interleaved = parse_grouping(grouping)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    if isinstance(scale, (str, complex)) or not 2.0**-126 <= scale <= 2.0**126:
        raise DspattnError(
            [f"scale: expected a finite, positive number from 2^-126 to 2^126 (1.18e-38 to 8.51e37), got {scale}"]
        )
    if query.is_cuda:
        return _scores_on_gpu(query, key, attn_mask, lead, (keep, group, interleaved, is_causal, top_left, scale))
    # In units of a power of two not above the scale a bias is no larger than it was given.
    unit = min(1.0, _scores.power_below(scale))
    unscaled = _scores.Products.apply(query.float(), key.float()) * unit
    n_q, n_k = unscaled.shape[-2:]
    hidden = torch.zeros(n_q, n_k, dtype=torch.bool, device=query.device)
    if attn_mask is not None:
        if attn_mask.dtype == torch.bool:
            hidden = hidden | ~attn_mask
        else:
            hidden = hidden | (attn_mask == float("-inf"))
            unscaled = _scores.finite_sum(unscaled, attn_mask.float() * (unit / scale))
    if is_causal:
        hidden = hidden | torch.ones_like(hidden).triu(1 + (0 if top_left else n_k - n_q))
    unscaled = unscaled.masked_fill(hidden, float("-inf"))
    scale = scale / unit
    matrices = (
        _scores.selection_key(unscaled.detach(), scale, query.dtype).reshape(math.prod(lead), n_q, n_k).contiguous()
    )
    try:
        indices = _ops.nm_prune(matrices, keep, group, interleaved)
        metadata = _ops.nm_encode(indices, n_k, keep, group, interleaved, query.dtype == torch.float32)
    except RuntimeError as error:
        raise _ops.translated(error) from None
    columns = _columns(indices, keep, group, interleaved).reshape(*lead, *indices.shape[-2:])
    missing = int(columns.max()) - n_k + 1 if columns.numel() else 0
    scores = torch.nn.functional.pad(unscaled * scale, (0, max(missing, 0)), value=float("-inf"))
    nonzeros = _scores.stored(scores.gather(-1, columns), query.dtype)
    return nonzeros, metadata.reshape(*lead, *metadata.shape[1:])


@not_scriptable
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
    require_device("nonzeros", nonzeros)
    require_types(nonzeros)
    if nonzeros.is_cuda:
        softened: Tensor = _Softmax.apply(nonzeros)
        return softened
    hidden = (nonzeros == float("-inf")).all(-1, keepdim=True)
    weights = torch.softmax(nonzeros.float().masked_fill(hidden, 0), -1)
    return weights.masked_fill(hidden, 0).to(nonzeros.dtype)


@not_scriptable
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
        value: ``[..., n_k, d_v]``; on a GPU its leading dimensions broadcast to those of the nonzeros.
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
    require_device("nonzeros", nonzeros)
    check_product(nonzeros, metadata, value)
    layout = (*parse_pattern(default_pattern(nonzeros.dtype) if pattern is None else pattern), parse_grouping(grouping))
    if nonzeros.is_cuda:
        return _product_on_gpu(nonzeros, metadata, value, layout)
    dense = to_dense(nonzeros, metadata, value.shape[-2], pattern=pattern, grouping=grouping)
    return _scores.product(dense.float(), value.float()).to(nonzeros.dtype)


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
    require_device("nonzeros", nonzeros)
    require_known("metadata", metadata)
    require_types(nonzeros, metadata)
    require_integer("columns", columns)
    pattern = default_pattern(nonzeros.dtype) if pattern is None else pattern
    places = _stored_columns(nonzeros, metadata, columns, (*parse_pattern(pattern), parse_grouping(grouping)))
    lead, n_q = nonzeros.shape[:-2], nonzeros.shape[-2]
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

    require_device("nonzeros", nonzeros)
    require_known("metadata", metadata)
    require_types(nonzeros, metadata)
    require_integer("columns", columns)
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


def _stored_columns(nonzeros: Tensor, metadata: Tensor, columns: int, layout: tuple[int, int, bool]) -> Tensor:
    """The column of each nonzero. The codec runs on the CPU, wherever the matrix is."""
    keep, group, interleaved = layout
    lead, n_q = nonzeros.shape[:-2], nonzeros.shape[-2]
    if metadata.shape[:-2] != lead:
        raise DspattnError(
            [f"metadata: expected the leading dimensions of nonzeros {list(lead)}, got {list(metadata.shape[:-2])}"]
        )
    flat = metadata.reshape(math.prod(lead), *metadata.shape[-2:]).cpu().contiguous()
    try:
        indices = _ops.nm_decode(flat, n_q, columns, keep, group, interleaved, nonzeros.dtype == torch.float32)
    except RuntimeError as error:
        raise _ops.translated(error) from None
    if indices.shape[-1] != nonzeros.shape[-1]:
        raise DspattnError(
            [f"nonzeros: expected {indices.shape[-1]} per row for {columns} columns, got {nonzeros.shape[-1]}"]
        )
    return _columns(indices.to(nonzeros.device), keep, group, interleaved).reshape(*lead, *indices.shape[-2:])


def _four_dims(tensor: Tensor, lead: torch.Size) -> Tensor:
    """[batch, heads, rows, columns] of a tensor whose leading dimensions are broadcast to `lead`."""
    tensor = tensor.expand(*lead, *tensor.shape[-2:])
    if len(lead) != 2:
        tensor = tensor.reshape(math.prod(lead), 1, *tensor.shape[-2:])
    return tensor if tensor.stride(-1) == 1 or tensor.shape[-1] <= 1 else tensor.contiguous()


def _scores_on_gpu(
    query: Tensor,
    key: Tensor,
    attn_mask: Tensor | None,
    lead: torch.Size,
    options: tuple[int, int, bool, bool, bool, float],
) -> tuple[Tensor, Tensor]:
    keep, group, interleaved = options[:3]
    n_q, n_k = query.shape[-2], key.shape[-2]
    allowed = bias = None
    if attn_mask is not None:
        if attn_mask.requires_grad:
            raise DspattnError(["attn_mask: expected requires_grad=False on a GPU (its gradient is not computed)"])
        mask = _four_dims(attn_mask.expand(*lead, n_q, n_k), lead)
        allowed, bias = (mask, None) if mask.dtype == torch.bool else (None, mask)
    try:
        nonzeros, metadata = _Scores.apply(_four_dims(query, lead), _four_dims(key, lead), allowed, bias, options)
    except RuntimeError as error:
        raise _ops.translated(error) from None
    slots = _ops._slots(n_k, keep, group, interleaved)
    nonzeros = nonzeros[..., :n_q, :slots]
    return nonzeros.reshape(*lead, n_q, slots), metadata.reshape(*lead, *metadata.shape[2:])


class _Scores(torch.autograd.Function):
    """The scores in the library's own, padded layout, four dimensions."""

    jvp = staticmethod(forward_mode)  # type: ignore[assignment]

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, allowed: Tensor | None, bias: Tensor | None, options: tuple[Any, ...]
    ) -> tuple[Tensor, Tensor]:
        nonzeros, metadata = _ops.sparse_scores(q, k, allowed, bias, *options)
        ctx.save_for_backward(q, k, metadata)
        ctx.options = options
        ctx.mark_non_differentiable(metadata)
        return nonzeros, metadata

    @staticmethod
    def backward(ctx: Any, d_nonzeros: Tensor, _: Any) -> tuple[Tensor | None, ...]:
        q, k, metadata = ctx.saved_tensors
        keep, group, interleaved, *_, scale = ctx.options
        slots = _ops._slots(k.shape[2], keep, group, interleaved)
        wanted = d_nonzeros[..., : q.shape[2], :slots]
        d_scores = to_dense(
            wanted, metadata, k.shape[2], pattern=f"{keep}:{group}",
            grouping="interleaved" if interleaved else "consecutive",
        ).float()  # fmt: skip
        d_q = _scores.times_where_not_zero(scale * d_scores, k.float())
        d_k = _scores.times_where_not_zero(scale * d_scores.transpose(-1, -2), q.float())
        return d_q.to(q.dtype), d_k.to(k.dtype), None, None, None


class _Softmax(torch.autograd.Function):
    jvp = staticmethod(forward_mode)  # type: ignore[assignment]

    @staticmethod
    def forward(ctx: Any, nonzeros: Tensor) -> Tensor:
        rows = nonzeros.reshape(math.prod(nonzeros.shape[:-1]), nonzeros.shape[-1])
        padded = _padded(rows, float("-inf"), copy=True)
        try:
            _ops.sparse_softmax_(padded.view(1, 1, *padded.shape))
        except RuntimeError as error:
            raise _ops.translated(error) from None
        weights = padded[: rows.shape[0], : rows.shape[1]].reshape(nonzeros.shape)
        ctx.save_for_backward(weights)
        return weights

    @staticmethod
    def backward(ctx: Any, d_weights: Tensor) -> Tensor:
        (weights,) = ctx.saved_tensors
        w, d = weights.float(), d_weights.float()
        gradient: Tensor = (w * (d - (w * d).sum(-1, keepdim=True))).to(weights.dtype)
        return gradient


def _product_on_gpu(nonzeros: Tensor, metadata: Tensor, value: Tensor, layout: tuple[int, int, bool]) -> Tensor:
    lead = nonzeros.shape[:-2]
    slots = _ops._slots(value.shape[-2], *layout)
    if nonzeros.shape[-1] != slots:  # on the CPU to_dense says it
        raise DspattnError(
            [f"nonzeros: expected {slots} per row for {value.shape[-2]} columns, got {nonzeros.shape[-1]}"]
        )
    out: Tensor = _Product.apply(
        _four_dims(nonzeros, lead), _four_dims(metadata, lead), _four_dims(value, lead), layout
    )
    return out.reshape(*lead, *out.shape[2:])


class _Product(torch.autograd.Function):
    jvp = staticmethod(forward_mode)  # type: ignore[assignment]

    @staticmethod
    def forward(ctx: Any, nonzeros: Tensor, metadata: Tensor, v: Tensor, layout: tuple[int, int, bool]) -> Tensor:
        ctx.save_for_backward(nonzeros, metadata, v)
        ctx.layout = layout
        try:
            out: Tensor = _ops.sparse_product(
                _padded(nonzeros, 0.0), metadata.contiguous(), v, nonzeros.shape[2], *layout
            )
        except RuntimeError as error:
            raise _ops.translated(error) from None
        return out

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        nonzeros, metadata, v = ctx.saved_tensors
        columns = _stored_columns(nonzeros, metadata, v.shape[2], ctx.layout)
        width = max(v.shape[2], int(columns.max()) + 1 if columns.numel() else 0)
        weights = nonzeros.new_zeros((*nonzeros.shape[:3], width)).scatter(-1, columns, nonzeros)[..., : v.shape[2]]
        d_weights = _scores.product(d_out.float(), v.float().transpose(-1, -2))
        d_nonzeros = torch.nn.functional.pad(d_weights, (0, width - v.shape[2])).gather(-1, columns)
        d_v = _scores.product(weights.float().transpose(-1, -2), d_out.float())
        return d_nonzeros.to(nonzeros.dtype), None, d_v.to(v.dtype), None


def _padded(nonzeros: Tensor, fill: float, copy: bool = False) -> Tensor:
    """The nonzeros in rows and slots as the kernels store them, the new ones `fill`."""
    *lead, rows, slots = nonzeros.shape
    full = (*lead, _ops.padded_rows(rows), _ops.padded_slots(slots, nonzeros.dtype == torch.float32))
    if full == tuple(nonzeros.shape):
        return nonzeros.clone(memory_format=torch.contiguous_format) if copy else nonzeros.contiguous()
    padded = nonzeros.new_full(full, fill)
    padded[..., :rows, :slots] = nonzeros
    return padded


def _columns(indices: Tensor, keep: int, group: int, interleaved: bool) -> Tensor:
    """The column of each stored element; past the end of the row for one that completes the last group."""
    slots = indices.shape[-1]
    number = torch.arange(slots, device=indices.device) // keep
    element = indices.long()
    if not interleaved:
        return number * group + element
    per_block = INTERLEAVE_BLOCK // group
    return number // per_block * INTERLEAVE_BLOCK + element * per_block + number % per_block
