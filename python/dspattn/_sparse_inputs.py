"""What the three steps check of their arguments, alike on every device."""

from __future__ import annotations

import torch
from torch import Tensor

from ._inputs import require_known
from .errors import DspattnError


def require_device(name: str, tensor: Tensor) -> None:
    require_known(name, tensor)
    if tensor.device.type not in ("cpu", "cuda"):
        raise DspattnError([f"{name}: expected a tensor on cpu or cuda, got one on {tensor.device}"])


def leading_dims(query: Tensor, key: Tensor, attn_mask: Tensor | None) -> torch.Size:
    """Those of the scores, once everything fits together."""
    reasons = [
        f"{name}: expected at least two dimensions, got {list(tensor.shape)}"
        for name, tensor in (("query", query), ("key", key))
        if tensor.dim() < 2
    ]
    if reasons:
        raise DspattnError(reasons)
    if key.dtype != query.dtype:
        reasons.append(f"key.dtype: expected query's {query.dtype}, got {key.dtype}")
    if query.shape[-1] == 0:
        reasons.append(f"query: expected a head dimension of 1 or more, got {list(query.shape)}")
    if key.shape[-1] != query.shape[-1]:
        reasons.append(f"key: expected query's d = {query.shape[-1]}, got {list(key.shape)}")
    try:
        lead = torch.broadcast_shapes(query.shape[:-2], key.shape[:-2])
    except RuntimeError:
        reasons.append(
            f"key: expected leading dimensions that broadcast with query's {list(query.shape)}, got {list(key.shape)}"
        )
        raise DspattnError(reasons) from None
    if attn_mask is not None:
        full = (*lead, query.shape[-2], key.shape[-2])
        try:
            attn_mask.expand(full)
        except RuntimeError:
            reasons.append(f"attn_mask: expected a shape that broadcasts to {list(full)}, got {list(attn_mask.shape)}")
        if attn_mask.dtype != torch.bool and not attn_mask.is_floating_point():
            reasons.append(f"attn_mask.dtype: expected bool or a floating type, got {attn_mask.dtype}")
    if reasons:
        raise DspattnError(reasons)
    return lead


def check_product(nonzeros: Tensor, metadata: Tensor, value: Tensor) -> None:
    require_known("value", value)
    reasons = [
        f"{name}: expected at least two dimensions, got {list(tensor.shape)}"
        for name, tensor in (("nonzeros", nonzeros), ("metadata", metadata), ("value", value))
        if tensor.dim() < 2
    ]
    if reasons:
        raise DspattnError(reasons)
    lead = nonzeros.shape[:-2]
    if metadata.shape[:-2] != lead:
        reasons.append(
            f"metadata: expected the leading dimensions of nonzeros {list(lead)}, got {list(metadata.shape[:-2])}"
        )
    try:
        fits = torch.broadcast_shapes(lead, value.shape[:-2]) == lead
    except RuntimeError:
        fits = False
    if not fits:
        reasons.append(
            f"value: expected leading dimensions that broadcast to nonzeros' {list(lead)}, got {list(value.shape)}"
        )
    if reasons:
        raise DspattnError(reasons)
