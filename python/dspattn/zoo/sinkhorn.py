"""Sparse Sinkhorn attention: key blocks are reordered by a doubly stochastic matrix, and each query block attends to
its own block and to the one sorted to its place (Tay et al. 2020)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .mechanism import Mechanism, pad_keys, pad_rows, product, require_number, require_positive, scores, softmax


class Sinkhorn(Mechanism):
    """The matrix comes from the blocks' summed keys by a learnt map and ``iterations`` of row and column
    normalisation. Masked keys are left out of the mix, and a sorted key's score gets the logarithm of the visible part
    of its mix. With one block every key is seen twice, which is full attention."""

    name = "sinkhorn"
    cost = "n b d + n (n/b) d, b the block"
    memory = "n b + (n/b)²"
    defaults = "Long Range Arena's models/sinkhorn_transformer (blocks of 50, one iteration, temperature 1)"
    masks = frozenset({"key"})

    def __init__(
        self, heads: int, head_dim: int, n: int, *, block: int = 50, iterations: int = 1, temperature: float = 1.0
    ) -> None:
        super().__init__(heads, head_dim, n)
        require_positive(block=block, iterations=iterations)
        require_number("temperature", temperature, "a finite number > 0", lambda x: 0 < x < math.inf)
        self.blocks = -(-n // min(block, n))
        self.block = -(-n // self.blocks)  # blocks as equal as n allows
        self.iterations, self.temperature = iterations, temperature
        self.sorting = torch.nn.Parameter(torch.empty(heads, head_dim, self.blocks))
        torch.nn.init.xavier_uniform_(self.sorting)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool) -> Tensor:
        total = self.blocks * self.block
        shape = (self.blocks, self.block)
        visible = torch.ones(1, 1, 1, self.n, dtype=torch.bool, device=q.device) if mask is None else mask
        visible = pad_keys(visible, total)[:, :, 0].unflatten(2, shape)  # [batch, heads, blocks, block]
        queries, keys, values = (pad_rows(tensor, total).unflatten(2, shape) for tensor in (q, k, v))
        part = visible.to(k.dtype).unsqueeze(-1)
        keys, values = keys * part, values * part
        matrix = self._matrix(keys.sum(3))
        seen = torch.einsum("bhij,bhjr->bhir", matrix, part.squeeze(-1).expand(*matrix.shape[:3], self.block))
        safe = seen.clamp(min=1e-6).unsqueeze(-1)
        sorted_keys = torch.einsum("bhij,bhjrd->bhird", matrix, keys) / safe
        sorted_values = torch.einsum("bhij,bhjrd->bhird", matrix, values) / safe
        found = scores(queries, torch.cat([sorted_keys, keys], 3), self.scale)
        share = torch.cat([seen.clamp(min=1e-6).log(), torch.zeros_like(seen)], -1).unsqueeze(-2)
        allowed = torch.cat([seen > 1e-6, visible.expand(*matrix.shape[:3], self.block)], -1).unsqueeze(-2)
        weights = softmax(found + share, allowed.expand(found.shape))
        return product(weights, torch.cat([sorted_values, values], 3)).flatten(2, 3)[:, :, : self.n]

    def _matrix(self, summary: Tensor) -> Tensor:
        """[batch, heads, blocks, blocks], rows and columns summing to 1 as the iterations go on."""
        logits = (summary.float() @ self.sorting.float()) / self.temperature
        for _ in range(self.iterations):
            logits = logits - logits.logsumexp(-2, keepdim=True)
            logits = logits - logits.logsumexp(-1, keepdim=True)
        return logits.exp().to(summary.dtype)
