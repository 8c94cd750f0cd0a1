"""Attention as functions: ``attention`` in the signature of PyTorch's own, ``varlen_attention`` for packed batches."""

from __future__ import annotations

from typing import Literal, overload

import torch
from torch import Tensor

from . import _qkv
from ._flags import as_flags, refuse_flags
from ._inputs import (
    FOREIGN_ERRORS,
    Alignment,
    Window,
    explained,
    fits_operator,
    joined_biases,
    lengths_as_int32,
    longest,
    parse_alignment,
    parse_window,
    require_known,
    sinks_as_fp32,
    split_mask,
    take_causal_biases,
    to_four_dims,
    wants_fp32,
)
from ._not_offered import not_scriptable
from ._running import dropout_state, run, stand_in, stand_ins
from ._schema import ProblemArguments
from .errors import DspattnError
from .patterns import Grouping, Rest, Selection, parse_grouping, parse_pattern, parse_rest, parse_selection

PLAIN_MASKS = (Tensor, type(None))


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
    rest: Rest = ...,
    selection: Selection = ...,
    return_lse: Literal[False] = ...,
    attn_bias: Tensor | None = ...,
    window: Window = ...,
    alignment: Alignment = ...,
    offset: int = ...,
    key_lengths: Tensor | None = ...,
    soft_cap: float | None = ...,
    sinks: Tensor | None = ...,
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
    rest: Rest = ...,
    selection: Selection = ...,
    return_lse: Literal[True],
    attn_bias: Tensor | None = ...,
    window: Window = ...,
    alignment: Alignment = ...,
    offset: int = ...,
    key_lengths: Tensor | None = ...,
    soft_cap: float | None = ...,
    sinks: Tensor | None = ...,
    allow_tf32: bool = ...,
    out_dtype: torch.dtype | None = ...,
    kernel: str = ...,
) -> tuple[Tensor, Tensor]: ...


@not_scriptable
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
    rest: Rest = "drop",
    selection: Selection = "own",
    return_lse: bool = False,
    attn_bias: Tensor | None = None,
    window: Window = None,
    alignment: Alignment = "top_left",
    offset: int = 0,
    key_lengths: Tensor | None = None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
    allow_tf32: bool = True,
    out_dtype: torch.dtype | None = None,
    kernel: str = "",
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention over scores pruned to ``pattern``; arguments, shapes and masks as
    :func:`torch.nn.functional.scaled_dot_product_attention`.

    Of every group of M keys a query keeps those with the N largest scores; softmax and the product with ``value`` run
    on what is kept. Masked keys never take a slot from visible ones; a query that sees no key gives 0. Differentiable
    once with respect to query, key, value, biases and sinks (``rest="drop"``); the selection is held fixed in the
    backward pass.

    Args:
        query: ``[..., heads, n_q, d]``, float32, float16 or bfloat16, d up to 512.
        key: ``[..., kv_heads, n_k, d]``; leading dimensions broadcast against the query's.
        value: ``[..., kv_heads, n_k, d_v]``.
        attn_mask: broadcasts to ``[..., heads, n_q, n_k]``. Boolean: True takes part. Floating: added to the scaled
            scores; -inf masks. May be combined with the other masks; a key is visible when all of them allow it.
            One of ``torch.nn.attention.bias``' causal biases stands for ``is_causal`` with its alignment.
        dropout_p: probability that a kept weight is dropped, the others being divided by 1 - dropout_p; from PyTorch's
            generator of the query's device. As with PyTorch's function, pass 0 outside of training.
        is_causal: a query sees keys up to its own position.
        scale: factor of the scores, default ``d ** -0.5``; finite and positive.
        enable_gqa: heads may be a multiple of kv_heads.
        pattern: ``"N:M"`` with 1 <= N <= M <= 32, or ``"dense"`` for no pruning.
        grouping: ``"interleaved"`` (groups spread over blocks of 128 keys) or ``"consecutive"`` (neighbouring keys).
        rest: what becomes of the weight of the pruned keys. ``"drop"``: it is left out of the softmax. ``"mean"``: the
            softmax is over all visible keys, and the pruned ones together bring the mean of the values (over the
            whole blocks of 128 keys that the query sees): closer to dense attention, above all with long texts. For
            inference: there are no gradients. Mask tensors must have one query row, ``[..., 1, n_k]``.
        selection: whose scores choose the keys: ``"own"``, each query head's; ``"shared"``, the query heads that share
            a key head keep the same keys: those of the largest sums of their weights.
        return_lse: also return the logarithm of the sum of the kept scores' exponentials (with ``rest="mean"``, of all
            visible ones').
        attn_bias: an additive bias beside a boolean ``attn_mask``, so that neither has to be expanded into the other.
        window: ``(left, right)``: how many keys before and after its own position a query sees, None for no bound; an
            int stands for both sides.
        alignment: where position 0 of the query lies when n_q != n_k, for ``is_causal`` and ``window``:
            ``"top_left"``, at key 0, as PyTorch; ``"bottom_right"``, so that the last query sits at the last key.
        offset: moves that position: for pieces of longer sequences, the first query's position less the first key's.
            With pieces of keys that start at multiples of 128 (``"consecutive"``: of M), :func:`dspattn.merge` joins
            the results.
        key_lengths: ``[batch]`` integers; keys at and past the length are masked.
        soft_cap: scaled scores become ``soft_cap * tanh(score / soft_cap)`` before biases are added. The choice of keys
            is by the scores as they were.
        sinks: ``[heads]`` floating: a logit in the softmax of each of a head's rows, beside its keys and without a
            value; the LSE counts it.
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
            enable_gqa=enable_gqa, pattern=pattern, grouping=grouping, rest=rest, selection=selection,
            return_lse=return_lse, attn_bias=attn_bias, window=window, alignment=alignment, offset=offset,
            key_lengths=key_lengths, soft_cap=soft_cap, sinks=sinks, allow_tf32=allow_tf32, out_dtype=out_dtype,
            kernel=kernel,
        )  # fmt: skip
    lead: tuple[int, ...] | None = None
    try:
        if (
            not torch.compiler.is_compiling()
            and attn_mask is None and attn_bias is None and key_lengths is None and sinks is None
            and (scale is None or type(scale) is float) and type(is_causal) is bool
            and (type(dropout_p) is float or type(dropout_p) is int) and dropout_p == 0 and soft_cap is None
            and type(offset) is int and offset == 0 and type(kernel) is str and kernel == "" and out_dtype is None
            and return_lse is False and type(enable_gqa) is bool and type(allow_tf32) is bool
        ):  # fmt: skip
            options = (pattern, grouping, rest, selection, alignment, is_causal, allow_tf32, window)
            plain = _qkv.attention(query, key, value, options, scale, enable_gqa)
            if plain is not None:
                return plain
        keep, group = parse_pattern(pattern)
        left, right = parse_window(window)
        interleaved, top_left = parse_grouping(grouping), parse_alignment(alignment)
        rest_mean, shared_choice = parse_rest(rest), parse_selection(selection)
        if type(query) is not Tensor or type(key) is not Tensor or type(value) is not Tensor:
            if isinstance(query, torch.fx.Proxy):  # recorded as one call, as PyTorch's functions are
                return torch.overrides.handle_torch_function(
                    attention, (query,), query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa,
                    pattern=pattern, grouping=grouping, rest=rest, selection=selection, return_lse=return_lse,
                    attn_bias=attn_bias, window=window, alignment=alignment, key_lengths=key_lengths, offset=offset,
                    soft_cap=soft_cap, sinks=sinks, allow_tf32=allow_tf32, out_dtype=out_dtype, kernel=kernel,
                )  # fmt: skip
            for name, tensor in (("query", query), ("key", key), ("value", value)):
                require_known(name, tensor)
        is_causal, enable_gqa, return_lse, allow_tf32 = as_flags(
            is_causal=is_causal, enable_gqa=enable_gqa, return_lse=return_lse, allow_tf32=allow_tf32
        )
        refuse_flags(scale=scale, offset=offset, soft_cap=soft_cap)
        if key_lengths is not None:
            key_lengths = lengths_as_int32("key_lengths", key_lengths)
        if type(attn_mask) not in PLAIN_MASKS or type(attn_bias) not in PLAIN_MASKS:
            masks = {"attn_mask": attn_mask, "attn_bias": attn_bias}
            is_causal, top_left = take_causal_biases(masks, query, key, is_causal, top_left, window)
            attn_mask, attn_bias = masks.values()
        if not fits_operator(query, key, value, enable_gqa):
            query, key, value, lead = to_four_dims(query, key, value, enable_gqa)
        allowed, bias = split_mask(attn_mask, query, key, lead)
        if attn_bias is not None:
            _, more = split_mask(attn_bias, query, key, lead, "attn_bias")
            if more is None:
                raise DspattnError(
                    ["attn_bias: expected a floating tensor (a boolean one is attn_mask), got torch.bool"]
                )
            bias = joined_biases(bias, more, query, key)
        out, lse = run(
            ProblemArguments(
                query,
                key,
                value,
                allowed,
                bias,
                key_lengths,
                keep=keep,
                group=group,
                interleaved=interleaved,
                causal=is_causal,
                top_left=top_left,
                window_left=left,
                window_right=right,
                scale=scale,
                full_fp32=not allow_tf32,
                kernel=kernel,
                offset=offset,
                fp32_results=out_dtype is not None and wants_fp32(query, out_dtype),
                rest_mean=rest_mean,
                shared_choice=shared_choice,
                soft_cap=soft_cap,
                sinks=sinks_as_fp32(sinks),
                dropout=dropout_p,
                dropout_state=dropout_state(query) if dropout_p > 0 else None,
            )
        )
    except DspattnError:
        raise
    except FOREIGN_ERRORS as error:
        raise explained(
            error,
            {
                "query": query,
                "key": key,
                "value": value,
                "attn_mask": attn_mask,
                "attn_bias": attn_bias,
                "key_lengths": key_lengths,
                "is_causal": is_causal,
                "scale": scale,
                "kernel": kernel,
                "offset": offset,
                "dropout_p": dropout_p,
                "soft_cap": soft_cap,
                "sinks": sinks,
            },
        ) from None
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
    dropout_p: float = ...,
    is_causal: bool = ...,
    scale: float | None = ...,
    pattern: str = ...,
    grouping: Grouping = ...,
    rest: Rest = ...,
    selection: Selection = ...,
    return_lse: Literal[False] = ...,
    window: Window = ...,
    alignment: Alignment = ...,
    offset: int = ...,
    soft_cap: float | None = ...,
    sinks: Tensor | None = ...,
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
    dropout_p: float = ...,
    is_causal: bool = ...,
    scale: float | None = ...,
    pattern: str = ...,
    grouping: Grouping = ...,
    rest: Rest = ...,
    selection: Selection = ...,
    return_lse: Literal[True],
    window: Window = ...,
    alignment: Alignment = ...,
    offset: int = ...,
    soft_cap: float | None = ...,
    sinks: Tensor | None = ...,
    allow_tf32: bool = ...,
    out_dtype: torch.dtype | None = ...,
    kernel: str = ...,
) -> tuple[Tensor, Tensor]: ...


@not_scriptable
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
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    pattern: str = "2:4",
    grouping: Grouping = "interleaved",
    rest: Rest = "drop",
    selection: Selection = "own",
    return_lse: bool = False,
    window: Window = None,
    alignment: Alignment = "bottom_right",
    offset: int = 0,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
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
            query, key, value, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, max_seqlen_q=max_seqlen_q,
            max_seqlen_k=max_seqlen_k, attn_mask=attn_mask, dropout_p=dropout_p, is_causal=is_causal, scale=scale,
            soft_cap=soft_cap, sinks=sinks, pattern=pattern, grouping=grouping, rest=rest, selection=selection,
            return_lse=return_lse, window=window, alignment=alignment, offset=offset, allow_tf32=allow_tf32,
            out_dtype=out_dtype, kernel=kernel,
        )  # fmt: skip
    keep, group = parse_pattern(pattern)
    left, right = parse_window(window)
    interleaved, top_left = parse_grouping(grouping), parse_alignment(alignment)
    rest_mean, shared_choice = parse_rest(rest), parse_selection(selection)
    is_causal, return_lse, allow_tf32 = as_flags(is_causal=is_causal, return_lse=return_lse, allow_tf32=allow_tf32)
    refuse_flags(max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k, scale=scale, offset=offset, soft_cap=soft_cap)
    try:
        for name, tensor in (("query", query), ("key", key), ("value", value)):
            require_known(name, tensor)
            if tensor.dim() != 3:
                raise DspattnError([f"{name}: expected 3 dimensions [total, heads, d], got {list(tensor.shape)}"])
        cu_q = lengths_as_int32("cu_seqlens_q", cu_seqlens_q)
        cu_k = lengths_as_int32("cu_seqlens_k", cu_seqlens_k)
        for name, tensor in (("cu_seqlens_q", cu_q), ("cu_seqlens_k", cu_k)):
            if tensor.dim() != 1 or tensor.numel() == 0:
                raise DspattnError([f"{name}: expected [batch + 1] cumulative lengths, got {list(tensor.shape)}"])
        max_q = longest("cu_seqlens_q", cu_q) if max_seqlen_q is None else max_seqlen_q
        max_k = longest("cu_seqlens_k", cu_k) if max_seqlen_k is None else max_seqlen_k
        q, k, v = (tensor.unsqueeze(0).transpose(1, 2) for tensor in (query, key, value))
        if attn_mask is not None:
            require_known("attn_mask", attn_mask)
            if attn_mask.dim() != 4:
                raise DspattnError(
                    [f"attn_mask: expected 4 dimensions for a packed batch, got {list(attn_mask.shape)}"]
                )
        allowed, bias = split_mask(attn_mask, q, k, None)
        out, lse = run(
            ProblemArguments(
                q,
                k,
                v,
                allowed,
                bias,
                cu_q=cu_q,
                cu_k=cu_k,
                max_q=max_q,
                max_k=max_k,
                keep=keep,
                group=group,
                interleaved=interleaved,
                causal=is_causal,
                top_left=top_left,
                window_left=left,
                window_right=right,
                scale=scale,
                full_fp32=not allow_tf32,
                kernel=kernel,
                offset=offset,
                fp32_results=out_dtype is not None and wants_fp32(query, out_dtype),
                rest_mean=rest_mean,
                shared_choice=shared_choice,
                soft_cap=soft_cap,
                sinks=sinks_as_fp32(sinks),
                dropout=dropout_p,
                dropout_state=dropout_state(query) if dropout_p > 0 else None,
            )
        )
    except DspattnError:
        raise
    except FOREIGN_ERRORS as error:
        raise explained(
            error,
            {
                "query": query,
                "key": key,
                "value": value,
                "cu_seqlens_q": cu_seqlens_q,
                "cu_seqlens_k": cu_seqlens_k,
                "max_seqlen_q": max_seqlen_q,
                "max_seqlen_k": max_seqlen_k,
                "attn_mask": attn_mask,
                "is_causal": is_causal,
                "scale": scale,
                "kernel": kernel,
                "offset": offset,
                "dropout_p": dropout_p,
                "soft_cap": soft_cap,
                "sinks": sinks,
            },
        ) from None
    out = out.squeeze(0).transpose(0, 1)
    return (out, lse.squeeze(0)) if return_lse else out
