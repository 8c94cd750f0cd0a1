"""Random calls over the argument space of scaled_dot_product_attention, each reproducible from its number."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import layouts


@dataclass
class Case:
    """One call: the three tensors, the keyword arguments, and what it is in words."""

    query: Tensor
    key: Tensor
    value: Tensor
    options: dict[str, Any] = field(default_factory=dict)
    words: str = ""


def _strided(rng: random.Random, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, str]:
    """Normal values of the shape, in one of the memory layouts models hand to attention."""
    return layouts.drawn(lambda *s: torch.randn(s).to(dtype), shape, rng.choice)


def make(seed: int) -> Case:
    """The case of this number."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    dtype = rng.choice([torch.float32, torch.float32, torch.bfloat16, torch.float16])
    dims = rng.choice([2, 3, 4, 4, 4, 4, 5])
    n_q, n_k = rng.choice([0, 1, 1, 2, 5, 17, 64, 129]), rng.choice([0, 1, 2, 7, 33, 128, 150])
    if rng.random() < 0.4:
        n_k = n_q
    d = rng.choice([1, 3, 8, 16, 40, 64])
    d_v = d if rng.random() < 0.7 else rng.choice([1, 5, 32])
    batch = tuple(rng.choice([1, 2, 3]) for _ in range(max(0, dims - 3)))
    if batch and rng.random() < 0.05:
        batch = (0, *batch[1:])
    heads = rng.choice([1, 2, 4, 6])
    kv_heads, options = heads, {}
    if dims >= 4 and rng.random() < 0.3:
        kv_heads = rng.choice([h for h in range(1, heads + 1) if heads % h == 0])
        options["enable_gqa"] = True

    def shape(h: int, n: int, width: int, may_broadcast: bool) -> tuple[int, ...]:
        lead = tuple(1 if may_broadcast and rng.random() < 0.5 else b for b in batch)
        if dims == 2:
            return (n, width)
        if may_broadcast and "enable_gqa" not in options and rng.random() < 0.2:
            h = 1
        return (*lead, h, n, width)

    broadcast = rng.random() < 0.2
    query, q_layout = _strided(rng, shape(heads, n_q, d, False), dtype)
    key, k_layout = _strided(rng, shape(kv_heads, n_k, d, broadcast), dtype)
    value, v_layout = _strided(rng, shape(kv_heads, n_k, d_v, broadcast), dtype)

    mask = rng.choice(["none", "none", "causal", "boolean", "bias"])
    if mask == "causal":
        options["is_causal"] = True
    elif mask != "none":
        full = (*batch, heads, n_q, n_k) if dims > 2 else (n_q, n_k)
        kept = full[rng.randrange(0, len(full) - 1) :]
        extents = tuple(1 if rng.random() < 0.3 else e for e in kept)
        if mask == "boolean":
            options["attn_mask"] = torch.rand(extents) > 0.3
        else:
            bias = torch.randn(extents)
            bias[torch.rand(extents) > 0.8] = float("-inf")
            options["attn_mask"] = bias.to(dtype)
    if rng.random() < 0.3:
        options["scale"] = rng.choice([0.05, 0.3, 1.7])
    given = ", ".join(f"{k}={list(v.shape) if isinstance(v, Tensor) else v}" for k, v in options.items())
    words = (
        f"seed {seed}: {dtype} q {list(query.shape)} ({q_layout}), k {list(key.shape)} ({k_layout}), "
        f"v {list(value.shape)} ({v_layout}), {given}"
    )
    return Case(query, key, value, options, words)


def exact(case: Case) -> Tensor:
    """The same in float64, written out; a query that sees no key gives 0."""
    q, k, v = (t.double() for t in (case.query, case.key, case.value))
    if case.options.get("enable_gqa"):
        k, v = (t.repeat_interleave(q.shape[-3] // t.shape[-3], -3) for t in (k, v))
    scale = case.options.get("scale") or q.shape[-1] ** -0.5
    scores = q @ k.transpose(-1, -2) * scale
    mask = case.options.get("attn_mask")
    if case.options.get("is_causal"):
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask.double()
    hidden = (scores == float("-inf")).all(-1, keepdim=True)
    return torch.softmax(scores.masked_fill(hidden, 0), -1).masked_fill(hidden, 0) @ v
