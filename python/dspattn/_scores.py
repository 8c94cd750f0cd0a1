"""Numbers of scores: what is compared, what is added, what is stored."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ._not_offered import forward_mode

FP16_MAX = 65504.0


def product(a: Tensor, b: Tensor) -> Tensor:
    """Their matrix product in the type that they have. Autocast would round them, and a score with them."""
    with torch.autocast(a.device.type, enabled=False):
        return a @ b


class Products(torch.autograd.Function):
    """Queries times keys. In the gradients a score that is hidden or pruned, with a gradient of 0, leaves out what it
    was made of: a NaN key that a query does not see is none of its business."""

    jvp = staticmethod(forward_mode)  # type: ignore[assignment]

    @staticmethod
    def forward(q: Tensor, k: Tensor) -> Tensor:
        return product(q, k.transpose(-1, -2))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, d_scores: Tensor) -> tuple[Tensor, Tensor]:
        q, k = ctx.saved_tensors
        d_q = times_where_not_zero(d_scores, k)
        d_k = times_where_not_zero(d_scores.transpose(-1, -2), q)
        return d_q.sum_to_size(q.shape), d_k.sum_to_size(k.shape)


def times_where_not_zero(factors: Tensor, rows: Tensor) -> Tensor:
    """Their matrix product, in which a factor of 0 leaves its row out even where that is NaN or infinite.

    Example:
        >>> times_where_not_zero(torch.tensor([[1.0, 0.0], [1.0, 1.0]]), torch.tensor([[2.0], [float("nan")]])).tolist()
        [[2.0], [nan]]
    """
    finite = rows.isfinite()
    if bool(finite.all()):
        return product(factors, rows)
    reached = product((factors != 0).to(rows.dtype), (~finite).to(rows.dtype))
    return product(factors, rows.masked_fill(~finite, 0)).masked_fill(reached > 0, float("nan"))


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
