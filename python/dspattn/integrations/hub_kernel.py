"""Pruned attention as a kernel of Hugging Face's hub layout, loaded from a folder on disk:

    folder = dspattn.integrations.hub_kernel.write("kernels/flash-2-4", "2:4")
    LOCAL_KERNELS="dspattn/flash-2-4=kernels/flash-2-4"                      (the environment of the `kernels` package)
    model.set_attn_implementation("dspattn/flash-2-4", allow_all_kernels=True)

transformers takes such a kernel for flash attention and calls it by that interface, also from continuous batching,
which takes no other names: sequences arrive packed, and groups count from each one's own start. The name must have
"flash" in it. Where the names ``dspattn_2_4`` serve, they do more (biases, weights, parallel contexts).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from ..functional import attention, varlen_attention
from ..patterns import Grouping, parse_grouping, parse_pattern
from .huggingface import implementation_name

BACKENDS = ("cpu", "cuda")
VERSION = 1  # transformers asks for this one of kernels it does not know by name


def write(folder: str | Path, pattern: str = "2:4", grouping: Grouping = "interleaved") -> Path:
    """Write a kernel folder, one build for CPUs and one for NVIDIA GPUs; the package itself must be installed.

    Args:
        folder: made if it is not there.
        pattern: ``"N:M"`` or ``"dense"``.
        grouping: ``"interleaved"`` or ``"consecutive"``.

    Returns:
        The folder.
    """
    parse_pattern(pattern)
    parse_grouping(grouping)
    folder = Path(folder)
    name = implementation_name(pattern, grouping).replace("dspattn", "dspattn-flash", 1).replace("_", "-")
    for backend in BACKENDS:
        build = folder / "build" / f"torch-{backend}"
        build.mkdir(parents=True, exist_ok=True)
        about = {
            "id": f"_{name.replace('-', '_')}_{backend}",
            "name": name,
            "version": VERSION,
            "license": "Apache-2.0",
            "python-depends": [],
            "backend": {"type": backend},
        }
        (build / "metadata.json").write_text(json.dumps(about, indent=2) + "\n")
        (build / "__init__.py").write_text(
            "from dspattn.integrations.hub_kernel import flash_functions\n\n"
            f"flash_attn_func, flash_attn_varlen_func = flash_functions({pattern!r}, {grouping!r})\n"
        )
    return folder


def flash_functions(pattern: str, grouping: Grouping) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    """``flash_attn_func`` and ``flash_attn_varlen_func`` as the flash-attention package has them, pruned.

    Soft caps and sinks (``s_aux``) are in their signatures on purpose: transformers leaves out sinks, in silence, where
    a signature does not have them.
    """
    chosen: dict[str, Any] = {"pattern": pattern, "grouping": grouping, "alignment": "bottom_right"}

    def flash_attn_func(
        q: Tensor,  # [batch, n_q, heads, d]
        k: Tensor,  # [batch, n_k, kv_heads, d]
        v: Tensor,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        deterministic: bool = False,  # it always is
        s_aux: Tensor | None = None,
    ) -> Tensor:
        q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
        out: Tensor = attention(
            q, k, v, dropout_p=dropout_p, is_causal=causal, scale=softmax_scale, enable_gqa=True,
            window=_window(window_size), soft_cap=softcap or None, sinks=s_aux, **chosen,
        )  # fmt: skip
        return out.transpose(1, 2)

    def flash_attn_varlen_func(
        q: Tensor,  # [total_q, heads, d]
        k: Tensor,  # [total_k, kv_heads, d]
        v: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: Any,
        max_seqlen_k: Any,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        deterministic: bool = False,
        s_aux: Tensor | None = None,
    ) -> Tensor:
        out: Tensor = varlen_attention(
            q, k, v, cu_seqlens_q, cu_seqlens_k, int(max_seqlen_q), int(max_seqlen_k), dropout_p=dropout_p,
            is_causal=causal, scale=softmax_scale, window=_window(window_size), soft_cap=softcap or None, sinks=s_aux,
            **chosen,
        )  # fmt: skip
        return out

    return flash_attn_func, flash_attn_varlen_func


def _window(size: tuple[int, int]) -> tuple[int | None, int | None] | None:
    left, right = (None if side < 0 else side for side in size)
    return None if left is None and right is None else (left, right)
