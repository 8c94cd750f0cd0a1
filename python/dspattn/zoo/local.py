"""Local attention: blocks of queries attend to their own block and its neighbours (Parmar et al. 2018)."""

from __future__ import annotations

from torch import Tensor

from .blocks import block_attention, window_table
from .mechanism import Mechanism, require_not_negative, require_positive


class Local(Mechanism):
    """``neighbours`` blocks on either side are seen beside the own one; exact when they reach over all of them."""

    name = "local"
    cost = "n (2w+1) b d, b the block, w the neighbours"
    memory = "n (2w+1) b"
    defaults = "block: Long Range Arena's models/local; that code leaves the neighbours out (neighbours=0)"
    masks = frozenset({"key", "pair", "causal"})
    table: Tensor

    def __init__(self, heads: int, head_dim: int, n: int, *, block: int = 20, neighbours: int = 1) -> None:
        super().__init__(heads, head_dim, n)
        require_positive(block=block)
        require_not_negative(neighbours=neighbours)
        self.block = min(block, n)
        self.register_buffer("table", window_table(-(-n // self.block), neighbours), persistent=False)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool) -> Tensor:
        return block_attention(q, k, v, self.table, self.block, self.scale, mask, is_causal)
