"""Attention where each block of queries sees a few blocks of keys: what local attention, Longformer and BigBird share.

The blocks are gathered by a table, so that cost and memory are those of the blocks that are seen, and rows that see
everything (global ones) are computed apart.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .mechanism import dense_attention, pad_keys, pad_rows, pair_mask, product, scores, softmax


def window_table(blocks: int, window: int) -> Tensor:
    """[blocks, width]: the block columns within ``window`` of the diagonal; -1 where there is none.

    Example:
        >>> window_table(3, 1).tolist()
        [[-1, 0, 1], [0, 1, 2], [1, 2, -1]]
    """
    window = min(window, blocks - 1)
    columns = torch.arange(blocks).unsqueeze(1) + torch.arange(-window, window + 1)
    return columns.masked_fill((columns < 0) | (columns >= blocks), -1)


def block_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    table: Tensor,
    block: int,
    scale: float,
    mask: Tensor | None,
    is_causal: bool,
    reach: int | None = None,
    extra: int = 0,
) -> Tensor:
    """Each block row of queries attends to the blocks of its row of ``table`` ([block rows, width], -1 for none).

    ``reach`` hides keys farther than that from the query. The first ``extra`` keys are seen by every query beside its
    blocks, and the first ``extra`` queries see every key.
    """
    batch, heads, n, d = q.shape
    rows = len(table)
    padded = rows * block
    queries = pad_rows(q, padded).view(batch, heads, rows, block, d)
    keys, values = (pad_rows(tensor, padded).view(batch, heads, rows, block, d) for tensor in (k, v))
    chosen = table.clamp(min=0)
    seen_keys = keys[:, :, chosen].flatten(3, 4)  # [batch, heads, rows, width * block, d]
    seen_values = values[:, :, chosen].flatten(3, 4)
    allowed = _allowed(table, block, n, mask, is_causal, reach, extra)
    found = scores(queries, seen_keys, scale)
    if extra:
        found = torch.cat([scores(queries, k[:, :, None, :extra], scale), found], -1)
        allowed = torch.cat([_extra_allowed(rows, block, n, extra, mask, is_causal, q.device, allowed), allowed], -1)
        seen_values = torch.cat([v[:, :, None, :extra].expand(-1, -1, rows, -1, -1), seen_values], 3)
    out = product(softmax(found, allowed), seen_values).view(batch, heads, padded, d)[:, :, :n]
    if extra:
        everything = pair_mask(n, mask, is_causal, q.device)
        if everything is not None and everything.shape[-2] != 1:
            everything = everything[..., :extra, :]
        first = dense_attention(q[:, :, :extra], k, v, everything, scale)
        out = torch.cat([first, out[:, :, extra:]], 2)
    return out


def _positions(table: Tensor, block: int) -> Tensor:
    """[rows, width * block]: the key at each gathered place; negative where there is none."""
    within = torch.arange(block, device=table.device)
    places = table.unsqueeze(-1) * block + within
    return places.masked_fill(table.unsqueeze(-1) < 0, -1).flatten(1)


def _allowed(
    table: Tensor, block: int, n: int, mask: Tensor | None, is_causal: bool, reach: int | None, extra: int
) -> Tensor:
    rows = table.shape[0]
    keys = _positions(table, block)
    own = torch.arange(rows * block, device=table.device).view(rows, block, 1)
    allowed = (keys >= extra) & (keys < n)
    allowed = allowed.unsqueeze(1).expand(rows, block, -1)
    if is_causal:
        allowed = allowed & (keys.unsqueeze(1) <= own)
    if reach is not None:
        allowed = allowed & ((keys.unsqueeze(1) - own).abs() <= reach)
    if mask is None:
        return allowed
    if mask.shape[2] == 1:
        gathered = pad_keys(mask, rows * block)[:, :, 0, keys.clamp(min=0)].unsqueeze(3)
    else:
        by_row = pad_rows(pad_keys(mask, rows * block), rows * block).unflatten(2, (rows, block))
        wanted = keys.clamp(min=0).view(1, 1, rows, 1, -1).expand(*by_row.shape[:2], rows, block, -1)
        gathered = by_row.gather(-1, wanted)
    return allowed & gathered


def _extra_allowed(
    rows: int,
    block: int,
    n: int,
    extra: int,
    mask: Tensor | None,
    is_causal: bool,
    device: torch.device,
    like: Tensor,
) -> Tensor:
    """Which of the first keys each query sees, in the leading dimensions of ``like``."""
    allowed = torch.ones(rows, block, extra, dtype=torch.bool, device=device)
    if is_causal:
        own = torch.arange(rows * block, device=device).view(rows, block, 1)
        allowed = allowed & (torch.arange(extra, device=device) <= own)
    if mask is not None:
        first = mask[..., :extra]
        per_query = mask.shape[2] != 1
        by_block = pad_rows(first, rows * block).unflatten(2, (rows, block)) if per_query else first.unsqueeze(2)
        allowed = allowed & by_block
    return allowed.expand(*like.shape[:-1], extra)
