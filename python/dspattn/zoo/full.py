"""Full attention: softmax(Q K^T / sqrt(d)) V, unfused, the baseline of the paper (Vaswani et al. 2017)."""

from __future__ import annotations

from torch import Tensor

from .mechanism import Mechanism, dense_attention, pair_mask


class Full(Mechanism):
    name = "full"
    cost = "n² d"
    memory = "n²"
    defaults = "none to choose"
    masks = frozenset({"key", "pair", "causal"})

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool) -> Tensor:
        return dense_attention(q, k, v, pair_mask(self.n, mask, is_causal, q.device), self.scale)
