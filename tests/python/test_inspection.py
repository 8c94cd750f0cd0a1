"""What the package says about the inside of a model, against a plain emulation of the same layers."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers")
import tiny_models
from dspattn import inspection
from experiments.quality import emulation

TOKENS = 150  # a whole block of 128 and a part of one


def captured(kind: str) -> list[inspection.LayerInputs]:
    model = tiny_models.encoder() if kind == "encoder" else tiny_models.decoder()
    ids = torch.tensor(tiny_models.tokenizer()(tiny_models.text(TOKENS))["input_ids"])
    return inspection.capture(model, ids)


def emulated_scores(layer: inspection.LayerInputs) -> torch.Tensor:
    share = layer.heads // layer.key.shape[1]
    scores = layer.query[0] @ layer.key[0].repeat_interleave(share, 0).transpose(1, 2) * layer.scale
    return scores if layer.mask is None else scores.masked_fill(~layer.mask[0], float("-inf"))


@pytest.mark.parametrize("kind", ["encoder", "decoder"])
def test_capture_leaves_the_model_as_it_was(kind: str) -> None:
    model = tiny_models.encoder() if kind == "encoder" else tiny_models.decoder()
    ids = torch.tensor(tiny_models.tokenizer()(tiny_models.text(40))["input_ids"])
    before = model.config._attn_implementation
    with torch.inference_mode():
        expected = model(ids[None])[0]
        layers = inspection.capture(model, ids)
        again = model(ids[None])[0]
    assert model.config._attn_implementation == before
    torch.testing.assert_close(again, expected, rtol=0, atol=0)
    assert len(layers) == 2
    assert [tuple(layer.query.shape[:3]) for layer in layers] == [(1, layers[0].heads, 40)] * 2
    assert (layers[0].mask is None) == (kind == "encoder")


@pytest.mark.parametrize("kind", ["encoder", "decoder"])
@pytest.mark.parametrize("pattern", ["2:4", "1:2", "4:8"])
@pytest.mark.parametrize("grouping", ["interleaved", "consecutive"])
def test_comparison_equals_the_emulation(kind: str, pattern: str, grouping: str) -> None:
    for layer in captured(kind):
        scores = emulated_scores(layer)
        dense = torch.softmax(scores, -1)
        kept = emulation.kept(scores, pattern, grouping)
        found = inspection.compare(layer, pattern, grouping)  # type: ignore[arg-type]
        # A weight too small for fp32 counts as not kept; nothing else may differ.
        assert bool((found.kept <= kept).all())
        assert float(dense[kept & ~found.kept].sum()) < 1e-6
        torch.testing.assert_close(found.kept_weight, (dense * kept).sum(-1), rtol=1e-4, atol=1e-5)
        value = layer.value[0].repeat_interleave(layer.heads // layer.key.shape[1], 0)
        exact = dense @ value
        moved = emulation.weights(scores, pattern, grouping) @ value - exact
        torch.testing.assert_close(
            found.output_error, moved.flatten(1).norm(dim=1) / exact.flatten(1).norm(dim=1), rtol=1e-3, atol=1e-5
        )
        assert float(found.output_error.max()) > 0.0


@pytest.mark.parametrize("family", ["Gemma2", "GptOss"])
def test_soft_caps_and_sinks_are_the_models_own(family: str) -> None:
    import transformers

    torch.manual_seed(0)
    experts = {"num_local_experts": 2, "num_experts_per_tok": 1}
    own = {"attn_logit_softcapping": 1.0} if family == "Gemma2" else experts
    config = getattr(transformers, f"{family}Config")(
        vocab_size=64, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        intermediate_size=64, sliding_window=40, initializer_range=0.3, pad_token_id=0, eos_token_id=1,
        **own,
    )  # fmt: skip
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    ids = torch.randint(2, 64, (70,))
    layers = inspection.capture(model, ids)
    model.set_attn_implementation("eager")
    with torch.inference_mode():
        expected = model(ids[None], output_attentions=True).attentions
        for layer, weights in zip(layers, expected, strict=True):
            torch.testing.assert_close(layer.weights("dense", "interleaved"), weights, atol=1e-4, rtol=1e-3)
            assert float(inspection.compare(layer, "dense").kept_weight.min()) == 1.0


def test_dense_loses_nothing() -> None:
    for layer in captured("decoder"):
        found = inspection.compare(layer, "dense")
        assert float(found.output_error.max()) == 0.0
        torch.testing.assert_close(found.kept_weight, torch.ones_like(found.kept_weight))


def test_a_row_that_sees_nothing_keeps_everything_it_has() -> None:
    shape = (1, 1, 8, 16)
    mask = torch.ones(1, 1, 8, 8, dtype=torch.bool)
    mask[..., 3, :] = False
    layer = inspection.LayerInputs(torch.randn(shape), torch.randn(shape), torch.randn(shape), mask, 0.25)
    shares = inspection.kept_weight(layer, "1:2", "consecutive")
    assert shares[0, 3] == 1.0
    assert bool((shares[0, [0, 1, 2, 4]] < 1.0).all())
