"""rest="mean": against the contract in plain PyTorch, wherever a user meets it, and where it must refuse."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

import contract
import dspattn
import dspattn.parallel

PADDED = torch.ones(2, 1, 1, 300, dtype=torch.bool)
PADDED[1, ..., :40] = False


def tensors(n_q: int = 300, n_k: int = 300) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return (
        contract.integers(2, 4, n_q, 16),
        contract.integers(2, 2, n_k, 16),
        torch.randn(2, 2, n_k, 16),
    )


@pytest.mark.parametrize("pattern, grouping", [("2:4", "interleaved"), ("1:2", "consecutive"), ("3:8", "interleaved")])
@pytest.mark.parametrize(
    "options, diagonal",
    [
        ({}, {}),
        ({"attn_mask": PADDED}, {}),
        ({"is_causal": True, "attn_mask": PADDED}, {"causal": True}),
        ({"window": (150, 3)}, {"window": (150, 3)}),
    ],
    ids=["full", "padded", "causal and padded", "window"],
)
def test_against_the_contract(pattern: str, grouping: Any, options: dict[str, Any], diagonal: dict[str, Any]) -> None:
    q, k, v = tensors()
    interval = contract.visible(300, 300, **diagonal)
    seen = interval & options.get("attn_mask", torch.tensor(True))
    out, lse = dspattn.attention(
        q, k, v, pattern=pattern, grouping=grouping, rest="mean", enable_gqa=True, return_lse=True, **options
    )
    expected, expected_lse = contract.attention(q, k, v, pattern, grouping, mask=seen, rest="mean", interval=interval)
    rows = seen.any(-1).expand(2, 4, 300)
    torch.testing.assert_close(out.double()[rows], expected[rows], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(lse.double()[rows], expected_lse[rows], atol=1e-5, rtol=1e-5)
    dense = dspattn.attention(q, k, v, pattern="dense", enable_gqa=True, return_lse=True, **options)[1]
    torch.testing.assert_close(lse, dense)


def test_packed_batches_are_their_sequences() -> None:
    q, k, v = (t[0].transpose(0, 1) for t in tensors())
    starts = [0, 130, 130, 300]
    cu = torch.tensor(starts, dtype=torch.int32)
    packed = dspattn.varlen_attention(q, k, v, cu, cu, is_causal=True, rest="mean")
    for begin, end in itertools.pairwise(starts):
        alone = [t[begin:end].transpose(0, 1).unsqueeze(0) for t in (q, k, v)]
        expected = dspattn.attention(*alone, is_causal=True, enable_gqa=True, rest="mean")[0].transpose(0, 1)
        assert torch.equal(packed[begin:end], expected)


def test_weights_are_what_the_values_are_multiplied_with() -> None:
    q, k, v = tensors(20)
    options: dict[str, Any] = {"rest": "mean", "enable_gqa": True}
    weights = dspattn.attention_weights(q, k, **options)
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 4, 20))
    expected = dspattn.attention(q, k, v, **options)
    torch.testing.assert_close(weights @ v.repeat_interleave(2, 1), expected, atol=1e-5, rtol=1e-5)


def test_it_is_closer_to_dense_where_every_key_counts() -> None:
    torch.manual_seed(1)
    q, k, v = torch.randn(3, 1, 2, 512, 32).mul(0.5).unbind(0)
    v = v + 1
    dense = dspattn.attention(q, k, v, pattern="dense")
    errors = [(dspattn.attention(q, k, v, rest=rest) - dense).norm() for rest in ("drop", "mean")]
    assert errors[1] < 0.7 * errors[0]


def test_what_it_refuses() -> None:
    q, k, v = tensors(8, 8)
    with pytest.raises(dspattn.DspattnError, match=r"attn_mask.shape\[2\]: expected 1 with rest = mean"):
        dspattn.attention(q, k, v, torch.ones(8, 8, dtype=torch.bool), enable_gqa=True, rest="mean")
    with pytest.raises(dspattn.DspattnError, match='rest: expected "drop" or "mean"'):
        dspattn.attention(q, k, v, enable_gqa=True, rest="median")  # type: ignore[call-overload]
    out = dspattn.attention(q.requires_grad_(), k, v, enable_gqa=True, rest="mean")
    with pytest.raises(dspattn.DspattnError, match='rest: expected "drop" for gradients'):
        out.sum().backward()


def test_cut_over_one_rank() -> None:
    """What several ranks do (test_parallel.py), alone: results of the kept keys, all scores' LSE, sums by block."""
    q, k, v = tensors(300, 420)
    cases: list[dict[str, Any]] = [
        {}, {"is_causal": True}, {"is_causal": True, "alignment": "bottom_right"}, {"window": (150, 3)},
        {"window": (20, 0)}, {"key_lengths": torch.tensor([420, 77])}, {"is_causal": True, "offset": -40},
        {"attn_mask": torch.arange(420).ge(140).view(1, 1, 1, -1)},
        {"attn_mask": torch.rand(2, 4, 1, 420, generator=torch.Generator().manual_seed(1)) < 0.3, "is_causal": True},
        {"attn_bias": torch.zeros(1, 1, 1, 420).index_fill(3, torch.arange(130), float("-inf"))},
    ]  # fmt: skip
    v[:, :, 410:] = float("nan")  # of keys that most cases hide
    for options in cases:
        wanted, wanted_lse = dspattn.attention(q, k, v, enable_gqa=True, rest="mean", return_lse=True, **options)
        for method in ("ring", "all_to_all"):
            out, lse = dspattn.parallel.attention(
                q, k, v, enable_gqa=True, rest="mean", return_lse=True, method=method, **options
            )
            torch.testing.assert_close(out, wanted, atol=1e-5, rtol=1e-5, equal_nan=True)
            torch.testing.assert_close(lse, wanted_lse, atol=1e-5, rtol=1e-5)
            if method == "ring" and "is_causal" in options:
                assert bool(wanted.isfinite().any())
    out = dspattn.parallel.attention(q.requires_grad_(), k, v, enable_gqa=True, rest="mean")
    with pytest.raises(dspattn.DspattnError, match='rest: expected "drop" for gradients'):
        out.sum().backward()
    with pytest.raises(dspattn.DspattnError, match=r'attn_mask: expected one row for rest="mean"'):
        dspattn.parallel.attention(q, k, v, torch.ones(300, 420) > 0, enable_gqa=True, rest="mean")


def test_compiled_and_mapped() -> None:
    q, k, v = tensors(40, 140)

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return dspattn.attention(q, k, v, enable_gqa=True, rest="mean", is_causal=True)

    expected = run(q, k, v)
    assert torch.equal(torch.compile(run, backend="aot_eager", fullgraph=True)(q, k, v), expected)
    mapped = torch.vmap(run)(*(t.unsqueeze(1) for t in (q, k, v)))
    assert torch.equal(mapped.squeeze(1), expected)


def test_use_and_modules() -> None:
    q, k, v = (t[:, :2] for t in tensors())
    with dspattn.use("2:4", rest="mean") as switched:
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert torch.equal(out, dspattn.attention(q, k, v, is_causal=True, rest="mean"))
    assert "2:4 interleaved, rest mean" in switched.report()

    torch.manual_seed(2)
    layer = torch.nn.TransformerEncoderLayer(32, 2, 64, batch_first=True).eval()
    x = torch.randn(2, 200, 32)
    causal = torch.nn.Transformer.generate_square_subsequent_mask(200)
    padding = torch.zeros(2, 200)
    padding[1, 150:] = float("-inf")
    with torch.no_grad():
        dense = layer(x, src_mask=causal, src_key_padding_mask=padding, is_causal=True)
        report = dspattn.apply(layer, "2:4", example=x, rest="mean")
        assert "rest mean" in str(report)
        mean = layer(x, src_mask=causal, src_key_padding_mask=padding, is_causal=True)
        dspattn.restore(layer)
        dspattn.apply(layer, "2:4", example=x)
        drop = layer(x, src_mask=causal, src_key_padding_mask=padding, is_causal=True)
    seen = padding == 0
    assert 0 < (mean - dense)[seen].norm() < (drop - dense)[seen].norm()


transformers = pytest.importorskip("transformers", minversion="5.0")
VOCABULARY = 61


def decoder(**changes: Any) -> Any:
    torch.manual_seed(0)
    config = dict(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, sliding_window=150, max_position_embeddings=512, initializer_range=0.3,
    )  # fmt: skip
    return transformers.MistralForCausalLM(transformers.MistralConfig(**(config | changes))).eval()


def text(n: int, pad: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(3)
    ids = torch.randint(1, VOCABULARY, (2, n))
    mask = torch.ones_like(ids)
    mask[1, :pad] = 0
    return {"input_ids": ids, "attention_mask": mask}


@pytest.mark.parametrize("window", [None, 150])
@pytest.mark.parametrize("name", ["dspattn_2_4_mean", "dspattn_1_2_consecutive_mean"])
def test_generation_does_not_depend_on_the_cache(name: str, window: int | None) -> None:
    model = decoder(sliding_window=window)
    model.set_attn_implementation(name)
    same = dict(max_new_tokens=6, do_sample=False, pad_token_id=0, eos_token_id=None, output_logits=True,
                return_dict_in_generate=True, disable_compile=True)  # fmt: skip
    inputs = text(300, 40)
    with torch.no_grad():
        fresh = model.generate(**inputs, **same, use_cache=False)
        for cache in ("dynamic", *(["static"] if window is None else [])):
            cached = model.generate(**inputs, **same, cache_implementation=cache)
            assert torch.equal(cached.sequences, fresh.sequences)
            torch.testing.assert_close(torch.stack(cached.logits), torch.stack(fresh.logits), atol=1e-3, rtol=1e-3)


def test_a_padded_text_is_pruned_with_the_mean() -> None:
    model = decoder(sliding_window=None)
    inputs = text(300, 40)
    found = {}
    with torch.no_grad():
        for name in ("sdpa", "dspattn_2_4", "dspattn_2_4_mean"):
            model.set_attn_implementation(name)
            found[name] = model(**inputs).logits[inputs["attention_mask"] == 1]
        applied = decoder(sliding_window=None)
        dspattn.apply(applied, "2:4", example=inputs, rest="mean")
        again = applied(**inputs).logits[inputs["attention_mask"] == 1]
    assert not torch.equal(found["dspattn_2_4_mean"], found["dspattn_2_4"])
    assert (found["dspattn_2_4_mean"] - found["sdpa"]).norm() < (found["dspattn_2_4"] - found["sdpa"]).norm()
    assert torch.equal(again, found["dspattn_2_4_mean"])


def test_compiled_models_with_padding_and_a_static_cache() -> None:
    model = decoder(sliding_window=None)
    model.set_attn_implementation("dspattn_2_4_mean")
    inputs = text(140, 20)
    compiled = torch.compile(model, backend="eager", fullgraph=True)

    def next_logits(decode: Any) -> torch.Tensor:
        cache = transformers.StaticCache(config=model.config, max_cache_len=160)
        model(**inputs, past_key_values=cache)
        mask = torch.nn.functional.pad(inputs["attention_mask"], (0, 1), value=1)
        return decode(input_ids=torch.full((2, 1), 7), attention_mask=mask, past_key_values=cache).logits

    with torch.no_grad():
        assert torch.equal(compiled(**inputs, use_cache=False).logits, model(**inputs, use_cache=False).logits)
        assert torch.equal(next_logits(compiled), next_logits(model))
    torch._dynamo.reset()


def test_masks_of_transformers_that_are_no_window_are_refused() -> None:
    model = decoder(sliding_window=None)
    model.set_attn_implementation("dspattn_2_4_mean")
    ids = text(20, 0)["input_ids"][:1]
    positions = torch.cat([torch.arange(12), torch.arange(8)]).unsqueeze(0)
    with pytest.raises(dspattn.DspattnError, match="expected a mask that is causal, full or a sliding"):
        model(ids, position_ids=positions, use_cache=False)
    with pytest.raises(dspattn.DspattnError, match="left_padding: expected False"):
        dspattn.integrations.huggingface.register_pattern("2:4", rest="mean", left_padding=True)
