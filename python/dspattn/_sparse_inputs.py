"""What the three steps check of their arguments, alike on every device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ._inputs import require_known
from .errors import DspattnError

FLOATING = (torch.float32, torch.float16, torch.bfloat16)


def require_device(name: str, tensor: Tensor) -> None:
    require_known(name, tensor)
    if tensor.device.type not in ("cpu", "cuda"):
        raise DspattnError([f"{name}: expected a tensor on cpu or cuda, got one on {tensor.device}"])


def require_types(nonzeros: Tensor, metadata: Tensor | None = None, value: Tensor | None = None) -> None:
    """The types and devices that the kernels take: on the CPU others would be served, and rounded on the way."""
    reasons = []
    if nonzeros.dtype not in FLOATING:
        reasons.append(f"nonzeros.dtype: expected float32, float16 or bfloat16, got {_type_name(nonzeros)}")
    if metadata is not None and metadata.dtype != torch.int16:
        reasons.append(f"metadata.dtype: expected int16, got {_type_name(metadata)}")
    if value is not None and value.dtype != nonzeros.dtype:
        reasons.append(f"value.dtype: expected nonzeros' {_type_name(nonzeros)}, got {_type_name(value)}")
    for name, tensor in (("metadata", metadata), ("value", value)):
        if tensor is not None and tensor.device != nonzeros.device:
            reasons.append(f"{name}: expected a tensor on {nonzeros.device} as nonzeros is, got one on {tensor.device}")
    if reasons:
        raise DspattnError(reasons)


def require_integer(name: str, number: Any) -> None:
    # As symbolic and NumPy's integers have.
    if not hasattr(number, "__index__") or (isinstance(number, int) and abs(number) >= 2**63):
        raise DspattnError([f"{name}: expected a 64-bit integer, got {number!r}"])


def _type_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def leading_dims(query: Tensor, key: Tensor, attn_mask: Tensor | None) -> torch.Size:
    """Those of the scores, once everything fits together."""
    reasons = [
        f"{name}: expected at least two dimensions, got {list(tensor.shape)}"
        for name, tensor in (("query", query), ("key", key))
        if tensor.dim() < 2
    ]
    if reasons:
        raise DspattnError(reasons)
    if query.dtype not in FLOATING:
        reasons.append(f"query.dtype: expected float32, float16 or bfloat16, got {_type_name(query)}")
    if key.dtype != query.dtype:
        reasons.append(f"key.dtype: expected query's {query.dtype}, got {key.dtype}")
    if key.device != query.device:
        reasons.append(f"key: expected a tensor on {query.device} as query is, got one on {key.device}")
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
        if attn_mask.dtype not in (torch.bool, torch.float32, query.dtype):
            reasons.append(
                f"attn_mask.dtype: expected bool, float32 or query's {_type_name(query)}, got {_type_name(attn_mask)}"
            )
        if attn_mask.device != query.device:
            reasons.append(f"attn_mask: expected a tensor on {query.device} as query is, got one on {attn_mask.device}")
    if reasons:
        raise DspattnError(reasons)
    return lead


def check_product(nonzeros: Tensor, metadata: Tensor, value: Tensor) -> None:
    require_known("metadata", metadata)
    require_known("value", value)
    require_types(nonzeros, metadata, value)
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
