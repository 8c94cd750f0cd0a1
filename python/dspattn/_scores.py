"""Numbers of scores: what is compared, what is added, what is stored."""

from __future__ import annotations

import math

import torch
from torch import Tensor

FP16_MAX = 65504.0


def finite_sum(product: Tensor, bias: Tensor) -> Tensor:
    """Their sum, finite where both are: beyond float32 it is the largest number, which neither masks nor is NaN."""
    total = product + bias
    largest = torch.finfo(torch.float32).max
    overflowed = ~total.isfinite() & product.isfinite() & bias.isfinite()
    return torch.where(overflowed, total.clamp(-largest, largest), total)


def stored(scores: Tensor, dtype: torch.dtype) -> Tensor:
    """Scores as nonzeros of a type: what is not masked stays so, at the type's largest number where it cannot hold
    more. Only infinity itself is infinite."""
    largest = torch.finfo(dtype).max
    return torch.where(scores.isinf(), scores, scores.clamp(-largest, largest)).to(dtype)


def power_below(scale: float) -> float:
    """The largest power of two not above it, exactly."""
    return 2.0 ** (math.frexp(scale)[1] - 1)


def selection_key(unscaled: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """What is compared: the unscaled score in float32, for 16-bit inputs times the largest power of two not above the
    scale and rounded to float16, so that the choice is that of the fused kernels."""
    if dtype == torch.float32:
        return unscaled
    shifted = unscaled * power_below(scale)
    return torch.where(shifted == float("-inf"), shifted, shifted.clamp(-FP16_MAX, FP16_MAX)).to(torch.float16)
