"""The paper's combinations: mechanisms of the zoo whose scores are pruned to N:M, against the contract in float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import contract
from dspattn import DspattnError, block_masks, zoo

BATCH, HEADS, N, D = 2, 2, 192, 32


def inputs(grad: bool = False) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(BATCH, HEADS, N, D, generator=generator).requires_grad_(grad) for _ in range(3)]


def create(name: str, **options: Any) -> Any:
    torch.manual_seed(1)
    return zoo.create(name, heads=HEADS, head_dim=D, n=N, **options).eval()


def close(actual: Tensor, expected: Tensor, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(actual, expected.float(), rtol=0, atol=tolerance)


@pytest.mark.parametrize("pattern", ["1:2", "2:4"])
def test_linformer_prunes_its_projected_scores(pattern: str) -> None:
    q, k, v = inputs()
    module = create("linformer", rows=24, shared=False, pattern=pattern)
    few_k, few_v = module.key_projection.double() @ k.double(), module.value_projection.double() @ v.double()
    close(module(q, k, v), contract.attention(q, few_k, few_v, pattern, "consecutive")[0])


@pytest.mark.parametrize("pattern", ["1:2", "2:4"])
def test_nystromformer_prunes_both_long_softmaxes(pattern: str) -> None:
    q, k, v = inputs()
    module = create("nystromformer", landmarks=8, convolution=0, iterations=25, pattern=pattern)
    few_q, few_k = (t.double().view(BATCH, HEADS, 8, 24, D).mean(3) for t in (q, k))
    middle = (few_q @ few_k.transpose(-1, -2) / math.sqrt(D)).softmax(-1)
    seen = contract.attention(few_q, k, v, pattern, "consecutive")[0]
    expected = contract.attention(q, few_k, torch.linalg.pinv(middle) @ seen, pattern, "consecutive")[0]
    # Rounding of the iterated inverse: its condition here is about 1e3.
    close(module(q, k, v), expected, 2e-3)


def mask_of(kind: str) -> tuple[Tensor | None, bool, Tensor]:
    generator = torch.Generator().manual_seed(3)
    if kind == "none":
        return None, False, torch.tensor(True)
    if kind == "causal":
        return None, True, torch.ones(N, N, dtype=torch.bool).tril()
    mask = torch.rand(BATCH, 1, 1 if kind == "key" else N, N, generator=generator) > 0.3
    return mask, False, mask


@pytest.mark.parametrize("kind", ["none", "key", "pair", "causal"])
@pytest.mark.parametrize("name", ["bigbird", "longformer"])
def test_block_masks_with_pruning_inside(name: str, kind: str) -> None:
    q, k, v = inputs()
    given, is_causal, allowed = mask_of(kind)
    if name == "bigbird":
        module = create("bigbird", window=0, random=1, pattern="1:2")
        mask = block_masks.bigbird(N, window=0, random=1)
    else:
        module = create("longformer", window=64, global_tokens=1, pattern="1:2")
        mask = block_masks.longformer(N, window=1, global_blocks=1)
    expected = contract.attention(q, k, v, "1:2", "consecutive", mask=mask.to_dense() & allowed)[0]
    close(module(q, k, v, given, is_causal=is_causal), expected)


OPTIONS: dict[str, dict[str, Any]] = {
    "linformer": {}, "nystromformer": {"landmarks": 16}, "bigbird": {"random": 0}, "longformer": {"window": 64},
}  # fmt: skip


@pytest.mark.parametrize("name", OPTIONS)
def test_a_pattern_that_keeps_all_is_the_mechanism_itself(name: str) -> None:
    q, k, v = inputs()
    plain, pruned = (create(name, pattern=pattern, **OPTIONS[name]) for pattern in (None, "1:2"))
    pruned.load_state_dict(plain.state_dict())
    assert (plain(q, k, v) - pruned(q, k, v)).abs().max() > 1e-3
    if name in ("linformer", "nystromformer"):  # the pipeline has patterns of half the scores only
        pruned.pattern = "dense"
        close(pruned(q, k, v), plain(q, k, v), 1e-4)


@pytest.mark.parametrize("name", OPTIONS)
def test_trains(name: str) -> None:
    q, k, v = inputs(grad=True)
    module = create(name, pattern="1:2", **OPTIONS[name]).train()
    out = module(q, k, v)
    for gradient in torch.autograd.grad(out.square().sum(), [q, k, v, *module.parameters()]):
        assert torch.isfinite(gradient).all()
        assert gradient.abs().max() > 0


@pytest.mark.parametrize("name", OPTIONS)
def test_is_traced_whole(name: str) -> None:
    q, k, v = inputs()
    module = create(name, pattern="1:2", **OPTIONS[name])
    torch._dynamo.reset()
    with torch.no_grad():
        traced = torch.compile(module, backend="eager", fullgraph=True)(q, k, v)
    torch.testing.assert_close(traced, module(q, k, v))


def test_errors_name_what_was_expected() -> None:
    with pytest.raises(DspattnError, match="block: expected 64 or 128 with a pattern, got 32"):
        create("bigbird", block=32, pattern="2:4")
    with pytest.raises(DspattnError, match='pattern: expected "dense" or "N:M"'):
        create("linformer", pattern="half")
