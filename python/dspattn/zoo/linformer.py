"""Linformer: keys and values projected along the sequence from n to a few rows (Wang et al. 2020)."""

from __future__ import annotations

import torch
from torch import Tensor

from .._flags import as_flag
from ..functional import attention
from ..patterns import Grouping, parse_grouping, parse_pattern
from .mechanism import Mechanism, dense_attention, require_positive


class Linformer(Mechanism):
    """softmax(Q (E K)^T / sqrt(d)) (F V), E and F of ``rows`` x n, shared by the heads.

    ``shared`` takes one projection for keys and values. With ``pattern`` the n x rows scores are pruned to N:M by
    :func:`dspattn.attention`. Rows that mix positions have no place in an order, so there is no causal form; a masked
    key is left out of both projections.
    """

    name = "linformer"
    cost = "n r d, r the projected rows"
    memory = "n r"
    defaults = "rows, shared: Long Range Arena's text_classification/linformer_base and models/linformer"
    masks = frozenset({"key"})

    def __init__(
        self,
        heads: int,
        head_dim: int,
        n: int,
        *,
        rows: int = 32,
        shared: bool = True,
        pattern: str | None = None,
        grouping: Grouping = "consecutive",
    ) -> None:
        super().__init__(heads, head_dim, n)
        require_positive(rows=rows)
        shared = as_flag("shared", shared)
        if pattern is not None:
            parse_pattern(pattern)
        parse_grouping(grouping)
        self.pattern, self.grouping = pattern, grouping
        self.key_projection = torch.nn.Parameter(torch.empty(rows, n))
        self.value_projection = self.key_projection if shared else torch.nn.Parameter(torch.empty(rows, n))
        for projection in self.parameters():
            torch.nn.init.xavier_uniform_(projection)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool) -> Tensor:
        if mask is not None:
            hidden = ~mask.transpose(-1, -2)
            k, v = k.masked_fill(hidden, 0.0), v.masked_fill(hidden, 0.0)
        few_keys = self.key_projection.to(k.dtype) @ k
        few_values = self.value_projection.to(v.dtype) @ v
        if self.pattern is None:
            return dense_attention(q, few_keys, few_values, None, self.scale)
        return attention(q, few_keys, few_values, pattern=self.pattern, grouping=self.grouping, scale=self.scale)
