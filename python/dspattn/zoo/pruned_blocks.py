"""Block masks with N:M inside the blocks, by the library's kernels: what BigBird and Longformer with a pattern share.

A blocked-ELL mask is as wide as its widest row, and the rows of global blocks see everything. They are an attention of
their own, so that the others' matrix stays narrow.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..block_masks import BlockMask, block_attention, from_block_map
from ..functional import attention
from ..patterns import Grouping


def without_first_rows(mask: BlockMask, rows: int) -> BlockMask:
    """The mask of the queries after the first ``rows`` block rows."""
    n_q = max(mask.n_q - rows * mask.block, 0)
    return from_block_map(mask.block_map()[rows:], n_q, mask.n_k, block=mask.block)


def pruned_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    blocks: BlockMask,
    mask: Tensor | None,
    is_causal: bool,
    scale: float,
    pattern: str,
    grouping: Grouping,
) -> Tensor:
    """The last ``blocks.n_q`` queries attend to their blocks, those before them to every key; all pruned."""
    first = q.shape[2] - blocks.n_q
    per_query = mask is not None and mask.shape[2] != 1
    parts = []
    if first:
        seen = mask[:, :, :first] if per_query and mask is not None else mask
        parts.append(
            attention(q[:, :, :first], k, v, seen, is_causal=is_causal, scale=scale, pattern=pattern, grouping=grouping)
        )
    if blocks.n_q:
        seen = mask[:, :, first:] if per_query and mask is not None else mask
        parts.append(
            block_attention(
                q[:, :, first:], k, v, blocks, seen, is_causal=is_causal, scale=scale, pattern=pattern,
                grouping=grouping, alignment="bottom_right",
            )
        )  # fmt: skip
    return parts[0] if len(parts) == 1 else torch.cat(parts, 2)
