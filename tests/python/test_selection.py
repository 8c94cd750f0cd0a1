"""selection="shared": against plain PyTorch, in packed batches, under models, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import contract
import dspattn


def shared(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, pattern: str, grouping: str) -> torch.Tensor:
    """The contract in float64: heads of a key head keep the keys of the largest summed weights."""
    keep, group = map(int, pattern.split(":"))
    repeat = q.shape[1] // k.shape[1]
    k, v = (t.double().repeat_interleave(repeat, 1) for t in (k, v))
    scores = q.double() @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    sums = torch.softmax(scores, -1).unflatten(1, (-1, repeat)).sum(2)
    kept = contract.kept(sums, keep, group, grouping).repeat_interleave(repeat, 1)
    return torch.softmax(scores.masked_fill(~kept, float("-inf")), -1) @ v


@pytest.mark.parametrize("pattern, grouping", [("2:4", "interleaved"), ("1:2", "consecutive")])
def test_against_the_contract(pattern: str, grouping: Any) -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 6, 9, 16), torch.randn(2, 2, 150, 16), torch.randn(2, 2, 150, 16)
    options: dict[str, Any] = {"pattern": pattern, "grouping": grouping, "enable_gqa": True}
    out = dspattn.attention(q, k, v, selection="shared", **options)
    torch.testing.assert_close(out.double(), shared(q, k, v, pattern, grouping), atol=1e-5, rtol=1e-5)
    assert not torch.allclose(out, dspattn.attention(q, k, v, **options))
    weights = dspattn.attention_weights(q, k, selection="shared", **options) > 0
    assert torch.equal(weights[:, :3], weights[:, :1].expand(-1, 3, -1, -1))

    flat = [t[0].transpose(0, 1) for t in (q, k, v)]
    cu = [torch.tensor([0, t.shape[0]], dtype=torch.int32) for t in flat[:2]]
    packed = dspattn.varlen_attention(*flat, *cu, pattern=pattern, grouping=grouping, selection="shared")
    assert torch.equal(packed.transpose(0, 1), out[0])


def test_gradients_and_ranks_are_refused() -> None:
    q, k = torch.randn(1, 2, 4, 16, requires_grad=True), torch.randn(1, 1, 4, 16)
    out = dspattn.attention(q, k, k, enable_gqa=True, selection="shared")
    with pytest.raises(RuntimeError, match="choice: takes each head's own, got shared"):
        out.sum().backward()
    with pytest.raises(dspattn.DspattnError, match='selection: expected "own" or "shared"'):
        dspattn.attention(q, k, k, enable_gqa=True, selection="any")  # type: ignore[call-overload]


def test_models_by_name_and_in_blocks() -> None:
    transformers = pytest.importorskip("transformers", minversion="5.0")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=50, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, initializer_range=0.3,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    ids = torch.randint(0, 50, (1, 140))
    name = dspattn.integrations.huggingface.register_pattern("2:4", selection="shared")
    assert name == "dspattn_2_4_shared"
    found = {}
    with torch.no_grad():
        for each in ("dspattn_2_4", name):
            model.set_attn_implementation(each)
            found[each] = model(ids).logits
        model.set_attn_implementation("sdpa")
        assert "shared selection" in str(dspattn.apply(model, "2:4", example={"input_ids": ids}, selection="shared"))
        assert torch.equal(model(ids).logits, found[name])
    assert not torch.equal(*found.values())

    q, k = torch.randn(1, 4, 5, 16), torch.randn(1, 2, 100, 16)
    with dspattn.use("2:4", selection="shared"):
        out = torch.nn.functional.scaled_dot_product_attention(q, k, k, enable_gqa=True)
    assert torch.equal(out, dspattn.attention(q, k, k, enable_gqa=True, selection="shared"))
