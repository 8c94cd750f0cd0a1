"""Nyströmformer: A ≈ softmax(Q K̃ᵀ) softmax(Q̃ K̃ᵀ)⁺ softmax(Q̃ Kᵀ) with landmarks Q̃, K̃ (Xiong et al. 2021).

Landmarks are means of equal segments; the pseudo-inverse is iterated; a depthwise convolution of V is added.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import DspattnError
from ..functional import attention
from ..patterns import Grouping, parse_grouping, parse_pattern
from .mechanism import Mechanism, dense_attention, pad_rows, require_not_negative, require_positive, scores, softmax


class Nystromformer(Mechanism):
    """``convolution`` 0 leaves the convolution out; with landmarks = n the product is then A A⁺ A V = A V.

    With ``pattern`` both n x landmarks softmaxes are pruned to N:M: each is, with the product that follows it, an
    attention of its own and runs by :func:`dspattn.attention`. The landmarks' own matrix stays dense.
    """

    name = "nystromformer"
    cost = "n m d + m³, m the landmarks"
    memory = "n m"
    defaults = "64 landmarks, convolution over 35: Nyströmformer's own configuration for Long Range Arena"
    masks = frozenset({"key"})

    def __init__(
        self,
        heads: int,
        head_dim: int,
        n: int,
        *,
        landmarks: int = 64,
        convolution: int = 35,
        iterations: int = 6,
        pattern: str | None = None,
        grouping: Grouping = "consecutive",
    ) -> None:
        super().__init__(heads, head_dim, n)
        require_positive(landmarks=landmarks, iterations=iterations)
        require_not_negative(convolution=convolution)
        if convolution and convolution % 2 == 0:
            raise DspattnError([f"convolution: expected 0 or an odd width, got {convolution}"])
        if pattern is not None:
            parse_pattern(pattern)
        parse_grouping(grouping)
        self.pattern, self.grouping, self.iterations = pattern, grouping, iterations
        self.segment = -(-n // min(landmarks, n))
        self.landmarks = -(-n // self.segment)
        self.convolution = (
            torch.nn.Conv2d(heads, heads, (convolution, 1), padding=(convolution // 2, 0), groups=heads, bias=False)
            if convolution
            else None
        )

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool) -> Tensor:
        keep = None if mask is None else mask.transpose(-1, -2)
        if keep is not None:
            k, v = k.masked_fill(~keep, 0.0), v.masked_fill(~keep, 0.0)
        few_queries, _ = self._landmarks(q if keep is None else q.masked_fill(~keep, 0.0), keep)
        few_keys, present = self._landmarks(k, keep)
        middle = softmax(scores(few_queries, few_keys, self.scale), present)
        seen = self._attend(few_queries, k, v, mask)
        out = self._attend(q, few_keys, self._inverse(middle, present).to(v.dtype) @ seen, present)
        if self.convolution is not None:
            weight = self.convolution.weight.to(v.dtype)
            out = out + torch.nn.functional.conv2d(v, weight, padding=self.convolution.padding, groups=self.heads)
        return out

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        if self.pattern is None:
            return dense_attention(q, k, v, mask, self.scale)
        return attention(q, k, v, mask, pattern=self.pattern, grouping=self.grouping, scale=self.scale)

    def _landmarks(self, tensor: Tensor, keep: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Means over segments of what is kept, and which landmarks have anything to average (None for all)."""
        padded = self.landmarks * self.segment
        sums = pad_rows(tensor, padded).unflatten(2, (self.landmarks, self.segment)).sum(3)
        if keep is None:
            last = self.n - (self.landmarks - 1) * self.segment
            counts = torch.full((self.landmarks, 1), self.segment, dtype=tensor.dtype, device=tensor.device)
            counts[-1] = last
            return sums / counts, None
        counts = pad_rows(keep.to(tensor.dtype), padded).unflatten(2, (self.landmarks, self.segment)).sum(3)
        return sums / counts.clamp(min=1), (counts > 0).transpose(-1, -2)

    def _inverse(self, matrix: Tensor, present: Tensor | None) -> Tensor:
        """The pseudo-inverse by the third-order iteration Z <- Z (13 I - K Z (15 I - K Z (7 I - K Z))) / 4."""
        matrix = matrix.float()
        if present is not None:  # rows of landmarks that do not exist
            matrix = matrix * present.transpose(-1, -2)
        identity = torch.eye(matrix.shape[-1], dtype=torch.float32, device=matrix.device)
        norm = matrix.abs().sum(-2).amax(-1) * matrix.abs().sum(-1).amax(-1)
        inverse = matrix.transpose(-1, -2) / norm.clamp(min=1e-30)[..., None, None]
        for _ in range(self.iterations):
            both = matrix @ inverse
            inverse = 0.25 * inverse @ (13 * identity - both @ (15 * identity - both @ (7 * identity - both)))
        return inverse
