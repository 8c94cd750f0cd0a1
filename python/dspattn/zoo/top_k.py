"""Explicit sparse attention: of every row the k largest scores (Zhao et al. 2019)."""

from __future__ import annotations

import torch
from torch import Tensor

from .mechanism import Mechanism, Stages, pair_mask, require_positive, scores, softmax


class TopK(Mechanism):
    """All n² scores are computed; softmax and product run on the k of each row. Exact with k = n."""

    name = "top_k"
    cost = "n² d + n k d, and the selection among n"
    memory = "n²"
    defaults = "k = 8: Zhao et al. 2019; Long Range Arena has no configuration of it"
    masks = frozenset({"key", "pair", "causal"})

    def __init__(self, heads: int, head_dim: int, n: int, *, k: int = 8) -> None:
        super().__init__(heads, head_dim, n)
        require_positive(k=k)
        self.k = min(k, n)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool) -> Tensor:
        batch, heads, n, d = q.shape
        found = scores(q, k, self.scale)
        allowed = pair_mask(n, mask, is_causal, q.device)
        if allowed is not None:
            found = found.masked_fill(~allowed, float("-inf"))
        largest, places = found.topk(self.k, -1, sorted=False)
        weights = softmax(largest, None if allowed is None else largest > float("-inf"))
        with Stages.observe("product"):
            # Row i of the sparse matrix times V: a weighted sum of k rows of V, without a copy of them. PyTorch has no
            # gradient of its weights in bf16 on a GPU.
            if weights.requires_grad and weights.dtype == torch.bfloat16:
                weights, v = weights.float(), v.float()
            first = torch.arange(batch * heads, device=q.device).view(batch, heads, 1, 1) * n
            out = torch.nn.functional.embedding_bag(
                (places + first).reshape(-1, self.k),
                v.reshape(-1, d),
                mode="sum",
                per_sample_weights=weights.reshape(-1, self.k),
            )
        return out.view(batch, heads, n, d).to(q.dtype)
