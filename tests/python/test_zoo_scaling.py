"""The zoo at length: forward and backward at 4096 positions, memory of the order each mechanism states, and
Performer's error against the theory of its features."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from dspattn import zoo
from dspattn.zoo.performer import draw_features

N = 4096
# What forward keeps for backward is of order n² (sparse_transformer: n²/4 at c/s = 1/4). top_k makes n² scores,
# of which it keeps the k of each row only.
QUADRATIC = {"full", "synthesizer", "fixed", "sparse_transformer"}


def saved_by(module: zoo.Mechanism, batch: int) -> tuple[int, list[Tensor]]:
    """The largest tensor that forward keeps for backward, in elements, and the gradients."""
    generator = torch.Generator().manual_seed(0)
    shape = (batch, module.heads, module.n, module.head_dim)
    q, k, v = (torch.randn(shape, generator=generator).requires_grad_() for _ in range(3))
    largest = 0

    def note(tensor: Tensor) -> Tensor:
        nonlocal largest
        largest = max(largest, tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        out = module(q, k, v)
    out.sum().backward()
    return largest, [t.grad for t in (q, k, v, *module.parameters()) if t.grad is not None]


@pytest.mark.parametrize("name", zoo.names())
def test_forward_and_backward_at_length(name: str) -> None:
    torch.manual_seed(0)
    module = zoo.create(name, heads=1, head_dim=16, n=N).train()
    largest, gradients = saved_by(module, 1)
    assert all(torch.isfinite(gradient).all() for gradient in gradients)
    if name in QUADRATIC:
        assert largest >= N * N // 4
    else:  # Longformer's 768 gathered keys of each position are the most
        assert largest <= 800 * N


@pytest.mark.rare
@pytest.mark.parametrize("name", zoo.names())
def test_forward_and_backward_at_full_size(name: str) -> None:
    torch.manual_seed(0)
    module = zoo.create(name, heads=4, head_dim=64, n=N).train()
    _, gradients = saved_by(module, 2)
    assert all(torch.isfinite(gradient).all() for gradient in gradients)


def orthogonal_covariance(x2: float, y2: float, v: float, d: int) -> float:
    """Of the products of two features at right angles: docs/zoo.md, Performer's error."""
    total = 0.0
    for k in range(1, 60):
        for j in range(1, 60):
            log_ratio = (
                math.lgamma(d / 2 + k) + math.lgamma(d / 2 + j) - math.lgamma(d / 2) - math.lgamma(d / 2 + k + j)
            )
            size = math.exp((k + j) * math.log(v / 2) - math.lgamma(k + 1) - math.lgamma(j + 1))
            total += size * (math.exp(log_ratio) - 1)
    return math.exp(-x2 - y2) * total


@pytest.mark.parametrize("orthogonal", [False, True])
def test_performer_error_follows_the_theory(orthogonal: bool) -> None:
    d, draws = 16, 20000
    generator = torch.Generator().manual_seed(4)
    q, k = (torch.randn(1, 1, 1, d, generator=generator) * 0.4 for _ in range(2))
    x, y = (t.flatten().double() / d**0.25 for t in (q, k))
    v = float((x + y).square().sum())
    kernel = math.exp(float(q.flatten() @ k.flatten()) / math.sqrt(d))
    module: Any = zoo.create("performer", heads=1, head_dim=d, n=1, features=draws * d, orthogonal=orthogonal)
    module.projection.copy_(draw_features(draws * d, d, orthogonal, generator))
    one = (module._exponents(q) + module._exponents(k)).double().exp().flatten()  # the product of each feature
    errors = {}
    for features in (d, 4 * d, 16 * d):
        squares = (one.view(-1, features).mean(1) - kernel).square()
        expected = kernel**2 * math.expm1(v) / features
        if orthogonal:  # features come in blocks of d; pairs within a block are at right angles
            covariance = orthogonal_covariance(float(x.square().sum()), float(y.square().sum()), v, d)
            expected += covariance * (d - 1) / features
        interval = 4 * float(squares.std()) / math.sqrt(len(squares))
        assert abs(float(squares.mean()) - expected) < interval
        assert interval < 0.25 * expected  # the interval is worth something
        errors[features] = math.sqrt(float(squares.mean()))
    assert errors[d] / errors[16 * d] == pytest.approx(4, rel=0.1)  # 1/sqrt(features)


def test_performer_features_are_orthogonal_in_blocks_and_normal() -> None:
    drawn = draw_features(40, 16, True, torch.Generator().manual_seed(0))
    for block in drawn.split(16):
        products = block @ block.T
        torch.testing.assert_close(products, torch.diag(products.diagonal()), atol=1e-4, rtol=0)
    many = draw_features(16 * 4000, 16, True, torch.Generator().manual_seed(0))
    assert float(many.mean()) == pytest.approx(0, abs=0.01)
    assert float(many.var()) == pytest.approx(1, abs=0.01)


def test_performer_approaches_full_attention() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (0.5 * torch.randn(1, 1, 64, 16, generator=generator) for _ in range(3))
    exact = zoo.create("full", heads=1, head_dim=16, n=64)(q, k, v)
    errors = []
    for features in (64, 1024, 16384):
        module = zoo.create("performer", heads=1, head_dim=16, n=64, features=features, epsilon=0.0)
        errors.append(float((module(q, k, v) - exact).square().mean().sqrt()))
    assert errors[0] > 2 * errors[1] > 4 * errors[2]
