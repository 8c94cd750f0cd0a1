"""Longformer: a sliding window for every token, and a few global tokens that see and are seen by all (Beltagy et al.
2020). Its second set of projections for global tokens is the surrounding model's business, not this module's."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import block_masks
from ..errors import DspattnError
from ..patterns import Grouping, parse_grouping, parse_pattern
from .blocks import block_attention, window_table
from .mechanism import Mechanism, require_not_negative, require_positive
from .pruned_blocks import pruned_attention, without_first_rows


class Longformer(Mechanism):
    """``window`` positions around each token, half on either side; the first ``global_tokens`` are global. Exact when
    half the window reaches over all.

    With ``pattern`` window and global tokens are rounded up to whole blocks of ``block``, and the scores inside them
    are pruned to N:M by the library's own kernels (:func:`dspattn.block_attention`).
    """

    name = "longformer"
    cost = "n (3w/2 + g) d, w the window, g the global tokens"
    memory = "n (3w/2 + g)"
    defaults = "window 512: Long Range Arena's models/longformer, which has no global token; one (the class token) here"
    masks = frozenset({"key", "pair", "causal"})
    table: Tensor
    counts: Tensor

    def __init__(
        self,
        heads: int,
        head_dim: int,
        n: int,
        *,
        window: int = 512,
        global_tokens: int = 1,
        block: int = 64,
        pattern: str | None = None,
        grouping: Grouping = "consecutive",
    ) -> None:
        super().__init__(heads, head_dim, n)
        require_positive(window=window)
        require_not_negative(global_tokens=global_tokens)
        parse_grouping(grouping)
        if block not in (64, 128):
            raise DspattnError([f"block: expected 64 or 128, of pruned blocks, got {block!r}"])
        self.pattern, self.grouping = pattern, grouping
        self.reach = window // 2
        self.global_tokens = min(global_tokens, n)
        if pattern is None:
            # Blocks as wide as one side of the window: it then lies within a block and its two neighbours.
            self.block = min(max(self.reach, 1), n)
            self.register_buffer("table", window_table(-(-n // self.block), 1), persistent=False)
            return
        parse_pattern(pattern)
        self.block = block
        whole = -(-self.global_tokens // block)
        mask = without_first_rows(
            block_masks.longformer(n, block=block, window=-(-self.reach // block), global_blocks=whole), whole
        )
        self.rows = mask.n_q
        device = torch.get_default_device()  # as of every module's tensors; masks are made on the CPU
        self.register_buffer("table", mask.columns.to(device), persistent=False)
        self.register_buffer("counts", mask.counts.to(device), persistent=False)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool) -> Tensor:
        if self.pattern is None:
            return block_attention(
                q, k, v, self.table, self.block, self.scale, mask, is_causal, self.reach, self.global_tokens
            )
        blocks = block_masks.BlockMask(self.rows, self.n, self.block, self.counts, self.table)
        return pruned_attention(q, k, v, blocks, mask, is_causal, self.scale, self.pattern, self.grouping)
