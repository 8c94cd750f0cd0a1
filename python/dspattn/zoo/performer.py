"""Performer: softmax's kernel exp(q·k/√d) estimated by positive random features (Choromanski et al. 2021)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .._flags import as_flag
from .linear_transformer import feature_attention
from .mechanism import Mechanism, draw, require_number, require_positive, seeded


def draw_features(features: int, dim: int, orthogonal: bool, generator: torch.Generator) -> Tensor:
    """[features, dim] normal vectors; with ``orthogonal``, those of each block of ``dim`` at right angles, their
    lengths drawn as those of independent ones."""
    independent = draw(generator, features, dim)
    if not orthogonal:
        return independent
    count = -(-features // dim)
    basis, triangle = torch.linalg.qr(draw(generator, count, dim, dim))
    # A QR factorisation chooses its signs; with those of R's diagonal every rotation is as likely as any other.
    directions = basis * triangle.diagonal(dim1=-2, dim2=-1).sign().unsqueeze(-2)
    return directions.transpose(-1, -2).reshape(-1, dim)[:features] * independent.norm(dim=1, keepdim=True)


class Performer(Mechanism):
    """``epsilon`` is added to every feature, so that no normaliser is 0. The largest exponent is taken out before
    exponentiating: over each query's own features, which cancels, and over all keys' together, which cancels too."""

    name = "performer"
    cost = "n f d, f the features"
    memory = "n f"
    defaults = "256 orthogonal features, epsilon 1e-6: Long Range Arena's models/performer (softmax kernel)"
    masks = frozenset({"key", "causal"})
    projection: Tensor

    def __init__(
        self,
        heads: int,
        head_dim: int,
        n: int,
        *,
        features: int = 256,
        orthogonal: bool = True,
        epsilon: float = 1e-6,
        chunk: int = 64,
        seed: int = 0,
    ) -> None:
        super().__init__(heads, head_dim, n)
        require_positive(features=features, chunk=chunk)
        orthogonal = as_flag("orthogonal", orthogonal)
        require_number("epsilon", epsilon, "a finite number >= 0", lambda x: 0 <= x < math.inf)
        self.features, self.orthogonal, self.epsilon, self.chunk = features, orthogonal, epsilon, chunk
        self.register_buffer("projection", torch.empty(features, head_dim))
        self.redraw(seed)

    def redraw(self, seed: int) -> None:
        """New random features."""
        drawn = draw_features(self.features, self.head_dim, self.orthogonal, seeded(seed))
        self.projection.copy_(drawn)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool) -> Tensor:
        queries, keys = self._exponents(q), self._exponents(k)
        visible = keys if mask is None else keys.masked_fill(~mask.transpose(-1, -2), float("-inf"))
        top = visible.amax((-1, -2), keepdim=True).detach()
        top = torch.where(top > float("-inf"), top, 0.0)
        queries = (queries - queries.amax(-1, keepdim=True).detach()).exp() + self.epsilon
        keys = (keys - top).exp() + self.epsilon
        if mask is not None:
            keys = keys.masked_fill(~mask.transpose(-1, -2), 0.0)
        return feature_attention(queries.to(v.dtype), keys.to(v.dtype), v, is_causal, self.chunk)

    def _exponents(self, tensor: Tensor) -> Tensor:
        """w·x - |x|²/2 for x = tensor / d^¼ and every feature w; in float32, since 16-bit exponents are too coarse."""
        x = tensor.float() * math.sqrt(self.scale)
        return x @ self.projection.float().transpose(0, 1) - 0.5 * x.square().sum(-1, keepdim=True)

    def kernel_estimate(self, q: Tensor, k: Tensor) -> Tensor:
        """The estimate of exp(q·k/√d) itself, [..., n_q, n_k], without epsilon; for comparing with the theory."""
        return self._exponents(q).exp() @ self._exponents(k).exp().transpose(-1, -2) / self.features
