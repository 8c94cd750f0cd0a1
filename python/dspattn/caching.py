"""Attention against a cache of keys and values: pages, and sums of the values for ``rest="mean"``."""

from __future__ import annotations

from typing import Any, Literal, overload

import torch
from torch import Tensor

from . import _ops
from ._flags import as_flags, refuse_flags
from ._inputs import (
    FOREIGN_ERRORS,
    Alignment,
    Window,
    explained,
    lengths_as_int32,
    parse_alignment,
    parse_window,
    require_known,
)
from ._not_offered import not_scriptable
from ._running import refuse_pieces, run
from ._schema import ProblemArguments
from ._sparse_inputs import require_integer
from .errors import DspattnError
from .patterns import Grouping, Rest, Selection, parse_grouping, parse_pattern, parse_rest, parse_selection

BLOCK = 128  # keys whose values are summed together


@not_scriptable
def value_sums(
    value: Tensor,
    key_lengths: Tensor | None = None,
    *,
    block_table: Tensor | None = None,
) -> Tensor:
    """Sums of the values of a cache, which :func:`attention_with_cache` with ``rest="mean"`` reads in the place of
    pruned values.

    Args:
        value: ``[batch, kv_heads, n_k, d_v]``, the whole cache, or ``[pages, kv_heads, page_size, d_v]``.
        key_lengths: ``[batch]`` integers: keys there are; default: all.
        block_table: ``[batch, blocks]`` integers: the page of every block of keys.

    Returns:
        float32 ``[batch, kv_heads, 2 * blocks, d_v + 1]`` with a block for every 128 keys that the cache has room for:
        of each its own sum and that of all blocks up to it, and how many keys these are of. Bring it up to date with
        :func:`update_value_sums` when keys are added. Where sequences of a cache are reordered, so is its first
        dimension.

    Example:
        >>> value_sums(torch.randn(1, 8, 1000, 64)).shape
        torch.Size([1, 8, 14, 65])
    """
    _require_four("value", value)
    batch, n_k = value.shape[0], value.shape[2]
    if block_table is not None:
        _require_table(block_table)
        batch, n_k = block_table.shape[0], block_table.shape[-1] * value.shape[2]
    sums = value.new_zeros((batch, value.shape[1], 2 * (n_k // BLOCK), value.shape[3] + 1), dtype=torch.float32)
    return update_value_sums(sums, value, n_k, key_lengths, block_table=block_table)


@not_scriptable
def update_value_sums(
    sums: Tensor,
    value: Tensor,
    new_keys: int,
    key_lengths: Tensor | None = None,
    *,
    block_table: Tensor | None = None,
) -> Tensor:
    """Brings the sums of a cache's values up to date, in place, after keys were added or replaced.

    Reads of the values those of blocks of 128 keys that have a new key and are whole: nothing at most steps of a
    generation. Lengths are read on the device, so that a CUDA graph may hold this.

    Args:
        sums: of :func:`value_sums`.
        value: the cache, with the new keys' values.
        new_keys: of every sequence the last so many keys are new, or more than are.
        key_lengths: ``[batch]`` integers, with the new keys; default: all keys that the cache has room for.
        block_table: as of :func:`value_sums`.

    Returns:
        ``sums``.

    Example:
        >>> v, lengths = torch.ones(1, 1, 256, 2), torch.tensor([255])
        >>> sums = value_sums(v, lengths)
        >>> update_value_sums(sums, v, 1, lengths + 1)[0, 0, 3]
        tensor([256., 256., 256.])
    """
    _require_four("value", value)
    _require_sums(sums)
    require_integer("new_keys", new_keys)
    refuse_flags(new_keys=new_keys)
    if key_lengths is not None:
        key_lengths = lengths_as_int32("key_lengths", key_lengths)
    if block_table is not None:
        block_table = lengths_as_int32("block_table", block_table)
        _require_table(block_table)
    try:
        _ops.update_value_sums(sums, value, new_keys, key_lengths, block_table)
    except FOREIGN_ERRORS as error:
        raise explained(error, {"value": value, "sums": sums, "key_lengths": key_lengths}) from None
    return sums


@overload
def attention_with_cache(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_lengths: Tensor | None = ...,
    *,
    block_table: Tensor | None = ...,
    sums: Tensor | None = ...,
    is_causal: bool = ...,
    alignment: Alignment = ...,
    window: Window = ...,
    scale: float | None = ...,
    pattern: str = ...,
    grouping: Grouping = ...,
    rest: Rest = ...,
    selection: Selection = ...,
    return_lse: Literal[False] = ...,
    kernel: str = ...,
) -> Tensor: ...


@overload
def attention_with_cache(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_lengths: Tensor | None = ...,
    *,
    block_table: Tensor | None = ...,
    sums: Tensor | None = ...,
    is_causal: bool = ...,
    alignment: Alignment = ...,
    window: Window = ...,
    scale: float | None = ...,
    pattern: str = ...,
    grouping: Grouping = ...,
    rest: Rest = ...,
    selection: Selection = ...,
    return_lse: Literal[True],
    kernel: str = ...,
) -> tuple[Tensor, Tensor]: ...


@not_scriptable
def attention_with_cache(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_lengths: Tensor | None = None,
    *,
    block_table: Tensor | None = None,
    sums: Tensor | None = None,
    is_causal: bool = False,
    alignment: Alignment = "bottom_right",
    window: Window = None,
    scale: float | None = None,
    pattern: str = "2:4",
    grouping: Grouping = "interleaved",
    rest: Rest = "drop",
    selection: Selection = "own",
    return_lse: bool = False,
    kernel: str = "",
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of new queries against a cache, in one piece or in pages; for inference.

    What is not named here is as in :func:`dspattn.attention`.

    Args:
        query: ``[batch, heads, n_q, d]``; heads a multiple of the key heads.
        key: ``[batch, kv_heads, n_k, d]``, or with a ``block_table`` ``[pages, kv_heads, page_size, d]``.
        value: the same with d_v.
        key_lengths: ``[batch]`` integers, read on the device: keys there are of each sequence. What lies past them is
            not read.
        block_table: ``[batch, blocks]`` integers: key j of a sequence is row ``j % page_size`` of page
            ``block_table[:, j // page_size]``. Page sizes are multiples of 16; numbers that are no page count as keys
            past the length.
        sums: with ``rest="mean"``, of :func:`value_sums`, up to date: of the values those that are kept are read, and
            no others. Without them every call reads all values. The CPU kernels make sums of their own.
        alignment: of the diagonal against the n_k keys that the cache has room for, not against ``key_lengths``:
            several new queries behind a length below n_k are kept from each other's keys by a mask (``attn_mask`` of
            :func:`dspattn.attention`), not by ``is_causal``.

    Returns:
        ``[batch, heads, n_q, d_v]`` and, with ``return_lse``, float32 ``[batch, heads, n_q]``.

    Raises:
        DspattnError: with every reason the call cannot be served.

    Example:
        >>> q, k, v = torch.randn(1, 8, 1, 64), *torch.randn(2, 1, 2, 1000, 64)
        >>> lengths, sums = torch.tensor([700]), value_sums(v, torch.tensor([700]))
        >>> attention_with_cache(q, k, v, lengths, rest="mean", sums=sums).shape
        torch.Size([1, 8, 1, 64])
    """
    refuse_pieces("attention_with_cache")
    keep, group = parse_pattern(pattern)
    left, right = parse_window(window)
    is_causal, return_lse = as_flags(is_causal=is_causal, return_lse=return_lse)
    refuse_flags(scale=scale)
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        _require_four(name, tensor)
    if sums is not None:
        _require_sums(sums)
    try:
        out, lse = run(
            ProblemArguments(
                query,
                key,
                value,
                key_lengths=None if key_lengths is None else lengths_as_int32("key_lengths", key_lengths),
                block_table=None if block_table is None else lengths_as_int32("block_table", block_table),
                value_sums=sums,
                keep=keep,
                group=group,
                interleaved=parse_grouping(grouping),
                causal=is_causal,
                top_left=parse_alignment(alignment),
                window_left=left,
                window_right=right,
                scale=scale,
                kernel=kernel,
                rest_mean=parse_rest(rest),
                shared_choice=parse_selection(selection),
            )
        )
    except DspattnError:
        raise
    except FOREIGN_ERRORS as error:
        given = {"query": query, "key": key, "value": value, "sums": sums, "scale": scale, "kernel": kernel}
        raise explained(error, given) from None
    return (out, lse) if return_lse else out


def _update_each(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> tuple[None, None]:
    """The batching rule of ``torch.vmap``: the sums of one sample after the other."""
    if in_dims[0] is None:
        raise DspattnError(
            ["sums: expected some for each sample where torch.vmap maps the values, got the same for all"]
        )
    for i in range(info.batch_size):
        given = [a if dim is None else a.select(dim, i) for a, dim in zip(arguments, in_dims, strict=True)]
        _ops.update_value_sums(*given)
    return None, None


torch.library.register_vmap("dspattn::update_value_sums", _update_each)


def _require_sums(sums: Tensor) -> None:
    """The library says the rest; of types that it does not know it says what tensors of values may be."""
    require_known("sums", sums)
    if sums.dtype != torch.float32:
        raise DspattnError([f"sums.dtype: expected float32, got {str(sums.dtype).removeprefix('torch.')}"])


def _require_table(block_table: Tensor) -> None:
    require_known("block_table", block_table)
    if block_table.dim() != 2:
        raise DspattnError([f"block_table: expected [batch, blocks], got {list(block_table.shape)}"])


def _require_four(name: str, tensor: Tensor) -> None:
    require_known(name, tensor)
    if tensor.dim() != 4:
        raise DspattnError([f"{name}: expected 4 dimensions [batch, heads, n, d], got {list(tensor.shape)}"])
