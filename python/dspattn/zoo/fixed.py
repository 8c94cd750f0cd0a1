"""A fixed set of columns: the paper's own example of a pattern that no score has part in."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..errors import DspattnError
from .mechanism import Mechanism, dense_attention, pair_mask, require_number


class Fixed(Mechanism):
    """Every query sees ``columns``, by default the first ``density`` of them; exact with all of them."""

    name = "fixed"
    cost = "s n² d, s the density"
    memory = "s n²"
    defaults = "density 0.63: where the paper's traffic model puts it level with 1:2 and 2:4"
    masks = frozenset({"key", "pair", "causal"})
    columns: Tensor

    def __init__(
        self, heads: int, head_dim: int, n: int, *, density: float = 0.63, columns: Sequence[int] | None = None
    ) -> None:
        super().__init__(heads, head_dim, n)
        require_number("density", density, "in (0, 1]", lambda x: 0 < x <= 1)
        if columns is not None and not (
            isinstance(columns, Sequence) and all(hasattr(i, "__index__") and not isinstance(i, bool) for i in columns)
        ):
            raise DspattnError([f"columns: expected a list of whole numbers, got {columns!r}"])
        chosen = range(max(1, round(density * n))) if columns is None else sorted(set(columns))
        if len(chosen) == 0 or chosen[0] < 0 or chosen[-1] >= n:
            raise DspattnError([f"columns: expected some of 0 ... {n - 1}, got {list(columns or [])}"])
        self.register_buffer("columns", torch.tensor(list(chosen)), persistent=False)
        # A leading run needs no gathering.
        self.leading = len(chosen) if chosen[-1] == len(chosen) - 1 else 0

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool) -> Tensor:
        allowed = pair_mask(self.n, mask, is_causal, q.device)
        if self.leading:
            allowed = None if allowed is None else allowed[..., : self.leading]
            return dense_attention(q, k[:, :, : self.leading], v[:, :, : self.leading], allowed, self.scale)
        allowed = None if allowed is None else allowed[..., self.columns]
        return dense_attention(q, k[:, :, self.columns], v[:, :, self.columns], allowed, self.scale)
