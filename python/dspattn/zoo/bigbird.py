"""BigBird: a window of blocks, global blocks and random blocks (Zaheer et al. 2020)."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import block_masks
from ..errors import DspattnError
from ..patterns import Grouping, parse_grouping, parse_pattern
from .blocks import block_attention
from .mechanism import Mechanism, require_not_negative, require_positive
from .pruned_blocks import pruned_attention, without_first_rows


class BigBird(Mechanism):
    """The mask is :func:`dspattn.block_masks.bigbird`'s: the first ``global_blocks`` see and are seen by all, and each
    block sees ``window`` ones on either side and ``random`` further ones. Exact when those are all that is left.

    With ``pattern`` the scores inside the blocks are pruned to N:M by the library's own kernels
    (:func:`dspattn.block_attention`); without, this is plain PyTorch, which takes blocks of any size.
    """

    name = "bigbird"
    cost = "n (2w+1+g+r) b d, b the block; w, g, r the window, global and random blocks"
    memory = "n (2w+1+g+r) b"
    defaults = "blocks of 64, 3 random, window of 3: Long Range Arena's models/bigbird (global there: first and last)"
    masks = frozenset({"key", "pair", "causal"})
    table: Tensor
    counts: Tensor

    def __init__(
        self,
        heads: int,
        head_dim: int,
        n: int,
        *,
        block: int = 64,
        window: int = 1,
        global_blocks: int = 1,
        random: int = 3,
        seed: int = 0,
        pattern: str | None = None,
        grouping: Grouping = "consecutive",
    ) -> None:
        super().__init__(heads, head_dim, n)
        require_positive(block=block)
        require_not_negative(window=window, global_blocks=global_blocks, random=random)
        parse_grouping(grouping)
        self.block, self.pattern, self.grouping = block, pattern, grouping
        if pattern is not None:
            parse_pattern(pattern)
            if block not in (64, 128):
                raise DspattnError([f"block: expected 64 or 128 with a pattern, got {block}"])
        count = -(-n // block)
        # The builder knows blocks of 64 only as a unit: which blocks are seen depends on their number alone.
        mask = block_masks.bigbird(64 * count, window=window, global_blocks=global_blocks, random=random, seed=seed)
        self.global_blocks = min(global_blocks, count)
        self.share = mask.density
        device = torch.get_default_device()  # as of every module's tensors; masks are made on the CPU
        if pattern is None:
            # Global rows are computed apart, and global columns are seen by all: the table has the others.
            seen = mask.block_map()
            seen[: self.global_blocks] = False
            seen[:, : self.global_blocks] = False
            mask = block_masks.from_block_map(seen, 64 * count, 64 * count)
            self.register_buffer("table", mask.columns.long().to(device), persistent=False)
        else:
            same = block_masks.from_block_map(mask.block_map(), n, n, block=block)
            mask = without_first_rows(same, self.global_blocks)
            self.rows = mask.n_q
            self.register_buffer("table", mask.columns.to(device), persistent=False)
        self.register_buffer("counts", mask.counts.to(device), persistent=False)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool) -> Tensor:
        if self.pattern is None:
            extra = min(self.global_blocks * self.block, self.n)
            table = self.table if self.table.shape[1] else self.table.new_full((len(self.table), 1), -1)
            return block_attention(q, k, v, table, self.block, self.scale, mask, is_causal, None, extra)
        blocks = block_masks.BlockMask(self.rows, self.n, self.block, self.counts, self.table)
        return pruned_attention(q, k, v, blocks, mask, is_causal, self.scale, self.pattern, self.grouping)

    def density(self) -> float:
        """Share of all blocks that are seen."""
        return self.share
