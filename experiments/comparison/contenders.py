"""All that is compared: full attention unfused and by PyTorch's own kernels, this package's kernels, the zoo, and the
zoo with N:M inside. Each is made for one shape and then called with q, k, v."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import dspattn
from dspattn import zoo

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
BASELINE = "full"  # the paper's: three unfused steps
EXACT = "full, no tf32"  # the same with the products of fp32 in fp32: PyTorch's default today
TODAY = "cudnn"  # what people run; PyTorch's own choice where there is no GPU

# The rows of the kernel table that run the paper's three kernels, the newer first.
PIPELINE_KERNELS = ("sm90_pipeline", "sm80_pipeline")
COMBINED = ("nystromformer", "linformer", "bigbird", "longformer")


@dataclass(frozen=True)
class Contender:
    """``make(heads, head_dim, n, device, dtype)`` gives the call; ``kind`` groups the pictures."""

    name: str
    kind: str  # dense, ours, zoo, combined
    make: Callable[..., Attend]
    pattern: str = "dense"
    grouping: str = "none"
    gpu_only: bool = False


def pattern_of(dtype: str) -> str:
    """What sparse tensor cores take of the type."""
    return "1:2" if dtype == "fp32" else "2:4"


def label_of(name: str, dtype: str) -> str:
    """In tables and pictures: cuDNN's kernel has 16-bit types only, and PyTorch chooses another for the rest."""
    return {EXACT: "unfused without tf32", TODAY: "PyTorch's fused" if dtype == "fp32" else "cuDNN"}.get(name, name)


def _sdpa(backend: SDPBackend | None) -> Callable[..., Attend]:
    def make(*_: Any) -> Attend:
        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            if backend is None:
                return torch.nn.functional.scaled_dot_product_attention(q, k, v)
            with sdpa_kernel(backend):
                return torch.nn.functional.scaled_dot_product_attention(q, k, v)

        return attend

    return make


def _exact(*shape: Any) -> Attend:
    attend = _zoo("full")(*shape)

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        before = torch.backends.cuda.matmul.allow_tf32
        torch.backends.cuda.matmul.allow_tf32 = False
        try:
            return attend(q, k, v)
        finally:
            torch.backends.cuda.matmul.allow_tf32 = before

    return run


def _ours(pattern: str, grouping: str) -> Callable[..., Attend]:
    def make(*_: Any) -> Attend:
        return lambda q, k, v: dspattn.attention(q, k, v, pattern=pattern, grouping=grouping)

    return make


def _pipeline(pattern: str) -> Callable[..., Attend]:
    """The three kernels as one row of the kernel table; on the CPU, over a mask of all blocks, which is the same."""

    def make(heads: int, head_dim: int, n: int, device: str, dtype: torch.dtype) -> Attend:
        if device == "cpu":
            blocks = dspattn.block_masks.sliding_window(n, window=n)
            return lambda q, k, v: dspattn.block_attention(q, k, v, blocks, pattern=pattern)
        example = torch.zeros(1, heads, 128, head_dim, device=device, dtype=dtype)
        options: dict[str, Any] = {"pattern": pattern, "grouping": "consecutive"}
        for kernel in PIPELINE_KERNELS:
            try:
                dspattn.attention(example, example, example, kernel=kernel, **options)
            except dspattn.DspattnError:
                continue
            return lambda q, k, v, kernel=kernel: dspattn.attention(q, k, v, kernel=kernel, **options)
        raise RuntimeError(f"none of {', '.join(PIPELINE_KERNELS)} runs here")

    return make


def _zoo(name: str, **options: Any) -> Callable[..., Attend]:
    def make(heads: int, head_dim: int, n: int, device: str, dtype: torch.dtype) -> Attend:
        torch.manual_seed(0)
        return zoo.create(name, heads=heads, head_dim=head_dim, n=n, **options).to(device=device, dtype=dtype).eval()

    return make


def contenders(device: str, dtype: str) -> list[Contender]:
    """All that take part on a device for a type, the baseline first."""
    pattern = pattern_of(dtype)
    found = [Contender(BASELINE, "dense", _zoo("full"))]
    if device == "cuda":
        if dtype == "fp32":
            found.append(Contender(EXACT, "dense", _exact))
        cudnn = None if dtype == "fp32" else SDPBackend.CUDNN_ATTENTION  # cuDNN's has 16-bit types only
        found.append(Contender(TODAY, "dense", _sdpa(cudnn)))
    else:
        found.append(Contender("sdpa", "dense", _sdpa(None)))
    found += [
        Contender("pipeline", "ours", _pipeline(pattern), pattern, "consecutive"),
        Contender("fused", "ours", _ours(pattern, "interleaved"), pattern, "interleaved"),
    ]
    found += [Contender(name, "zoo", _zoo(name)) for name in zoo.names() if name != "full"]
    found += [
        Contender(f"{name} + {pattern}", "combined", _zoo(name, pattern=pattern), pattern, "consecutive")
        for name in COMBINED
    ]
    return found


def inputs(batch: int, heads: int, n: int, d: int, device: str, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator(device).manual_seed(0)
    q, k, v = (torch.randn(batch, heads, n, d, device=device, generator=generator).to(dtype) for _ in range(3))
    return q, k, v
