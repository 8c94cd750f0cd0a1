"""Reformer: queries and keys are the same vectors, hashed into buckets; each attends within its bucket (Kitaev et al.
2020). Several rounds with other hashes are joined by their log-sum-exp."""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import DspattnError
from .mechanism import Mechanism, draw, product, require_not_negative, require_positive, scores, seeded, softmax

SELF_PENALTY = 1e5  # a token attends to itself only when it sees nothing else


class Reformer(Mechanism):
    """Positions are sorted by bucket and cut into chunks; a chunk attends to itself and to ``before`` chunks ahead of
    it, within the same bucket. Keys are the queries at unit length: ``k`` is not looked at. With one bucket, one chunk
    holds all positions, and this is full attention of q to its unit vectors, each token's own left out."""

    name = "reformer"
    cost = "r n (log n + c (1+b) d), r rounds, c the chunk, b the chunks before"
    memory = "r n c (1+b)"
    defaults = "Long Range Arena's models/reformer (chunks of 10, 10 buckets, one round, one chunk before)"
    masks = frozenset({"key", "causal"})
    unused = ("k",)
    rotations: Tensor

    def __init__(
        self,
        heads: int,
        head_dim: int,
        n: int,
        *,
        buckets: int = 10,
        rounds: int = 1,
        chunk: int | None = None,
        before: int = 1,
        seed: int = 0,
    ) -> None:
        super().__init__(heads, head_dim, n)
        require_positive(buckets=buckets, rounds=rounds, **({} if chunk is None else {"chunk": chunk}))
        require_not_negative(before=before)
        if buckets > 1 and buckets % 2:
            raise DspattnError([f"buckets: expected 1 or an even number, got {buckets}"])
        self.buckets, self.rounds = buckets, rounds
        self.chunk = min(n, chunk if chunk is not None else (n if buckets == 1 else 10))
        self.chunks = -(-n // self.chunk)
        self.before = min(before, self.chunks - 1)
        self.register_buffer("rotations", torch.empty(head_dim, rounds, max(buckets // 2, 1)))
        self.redraw(seed)

    def redraw(self, seed: int) -> None:
        """New hashes."""
        self.rotations.copy_(draw(seeded(seed), *self.rotations.shape))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool) -> Tensor:
        batch, heads, n, d = q.shape
        buckets = self._hash(q)  # [batch, heads, rounds, n]
        order = buckets.argsort(dim=-1, stable=True)
        keys = torch.nn.functional.normalize(q, dim=-1)
        chunked = (self.chunks, self.chunk)
        at = _pad_last(order, self.chunks * self.chunk, 0).unflatten(-1, chunked)
        real = torch.arange(self.chunks * self.chunk, device=q.device).view(chunked) < n
        rows = self._take(q, at)
        seen_at, seen_real = self._with_chunks_before(at), self._with_chunks_before(real)
        bucket = _pad_last(buckets.gather(-1, order), self.chunks * self.chunk, -1).unflatten(-1, chunked)
        allowed = (bucket.unsqueeze(-1) == self._with_chunks_before(bucket).unsqueeze(-2)) & seen_real.unsqueeze(-2)
        if is_causal:
            allowed = allowed & (seen_at.unsqueeze(-2) <= at.unsqueeze(-1))
        if mask is not None:
            visible = mask.expand(batch, heads, 1, n).expand(batch, heads, self.rounds, n)
            gathered = visible.gather(-1, seen_at.flatten(-2)).view(seen_at.shape)
            allowed = allowed & gathered.unsqueeze(-2)
        found = scores(rows, self._take(keys, seen_at), self.scale)
        itself = at.unsqueeze(-1) == seen_at.unsqueeze(-2)
        # In float32: the penalty is beyond float16.
        found = found.float() - SELF_PENALTY * itself
        # A token without a visible key has log-sum-exp -inf: it has no part in the rounds' mean.
        total = found.masked_fill(~allowed, float("-inf")).logsumexp(-1)
        out = product(softmax(found, allowed).to(v.dtype), self._take(v, seen_at))
        back = order.argsort(dim=-1)
        total = total.flatten(-2).gather(-1, back)
        out = out.flatten(-3, -2).gather(-2, back.unsqueeze(-1).expand(*back.shape, d))
        shares = softmax(total.transpose(-1, -2), (total > float("-inf")).transpose(-1, -2)).transpose(-1, -2)
        return (out * shares.unsqueeze(-1).to(out.dtype)).sum(2)

    def _hash(self, q: Tensor) -> Tensor:
        if self.buckets == 1:
            return torch.zeros(*q.shape[:2], self.rounds, self.n, dtype=torch.long, device=q.device)
        turned = torch.einsum("bhnd,drk->bhrnk", q.detach().float(), self.rotations.float())
        return torch.cat([turned, -turned], -1).argmax(-1)

    def _take(self, tensor: Tensor, at: Tensor) -> Tensor:
        """The rows at the positions ``at`` [batch, heads, rounds, chunks, width], with d as one more dimension."""
        batch, heads, _, d = tensor.shape
        flat = at.flatten(2)
        rows = tensor.gather(2, flat.unsqueeze(-1).expand(batch, heads, flat.shape[2], d))
        return rows.view(*at.shape, d)

    def _with_chunks_before(self, tensor: Tensor) -> Tensor:
        """[..., chunks, chunk] to [..., chunks, (1 + before) chunk]; the first chunks look round at the last."""
        return torch.cat([tensor.roll(shift, -2) for shift in range(self.before + 1)], -1)


def _pad_last(tensor: Tensor, size: int, value: int) -> Tensor:
    missing = size - tensor.shape[-1]
    return torch.nn.functional.pad(tensor, (0, missing), value=value) if missing else tensor
