"""Random problems for the operators: shapes, types, views, masks and options that a user may combine.

Inputs are small whole numbers and scales powers of two, so that scores are exact and every device keeps the same keys.
`selection="shared"` is left out: it compares sums of weights, of which two may be nearer to each other than rounding.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import dspattn
import layouts

DTYPES = (torch.bfloat16, torch.bfloat16, torch.float16, torch.float32)
LENGTHS = (1, 1, 2, 5, 16, 33, 64, 65, 127, 128, 129, 200, 256, 300, 384, 520)
DIMS = (8, 16, 24, 40, 64, 64, 72, 96, 128, 128, 136, 192, 256, 320)
PATTERNS = ("2:4", "2:4", "1:2", "1:2", "dense", "1:4", "4:8", "3:5")


def whole(*shape: int) -> Tensor:
    return torch.randint(-2, 3, shape)


def moved(tensor: Tensor, device: str) -> Tensor:
    """On another device, with the same strides."""
    if tensor.numel() == 0:
        return tensor.to(device)
    memory = tensor.as_strided((tensor.untyped_storage().nbytes() // tensor.element_size(),), (1,), 0)
    return memory.to(device).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


@dataclass
class Problem:
    """A call of `function`; `weights` are those of the sum of outputs whose gradients are asked for, if any are."""

    function: Callable[..., Any]
    inputs: list[Tensor]
    options: dict[str, Any]
    weights: Tensor | None = None
    positional: list[Tensor] = field(default_factory=list)  # after the inputs

    def __str__(self) -> str:
        def said(value: Any) -> Any:
            return (tuple(value.shape), value.dtype) if isinstance(value, Tensor) and value.numel() > 16 else value

        tensors = [(tuple(t.shape), t.stride(), t.dtype) for t in self.inputs]
        rest = {name: said(value) for name, value in self.options.items()}
        return f"{tensors} {[said(t) for t in self.positional]} {rest} gradients: {self.weights is not None}"

    def results(self, device: str = "cpu", change: Callable[[Tensor], Tensor] = lambda t: t) -> dict[str, Tensor]:
        """Output, LSE and gradients. `change` is applied to the inputs."""

        def there(value: Any) -> Any:
            return moved(value, device) if isinstance(value, Tensor) and device != "cpu" else value

        inputs = [change(there(t)) for t in self.inputs]
        options = {name: there(value) for name, value in self.options.items()}
        leaves = dict(zip(("dq", "dk", "dv"), inputs, strict=True))
        if self.weights is not None:
            leaves |= {f"d{name}": options[name] for name in ("attn_bias", "sinks") if name in options}
            leaves = {name: leaf.detach().requires_grad_() for name, leaf in leaves.items()}
            inputs = [leaves[name] for name in ("dq", "dk", "dv")]
            options |= {name[1:]: leaf for name, leaf in leaves.items() if name[1:] in options}
        out, lse = self.function(*inputs, *map(there, self.positional), **options, return_lse=True)
        found = {"out": out.detach(), "lse": lse.detach()}
        if self.weights is not None:
            (out.float() * there(self.weights)).sum().backward()
            found |= {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}
        return {name: tensor.cpu() for name, tensor in found.items()}


def chance(share: float) -> bool:
    return random.random() < share


def seeded(seed: int) -> None:
    random.seed(seed)
    torch.manual_seed(seed)


def drawn_attention() -> Problem:
    dtype, dim = random.choice(DTYPES), random.choice(DIMS)
    batch, kv_heads, group = random.choice((1, 2, 3)), random.choice((1, 2, 3)), random.choice((1, 1, 2, 4))
    n_q, n_k = (0 if chance(0.03) else random.choice(LENGTHS) for _ in range(2))
    dim_v = dim if chance(0.7) else random.choice(DIMS)
    heads = kv_heads * group
    shapes = ((batch, heads, n_q, dim), (batch, kv_heads, n_k, dim), (batch, kv_heads, n_k, dim_v))
    inputs = [layouts.drawn(lambda *s: whole(*s).to(dtype), shape, random.choice)[0] for shape in shapes]
    scale = 2.0 ** random.choice((-3, -4, -5))
    options: dict[str, Any] = dict(
        pattern=random.choice(PATTERNS), grouping=random.choice(("interleaved", "consecutive")), scale=scale
    )
    mean = chance(0.35)

    def mask_shape() -> tuple[int, ...]:
        return random.choice((1, batch)), random.choice((1, heads)), 1 if mean else random.choice((1, n_q)), n_k

    def bias() -> Tensor:
        return (torch.randint(-4, 5, mask_shape()) * scale).to(dtype)

    drawn: tuple[tuple[float, str, Callable[[], Any]], ...] = (
        (1.0 if group > 1 else 0.0, "enable_gqa", lambda: True),
        (1.0 if mean else 0.0, "rest", lambda: "mean"),
        (0.4, "is_causal", lambda: True),
        (0.3, "window", lambda: random.choice(((10, 3), (None, 20), (200, None), 40, (300, 0)))),
        (0.4, "alignment", lambda: "bottom_right"),
        (0.15, "offset", lambda: random.choice((-7, 5, 130))),
        (0.2, "out_dtype", lambda: torch.float32),
        (0.1, "soft_cap", lambda: 8.0),
        (0.35, "attn_mask", lambda: torch.rand(mask_shape()) < 0.7 if chance(0.6) else bias()),
        (0.15, "attn_bias", bias),
        (0.2, "key_lengths", lambda: torch.randint(0, n_k + 1, (batch,))),
        (0.1, "sinks", lambda: torch.randint(-2, 3, (heads,)).to(dtype)),
    )
    options |= {name: value() for share, name, value in drawn if chance(share)}
    wants = not mean and chance(0.5)
    return Problem(dspattn.attention, inputs, options, whole(batch, heads, n_q, dim_v).float() if wants else None)


def drawn_packed() -> Problem:
    """Sequences of any lengths, none among them; rows past the last one's end, whose keys and values are NaN."""
    dtype, dim = random.choice(DTYPES), random.choice((16, 40, 64, 96, 128, 192, 256))
    batch, kv_heads, group = random.choice((1, 2, 4, 9)), random.choice((1, 2, 3)), random.choice((1, 1, 2, 4))
    of_q = [random.choice((0, 1, 5, 64, 128, 130, 257)) for _ in range(batch)]
    of_k = of_q if chance(0.4) else [random.choice((0, 1, 7, 64, 128, 129, 200, 300)) for _ in range(batch)]
    rows_q, rows_k = sum(of_q) + random.choice((0, 0, 3)), sum(of_k) + random.choice((0, 0, 70))

    def packed(rows: int, used: int, heads: int) -> Tensor:
        def make(*shape: int) -> Tensor:
            return whole(*shape).to(dtype)

        tensor, _ = layouts.drawn(make, (heads, rows, dim), random.choice)
        own = tensor[:1] if tensor.stride(0) == 0 else tensor  # all heads may share memory
        own[:, used:] = float("nan")
        return tensor.transpose(0, 1)

    q = packed(rows_q, rows_q, kv_heads * group)
    k, v = (packed(rows_k, sum(of_k), kv_heads) for _ in range(2))
    options: dict[str, Any] = dict(
        pattern=random.choice(PATTERNS), grouping=random.choice(("interleaved", "consecutive")), scale=2.0**-4
    )
    mean = chance(0.3)
    drawn: tuple[tuple[float, str, Callable[[], Any]], ...] = (
        (1.0 if mean else 0.0, "rest", lambda: "mean"),
        (0.5, "is_causal", lambda: True),
        (0.25, "window", lambda: random.choice(((30, 0), (None, 5), 100))),
        (0.3, "alignment", lambda: "top_left"),
        (0.1, "sinks", lambda: torch.randint(-2, 3, (q.shape[1],)).to(dtype)),
        (0.5, "max_seqlen_q", lambda: max(of_q) + random.choice((0, 40))),
        (0.5, "max_seqlen_k", lambda: max(of_k) + random.choice((0, 40))),
    )
    options |= {name: value() for share, name, value in drawn if chance(share)}
    starts = [torch.tensor([0, *torch.tensor(of).cumsum(0).tolist()], dtype=torch.int32) for of in (of_q, of_k)]
    wants = not mean and chance(0.5)
    weights = whole(rows_q, q.shape[1], dim).float() if wants else None
    return Problem(dspattn.varlen_attention, [q, k, v], options, weights, starts)
