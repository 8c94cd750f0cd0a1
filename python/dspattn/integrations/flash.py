"""Pruned attention behind PyTorch's own flash-attention operator, in the way PyTorch has for other makers of it:

    dspattn.integrations.flash.register("2:4")
    torch.nn.attention.activate_flash_attention_impl("dspattn_2_4")

From then on, in the whole process, every ``scaled_dot_product_attention`` call that PyTorch gives to its flash kernel
is pruned, calls from C++ and from exported programs too; ``torch.nn.attention.restore_flash_attention_impl()`` ends it.
Calls that PyTorch gives to another kernel (cuDNN, memory-efficient, math) are not reached. Inference only: PyTorch's
backward pass would differentiate dense attention, so asking for gradients raises.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..errors import DspattnError
from ..functional import attention
from ..patterns import Grouping, parse_grouping, parse_pattern
from .huggingface import implementation_name


class _Handle:
    """Keeps the registration alive."""

    def __init__(self, library: torch.library.Library) -> None:
        self.library: torch.library.Library | None = library

    def remove(self) -> None:
        if self.library is not None:
            self.library._destroy()
        self.library = None


def register(pattern: str = "2:4", grouping: Grouping = "interleaved") -> str:
    """Make an implementation known to PyTorch, which changes nothing yet.

    Args:
        pattern: ``"N:M"`` or ``"dense"``.
        grouping: ``"interleaved"`` or ``"consecutive"``.

    Returns:
        The name for ``torch.nn.attention.activate_flash_attention_impl``.

    Example:
        >>> register("2:4")
        'dspattn_2_4'
    """
    parse_pattern(pattern)
    parse_grouping(grouping)
    try:
        from torch.nn.attention import register_flash_attention_impl
    except ImportError:
        raise DspattnError(
            [f"torch: expected one with torch.nn.attention.register_flash_attention_impl, got {torch.__version__}"]
        ) from None
    name = implementation_name(pattern, grouping)
    register_flash_attention_impl(name, register_fn=lambda: _activated(pattern, grouping))
    return name


def _activated(pattern: str, grouping: Grouping) -> _Handle:
    def answer(
        query: Tensor, key: Tensor, value: Tensor, dropout_p: float, is_causal: bool, mask: Any, scale: Any
    ) -> tuple[Tensor, Tensor]:
        options: dict[str, Any] = {"pattern": pattern, "grouping": grouping, "return_lse": True}
        return attention(query, key, value, mask, dropout_p, is_causal, scale, enable_gqa=True, **options)

    def on_cpu(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        attn_mask: Tensor | None = None,
        scale: float | None = None,
    ) -> tuple[Tensor, Tensor]:
        return answer(query, key, value, dropout_p, is_causal, attn_mask, scale)

    def on_cuda(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        return_debug_mask: bool = False,
        *,
        scale: float | None = None,
    ) -> tuple[Any, ...]:
        if return_debug_mask:
            raise DspattnError(["return_debug_mask: expected False (there is none), got True"])
        out, lse = answer(query, key, value, dropout_p, is_causal, None, scale)
        lengths, seed = (query.new_empty(0, dtype=dtype) for dtype in (torch.int32, torch.uint64))
        return out, lse, lengths, lengths, query.shape[2], key.shape[2], seed, seed, query.new_empty(0)

    library = torch.library.Library("aten", "IMPL")
    for device, forward in (("CPU", on_cpu), ("CUDA", on_cuda)):
        name = "_scaled_dot_product_flash_attention" + ("_for_cpu" if device == "CPU" else "")
        library.impl(name, forward, device)
        library.impl(name + "_backward", _no_gradients, device)
    return _Handle(library)


def _no_gradients(*args: Any, **kwargs: Any) -> Any:
    raise DspattnError(
        [
            "scaled_dot_product_attention: expected no gradients while a dspattn flash implementation is active "
            "(inference only); dspattn.use has them"
        ]
    )
