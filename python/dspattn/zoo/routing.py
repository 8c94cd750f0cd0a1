"""Routing Transformer: queries and keys are routed to clusters by k-means, and attend within them (Roy et al. 2021).

Every cluster takes the same number of queries and keys, those nearest to its centre, so that the work is one batched
attention. A query that several clusters take gets their mean, one that none takes gets 0.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .mechanism import Mechanism, draw, product, require_number, require_positive, scores, seeded, softmax


class Routing(Mechanism):
    """Centres follow the routed vectors by an exponential mean of rate 1 - ``decay`` while training. With one cluster
    of n members this is full attention."""

    name = "routing"
    cost = "n w d + n c d, c clusters of w members"
    memory = "n w"
    defaults = "about sqrt(n) clusters of n / clusters members, decay 0.999: the Routing Transformer's paper"
    masks = frozenset({"key", "causal"})
    centres: Tensor

    def __init__(
        self,
        heads: int,
        head_dim: int,
        n: int,
        *,
        clusters: int | None = None,
        members: int | None = None,
        decay: float = 0.999,
        seed: int = 0,
    ) -> None:
        super().__init__(heads, head_dim, n)
        self.clusters = max(1, round(math.sqrt(n))) if clusters is None else clusters
        require_positive(clusters=self.clusters, **({} if members is None else {"members": members}))
        require_number("decay", decay, "a number in [0, 1]", lambda x: 0 <= x <= 1)
        self.members = min(n, members if members is not None else -(-n // self.clusters))
        self.decay = decay
        self.register_buffer("centres", torch.empty(heads, self.clusters, head_dim))
        drawn = draw(seeded(seed), *self.centres.shape)
        self.centres.copy_(torch.nn.functional.normalize(drawn, dim=-1))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool) -> Tensor:
        batch, heads, n, d = q.shape
        with torch.no_grad():
            near_queries, near_keys = self._nearness(q), self._nearness(k)
            if self.training:
                self._move_centres(q, k, near_queries, near_keys)
            if mask is not None:  # masked keys are taken last
                near_keys = near_keys.masked_fill(~mask, float("-inf"))
            # Members in the order of the sequence.
            query_at = near_queries.topk(self.members, -1).indices.sort(-1).values
            key_at = near_keys.topk(self.members, -1).indices.sort(-1).values
        allowed = None
        if is_causal:
            allowed = key_at.unsqueeze(-2) <= query_at.unsqueeze(-1)
        if mask is not None:
            visible = mask.expand(batch, heads, self.clusters, n).gather(-1, key_at).unsqueeze(-2)
            allowed = visible if allowed is None else allowed & visible
        found = scores(self._take(q, query_at), self._take(k, key_at), self.scale)
        out = product(softmax(found, None if allowed is None else allowed.expand(found.shape)), self._take(v, key_at))
        places = query_at.flatten(2)
        total = out.new_zeros(batch, heads, n, d).scatter_add(
            2, places.unsqueeze(-1).expand(-1, -1, -1, d), out.flatten(2, 3)
        )
        times = out.new_zeros(batch, heads, n).scatter_add(2, places, torch.ones_like(places, dtype=out.dtype))
        return total / times.clamp(min=1).unsqueeze(-1)

    def _nearness(self, tensor: Tensor) -> Tensor:
        """[batch, heads, clusters, n]: cosine to each centre."""
        return self.centres.float() @ torch.nn.functional.normalize(tensor.float(), dim=-1).transpose(-1, -2)

    def _take(self, tensor: Tensor, at: Tensor) -> Tensor:
        flat = at.flatten(2).unsqueeze(-1).expand(-1, -1, -1, tensor.shape[-1])
        return tensor.gather(2, flat).view(*at.shape, tensor.shape[-1])

    def _move_centres(self, q: Tensor, k: Tensor, near_queries: Tensor, near_keys: Tensor) -> None:
        both = torch.nn.functional.normalize(torch.cat([q, k], 2).float(), dim=-1)
        own = torch.cat([near_queries, near_keys], 3).argmax(2)  # [batch, heads, 2n]
        chosen = torch.nn.functional.one_hot(own, self.clusters).to(both.dtype)
        sums = torch.einsum("bhnc,bhnd->hcd", chosen, both)
        means = torch.nn.functional.normalize(sums, dim=-1)
        empty = chosen.sum((0, 2)).unsqueeze(-1) == 0
        moved = self.decay * self.centres + (1 - self.decay) * torch.where(empty, self.centres, means)
        self.centres.copy_(torch.nn.functional.normalize(moved, dim=-1))
