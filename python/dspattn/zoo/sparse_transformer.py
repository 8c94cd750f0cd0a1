"""Sparse Transformer, fixed pattern: a local part and a strided part (Child et al. 2019).

The local part is the query's own block of ``stride`` positions; the strided part is the same few columns of every
block: its first and its last ``summary`` ones.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .._flags import as_flag
from ..errors import DspattnError
from .mechanism import (
    Mechanism,
    dense_attention,
    pad_keys,
    pad_rows,
    pair_mask,
    product,
    require_positive,
    scores,
    softmax,
)


class SparseTransformer(Mechanism):
    """``merged``: every head sees both parts, as in Long Range Arena's code; otherwise the first half of the heads is
    local and the second strided. With stride 1 every column is strided, and the merged form is full attention."""

    name = "sparse_transformer"
    cost = "n (s + n c/s) d, s the stride, c the summary columns"
    memory = "n (s + n c/s)"
    defaults = "Long Range Arena's models/sparse_transformer (blocks of 128, c = 32, merged)"
    masks = frozenset({"key", "pair", "causal"})
    columns: Tensor

    def __init__(
        self, heads: int, head_dim: int, n: int, *, stride: int = 128, summary: int = 32, merged: bool = True
    ) -> None:
        super().__init__(heads, head_dim, n)
        require_positive(stride=stride, summary=summary)
        merged = as_flag("merged", merged)
        if not merged and heads < 2:
            raise DspattnError([f"heads: expected at least 2 when merged is False, got {heads}"])
        self.stride, self.merged = min(stride, n), merged
        place = torch.arange(n, device="cpu") % self.stride  # which columns are wanted is read
        wanted = (place == 0) | (place >= self.stride - summary)
        columns = wanted.nonzero().squeeze(1)
        self.register_buffer("columns", columns.to(torch.get_default_device()), persistent=False)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool) -> Tensor:
        if self.merged:
            return self._merged(q, k, v, mask, is_causal)
        half = self.heads // 2
        per_head = mask is not None and mask.shape[1] != 1
        first, second = (mask[:, :half], mask[:, half:]) if per_head and mask is not None else (mask, mask)
        local = self._local(q[:, :half], k[:, :half], v[:, :half], first, is_causal)
        strided = self._strided(q[:, half:], k[:, half:], v[:, half:], second, is_causal)
        return torch.cat([local, strided], 1)

    def _blocks(self, tensor: Tensor) -> Tensor:
        count = -(-self.n // self.stride)
        return pad_rows(tensor, count * self.stride).unflatten(2, (count, self.stride))

    def _local_allowed(self, mask: Tensor | None, is_causal: bool, device: torch.device) -> Tensor:
        """Broadcasts to [batch, heads, blocks, stride, stride]."""
        count = -(-self.n // self.stride)
        own = torch.arange(count * self.stride, device=device).view(count, self.stride)
        allowed = (own < self.n).unsqueeze(1).expand(-1, self.stride, -1)
        if is_causal:
            allowed = allowed & (own.unsqueeze(1) <= own.unsqueeze(2))
        if mask is None:
            return allowed
        total = count * self.stride
        if mask.shape[2] == 1:
            return allowed & pad_keys(mask, total).unflatten(3, (count, self.stride)).transpose(2, 3)
        full = pad_rows(pad_keys(mask, total), total).unflatten(2, (count, self.stride))
        return allowed & full.gather(-1, own.view(1, 1, count, 1, -1).expand(*full.shape[:4], self.stride))

    def _strided_allowed(self, mask: Tensor | None, is_causal: bool, device: torch.device) -> Tensor | None:
        allowed = pair_mask(self.n, mask, is_causal, device)
        return None if allowed is None else allowed[..., self.columns]

    def _local(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool) -> Tensor:
        allowed = self._local_allowed(mask, is_causal, q.device)
        out = dense_attention(self._blocks(q), self._blocks(k), self._blocks(v), allowed, self.scale)
        return out.flatten(2, 3)[:, :, : self.n]

    def _strided(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool) -> Tensor:
        allowed = self._strided_allowed(mask, is_causal, q.device)
        return dense_attention(q, k[:, :, self.columns], v[:, :, self.columns], allowed, self.scale)

    def _merged(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool) -> Tensor:
        blocks = self._blocks(q)
        count, stride = blocks.shape[2:4]
        near = scores(blocks, self._blocks(k), self.scale).flatten(2, 3)[:, :, : self.n]
        far = scores(q, k[:, :, self.columns], self.scale)
        near_allowed = self._local_allowed(mask, is_causal, q.device).flatten(-3, -2)[..., : self.n, :]
        # A strided column in the query's own block is in the local part already.
        rows = torch.arange(self.n, device=q.device).unsqueeze(1)
        far_allowed = rows // stride != self.columns // stride
        more = self._strided_allowed(mask, is_causal, q.device)
        if more is not None:
            far_allowed = far_allowed & more
        lead = torch.broadcast_shapes(near_allowed.shape[:-1], far_allowed.shape[:-1])
        allowed = torch.cat([near_allowed.expand(*lead, -1), far_allowed.expand(*lead, -1)], -1)
        weights = softmax(torch.cat([near, far], -1), allowed)
        local = pad_rows(weights[..., :stride], count * stride).unflatten(2, (count, stride))
        out = product(local, self._blocks(v)).flatten(2, 3)[:, :, : self.n]
        return out + product(weights[..., stride:], v[:, :, self.columns])
