"""Attention as functions: ``attention`` in the signature of PyTorch's own, ``varlen_attention`` for packed batches and
``attention_weights`` for looking at what was kept."""

from __future__ import annotations

import math
import threading
from typing import Any, Literal, overload

import torch
from torch import Tensor

from . import _ops
from .errors import DspattnError
from .patterns import Grouping, parse_grouping, parse_pattern

# The blocks of dspattn.parallel.context that are open: the last one of this thread answers in the functions' place.
stand_ins: list[Any] = []

Alignment = Literal["top_left", "bottom_right"]
Window = int | tuple[int | None, int | None] | None


# What the operator takes after its tensors, in its order: max_q, max_k, keep, group, interleaved, causal, top_left,
# window_left, window_right, scale, full_fp32, kernel, offset, fp32_results. A plain tuple: one with names takes a
# microsecond to make.
Options = tuple[int, int, int, int, bool, bool, bool, int | None, int | None, float | None, bool, str, int, bool]


@overload
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = ...,
    dropout_p: float = ...,
    is_causal: bool = ...,
    scale: float | None = ...,
    enable_gqa: bool = ...,
    *,
    pattern: str = ...,
    grouping: Grouping = ...,
    return_lse: Literal[False] = ...,
    attn_bias: Tensor | None = ...,
    window: Window = ...,
    alignment: Alignment = ...,
    offset: int = ...,
    key_lengths: Tensor | None = ...,
    allow_tf32: bool = ...,
    out_dtype: torch.dtype | None = ...,
    kernel: str = ...,
) -> Tensor: ...


@overload
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = ...,
    dropout_p: float = ...,
    is_causal: bool = ...,
    scale: float | None = ...,
    enable_gqa: bool = ...,
    *,
    pattern: str = ...,
    grouping: Grouping = ...,
    return_lse: Literal[True],
    attn_bias: Tensor | None = ...,
    window: Window = ...,
    alignment: Alignment = ...,
    offset: int = ...,
    key_lengths: Tensor | None = ...,
    allow_tf32: bool = ...,
    out_dtype: torch.dtype | None = ...,
    kernel: str = ...,
) -> tuple[Tensor, Tensor]: ...


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    pattern: str = "2:4",
    grouping: Grouping = "interleaved",
    return_lse: bool = False,
    attn_bias: Tensor | None = None,
    window: Window = None,
    alignment: Alignment = "top_left",
    offset: int = 0,
    key_lengths: Tensor | None = None,
    allow_tf32: bool = True,
    out_dtype: torch.dtype | None = None,
    kernel: str = "",
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention over scores pruned to ``pattern``; arguments, shapes and masks as
    :func:`torch.nn.functional.scaled_dot_product_attention`.

    Of every group of M keys a query keeps those with the N largest scores; softmax and the product with ``value`` run
    on what is kept. Masked keys never take a slot from visible ones; a query that sees no key gives 0. Differentiable
    once with respect to query, key and value; the selection is held fixed in the backward pass.

    Args:
        query: ``[..., heads, n_q, d]``, float32, float16 or bfloat16, d up to 256.
        key: ``[..., kv_heads, n_k, d]``; leading dimensions broadcast against the query's.
        value: ``[..., kv_heads, n_k, d_v]``.
        attn_mask: broadcasts to ``[..., heads, n_q, n_k]``. Boolean: True takes part. Floating: added to the scaled
            scores; -inf masks. May be combined with the other masks; a key is visible when all of them allow it.
        dropout_p: must be 0; there is no dropout.
        is_causal: a query sees keys up to its own position.
        scale: factor of the scores, default ``d ** -0.5``; finite and positive.
        enable_gqa: heads may be a multiple of kv_heads.
        pattern: ``"N:M"`` with 1 <= N <= M <= 32, or ``"dense"`` for no pruning.
        grouping: ``"interleaved"`` (groups spread over blocks of 128 keys) or ``"consecutive"`` (neighbouring keys).
        return_lse: also return the logarithm of the sum of the kept scores' exponentials.
        attn_bias: an additive bias beside a boolean ``attn_mask``, so that neither has to be expanded into the other.
        window: ``(left, right)``: how many keys before and after its own position a query sees, None for no bound; an
            int stands for both sides.
        alignment: where position 0 of the query lies when n_q != n_k, for ``is_causal`` and ``window``:
            ``"top_left"``, at key 0, as PyTorch; ``"bottom_right"``, so that the last query sits at the last key.
        offset: moves that position: for pieces of longer sequences, the first query's position less the first key's.
            With pieces of keys that start at multiples of 128 (``"consecutive"``: of M), :func:`dspattn.merge` joins
            the results.
        key_lengths: ``[batch]`` integers; keys at and past the length are masked.
        allow_tf32: whether GPU kernels may run the products of float32 inputs in tf32.
        out_dtype: type of the result: the query's (default) or ``torch.float32``, for results that are to be merged.
        kernel: name of a row of the kernel table to run; default: the first that fits.

    Returns:
        ``[..., heads, n_q, d_v]`` in ``out_dtype`` and, with ``return_lse``, float32 ``[..., heads, n_q]``.

    Raises:
        DspattnError: with every reason the call cannot be served.

    Example:
        >>> q = k = v = torch.randn(1, 8, 100, 64)
        >>> attention(q, k, v, is_causal=True, pattern="2:4").shape
        torch.Size([1, 8, 100, 64])
    """
    if stand_ins and (other := stand_in()) is not None:
        return other.attention(
            query, key, value, attn_mask=attn_mask, dropout_p=dropout_p, is_causal=is_causal, scale=scale,
            enable_gqa=enable_gqa, pattern=pattern, grouping=grouping, return_lse=return_lse, attn_bias=attn_bias,
            window=window, alignment=alignment, offset=offset, key_lengths=key_lengths, allow_tf32=allow_tf32,
            out_dtype=out_dtype, kernel=kernel,
        )  # fmt: skip
    if dropout_p != 0.0:
        raise DspattnError([f"dropout_p: expected 0 (attention dropout is not offered), got {dropout_p}"])
    keep, group = parse_pattern(pattern)
    left, right = parse_window(window)
    interleaved, top_left = parse_grouping(grouping), parse_alignment(alignment)
    full_fp32 = not allow_tf32
    fp32 = out_dtype is not None and wants_fp32(query, out_dtype)
    options = (
        0, 0, keep, group, interleaved, is_causal, top_left, left, right, scale, full_fp32, kernel, offset, fp32
    )  # fmt: skip
    if key_lengths is not None and key_lengths.dtype != torch.int32:
        key_lengths = key_lengths.to(torch.int32)
    lead: tuple[int, ...] | None = None
    if not _is_plain(query, key, value, enable_gqa):
        query, key, value, lead = _to_four_dims(query, key, value, enable_gqa)
    allowed, bias = _split_mask(attn_mask, query, key, lead)
    if attn_bias is not None:
        _, more = _split_mask(attn_bias, query, key, lead, "attn_bias")
        if more is None:
            raise DspattnError(["attn_bias: expected a floating tensor (a boolean one is attn_mask), got torch.bool"])
        bias = more if bias is None else bias + more
    out, lse = run(query, key, value, allowed, bias, key_lengths, None, None, options)
    if lead is not None:
        shape = (*lead, *out.shape[2:]) if len(lead) > 0 else out.shape[2:]
        out, lse = out.reshape(shape), lse.reshape(shape[:-1])
    return (out, lse) if return_lse else out


@overload
def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | None = ...,
    max_seqlen_k: int | None = ...,
    *,
    attn_mask: Tensor | None = ...,
    is_causal: bool = ...,
    scale: float | None = ...,
    pattern: str = ...,
    grouping: Grouping = ...,
    return_lse: Literal[False] = ...,
    window: Window = ...,
    alignment: Alignment = ...,
    offset: int = ...,
    allow_tf32: bool = ...,
    out_dtype: torch.dtype | None = ...,
    kernel: str = ...,
) -> Tensor: ...


@overload
def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | None = ...,
    max_seqlen_k: int | None = ...,
    *,
    attn_mask: Tensor | None = ...,
    is_causal: bool = ...,
    scale: float | None = ...,
    pattern: str = ...,
    grouping: Grouping = ...,
    return_lse: Literal[True],
    window: Window = ...,
    alignment: Alignment = ...,
    offset: int = ...,
    allow_tf32: bool = ...,
    out_dtype: torch.dtype | None = ...,
    kernel: str = ...,
) -> tuple[Tensor, Tensor]: ...


def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    pattern: str = "2:4",
    grouping: Grouping = "interleaved",
    return_lse: bool = False,
    window: Window = None,
    alignment: Alignment = "bottom_right",
    offset: int = 0,
    allow_tf32: bool = True,
    out_dtype: torch.dtype | None = None,
    kernel: str = "",
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention over a packed batch: sequences of different lengths laid end to end, without padding.

    Sequence s is rows ``cu_seqlens_q[s]`` to ``cu_seqlens_q[s + 1]`` of the query, likewise of key and value; groups,
    masks and diagonals count from each sequence's own start.

    Args:
        query: ``[total_q, heads, d]``.
        key: ``[total_k, kv_heads, d]``; heads a multiple of kv_heads.
        value: ``[total_k, kv_heads, d_v]``.
        cu_seqlens_q: ``[batch + 1]`` integers, starts at 0, never decreases. Rows past its end see no key: their
            output is 0, their LSE -inf and their gradients are 0.
        cu_seqlens_k: the same for the keys.
        max_seqlen_q: longest query sequence; default: read from ``cu_seqlens_q`` (which waits for a GPU).
        max_seqlen_k: longest key sequence; default: read from ``cu_seqlens_k``.
        attn_mask: as in :func:`attention`, indexed by position within the sequence:
            ``[batch or 1, heads or 1, max_seqlen_q or 1, max_seqlen_k or 1]``.
        alignment: as in :func:`attention`; the default here is ``"bottom_right"``, as in other packed interfaces.

    The other arguments are those of :func:`attention`.

    Returns:
        ``[total_q, heads, d_v]`` and, with ``return_lse``, float32 ``[heads, total_q]``.

    Example:
        >>> q = k = v = torch.randn(12, 2, 16)
        >>> lengths = torch.tensor([0, 5, 12], dtype=torch.int32)
        >>> varlen_attention(q, k, v, lengths, lengths, is_causal=True).shape
        torch.Size([12, 2, 16])
    """
    if stand_ins and (other := stand_in()) is not None:
        return other.varlen_attention(
            query, key, value, cu_seqlens_q, cu_seqlens_k, attn_mask=attn_mask, is_causal=is_causal, scale=scale,
            pattern=pattern, grouping=grouping, return_lse=return_lse, window=window, offset=offset,
            allow_tf32=allow_tf32, out_dtype=out_dtype, kernel=kernel,
        )  # fmt: skip
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.dim() != 3:
            raise DspattnError([f"{name}: expected 3 dimensions [total, heads, d], got {list(tensor.shape)}"])
    for name, tensor in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        if tensor.dim() != 1 or tensor.numel() == 0:
            raise DspattnError([f"{name}: expected [batch + 1] cumulative lengths, got {list(tensor.shape)}"])
    keep, group = parse_pattern(pattern)
    left, right = parse_window(window)
    interleaved, top_left = parse_grouping(grouping), parse_alignment(alignment)
    max_q = longest(cu_seqlens_q) if max_seqlen_q is None else max_seqlen_q
    max_k = longest(cu_seqlens_k) if max_seqlen_k is None else max_seqlen_k
    full_fp32 = not allow_tf32
    fp32 = out_dtype is not None and wants_fp32(query, out_dtype)
    options = (
        max_q, max_k, keep, group, interleaved, is_causal, top_left, left, right, scale, full_fp32, kernel, offset, fp32
    )  # fmt: skip
    q, k, v = (tensor.unsqueeze(0).transpose(1, 2) for tensor in (query, key, value))
    if attn_mask is not None and attn_mask.dim() != 4:
        raise DspattnError([f"attn_mask: expected 4 dimensions for a packed batch, got {list(attn_mask.shape)}"])
    allowed, bias = _split_mask(attn_mask, q, k, None)
    cu_q, cu_k = cu_seqlens_q.to(torch.int32), cu_seqlens_k.to(torch.int32)
    out, lse = run(q, k, v, allowed, bias, None, cu_q, cu_k, options)
    out = out.squeeze(0).transpose(0, 1)
    return (out, lse.squeeze(0)) if return_lse else out


def attention_weights(query: Tensor, key: Tensor, attn_mask: Tensor | None = None, **options: Any) -> Tensor:
    """The weights :func:`attention` gives each key: rows sum to 1 over the kept keys and are 0 where pruned or masked.

    For looking at maps and for modules that must return weights. It runs the attention itself, on columns of the
    identity matrix as values, so it shows exactly what the kernel kept; it takes n_k / 256 passes and memory of
    n_q * n_k.

    Args:
        query: ``[..., heads, n_q, d]``.
        key: ``[..., kv_heads, n_k, d]``.
        attn_mask: as in :func:`attention`.
        options: the other arguments of :func:`attention`.

    Returns:
        ``[..., heads, n_q, n_k]`` in the query's type.

    Example:
        >>> q = k = torch.randn(1, 1, 4, 8)
        >>> weights = attention_weights(q, k, pattern="1:2", grouping="consecutive")
        >>> (weights > 0).sum(-1).tolist()
        [[[2, 2, 2, 2]]]
    """
    if options.pop("return_lse", False):
        raise DspattnError(["return_lse: expected False for attention_weights, got True"])
    n_k = key.shape[-2]
    columns = 256  # the widest value head the library takes
    eye = torch.eye(n_k, dtype=query.dtype, device=query.device)
    value_lead = key.shape[:-2]
    parts = [
        attention(query, key, eye[:, start : start + columns].expand(*value_lead, -1, -1), attn_mask, **options)
        for start in range(0, n_k, columns)
    ]
    if not parts:
        shape = torch.broadcast_shapes(query.shape[:-2], key.shape[:-2])
        return query.new_zeros((*shape, query.shape[-2], 0))
    return torch.cat(parts, -1)


def stand_in() -> Any:
    """The open block of dspattn.parallel.context that this thread is in, or None."""
    thread = threading.get_ident()
    return next((other for other in reversed(stand_ins) if other.thread == thread), None)


def parse_window(window: Window) -> tuple[int | None, int | None]:
    """The two sides of a window, None for no bound."""
    if window is None:
        return None, None
    if isinstance(window, tuple):
        if len(window) != 2:
            raise DspattnError([f"window: expected (left, right), got {window!r}"])
        return window
    return window, window


def parse_alignment(alignment: str) -> bool:
    """True for top_left."""
    if alignment == "top_left":
        return True
    if alignment == "bottom_right":
        return False
    raise DspattnError([f'alignment: expected "top_left" or "bottom_right", got {alignment!r}'])


def wants_fp32(query: Tensor, out_dtype: torch.dtype) -> bool:
    """Whether results are to be float32 whatever the inputs' type."""
    if out_dtype == torch.float32:
        return True
    if out_dtype == query.dtype:
        return False
    names = [str(dtype).removeprefix("torch.") for dtype in (query.dtype, out_dtype)]
    raise DspattnError([f"out_dtype: expected the query's {names[0]} or float32, got {names[1]}"])


def longest(cumulative: Tensor) -> int:
    """The longest sequence of cumulative lengths."""
    return int(torch.diff(cumulative).max()) if cumulative.numel() > 1 else 0


def run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    allowed: Tensor | None,
    bias: Tensor | None,
    key_lengths: Tensor | None,
    cu_q: Tensor | None,
    cu_k: Tensor | None,
    options: Options,
) -> tuple[Tensor, Tensor]:
    """The operator on four-dimensional tensors, with what PyTorch's own attention does around it: autocast, and rows
    that are contiguous."""
    if bias is not None and bias.requires_grad and torch.is_grad_enabled():
        raise DspattnError(
            ["attn_mask: expected requires_grad=False (its gradient is not computed), got a bias that requires grad"]
        )
    device = "cpu" if q.is_cpu else "cuda" if q.is_cuda else None  # q.device.type takes a microsecond
    if device is not None and torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        q, k, v = (_autocast(t, dtype) for t in (q, k, v))
        bias = None if bias is None else _autocast(bias, dtype)
    if not (q.is_contiguous() or q.stride(-1) == 1):  # asking for a stride takes twice as long
        q = q.contiguous()
    if not (k.is_contiguous() or k.stride(-1) == 1):
        k = k.contiguous()
    if not (v.is_contiguous() or v.stride(-1) == 1):
        v = v.contiguous()
    tensors = (q, k, v, allowed, bias, key_lengths, cu_q, cu_k)
    if torch.compiler.is_compiling():
        return _ops.attention(*tensors, *options)
    try:
        return _ops.run(tensors, options)
    except RuntimeError as error:
        raise _ops.translated(error) from None


def _autocast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """As autocast does: floating types are cast, except float64."""
    return tensor.to(dtype) if tensor.is_floating_point() and tensor.dtype != torch.float64 else tensor


def _is_plain(q: Tensor, k: Tensor, v: Tensor, enable_gqa: bool) -> bool:
    """Whether the tensors are what the operator takes: four dimensions, one batch, heads that match."""
    of_q, of_k, of_v = q.shape, k.shape, v.shape  # each access makes a new object
    if len(of_q) != 4 or len(of_k) != 4 or len(of_v) != 4:
        return False
    if of_k[0] != of_q[0] or of_v[0] != of_q[0] or of_k[1] != of_v[1]:
        return False
    return enable_gqa or of_k[1] == of_q[1]


def _to_four_dims(q: Tensor, k: Tensor, v: Tensor, enable_gqa: bool) -> tuple[Tensor, Tensor, Tensor, tuple[int, ...]]:
    """[batch, heads, n, d] of each, and the leading dimensions the result is to have."""
    for name, tensor in (("query", q), ("key", k), ("value", v)):
        if tensor.dim() < 2:
            raise DspattnError([f"{name}: expected at least 2 dimensions [..., n, d], got {list(tensor.shape)}"])
    if enable_gqa and min(q.dim(), k.dim(), v.dim()) < 3:
        raise DspattnError(["enable_gqa: expected at least 3 dimensions [..., heads, n, d] of query, key and value"])
    heads_of = [t.shape[-3] if t.dim() > 2 else 1 for t in (q, k, v)]
    try:
        batch = torch.broadcast_shapes(*(t.shape[:-3] for t in (q, k, v)))
        if enable_gqa:
            heads, kv_heads = heads_of[0], max(heads_of[1:])
        else:
            heads = torch.broadcast_shapes(*((h,) for h in heads_of))[0]
            # One key head under many query heads needs no copy: that is grouped-query attention.
            kv_heads = max(heads_of[1:]) if max(heads_of[1:]) == 1 else heads
        lead = (*batch, heads) if max(q.dim(), k.dim(), v.dim()) > 2 else ()
        wanted = (heads, kv_heads, kv_heads)
        q, k, v = (
            t.expand(*batch, h, *t.shape[-2:]).reshape(batch.numel(), h, *t.shape[-2:])
            for t, h in zip((q, k, v), wanted, strict=True)
        )
    except RuntimeError:
        shapes = ", ".join(str(list(t.shape)) for t in (q, k, v))
        shared = not enable_gqa and heads_of[1] == heads_of[2] > 1 and heads_of[0] % heads_of[1] == 0
        hint = "; enable_gqa=True lets query heads share those of key and value" if shared else ""
        raise DspattnError(
            [f"query, key, value: expected leading dimensions that broadcast against each other, got {shapes}{hint}"]
        ) from None
    return q, k, v, lead


def _split_mask(
    mask: Tensor | None, q: Tensor, k: Tensor, lead: tuple[int, ...] | None, name: str = "attn_mask"
) -> tuple[Tensor | None, Tensor | None]:
    """The mask as (boolean, additive) with four dimensions; one of the two is None."""
    if mask is None:
        return None, None
    if mask.dim() > 4 or lead is not None:
        full = q.shape[:2] if lead is None else lead
        mask = _mask_to_four_dims(mask, full, q, k)
    while mask.dim() < 4:
        mask = mask.unsqueeze(0)
    if mask.dtype == torch.bool:
        return mask, None
    if not mask.is_floating_point():
        given = str(mask.dtype).removeprefix("torch.")
        raise DspattnError([f"{name}.dtype: expected bool, float32, float16 or bfloat16, got {given}"])
    return None, mask


def _mask_to_four_dims(mask: Tensor, lead: tuple[int, ...], q: Tensor, k: Tensor) -> Tensor:
    """The mask of inputs whose leading dimensions were joined: its own are broadcast and joined likewise."""
    full = (*lead, q.shape[-2], k.shape[-2])
    surplus = mask.dim() - len(full)
    try:
        if surplus > 0:
            mask = mask.reshape(mask.shape[surplus:])
        batch = lead[:-1]
        if mask.dim() <= 3 or len(batch) <= 1:
            return mask
        return mask.expand(*batch, *mask.shape[-3:]).reshape(math.prod(batch), *mask.shape[-3:])
    except RuntimeError:
        raise DspattnError(
            [f"attn_mask: expected a shape that broadcasts to {list(full)}, got {list(mask.shape)}"]
        ) from None
