"""Hugging Face models, randomly initialised, of families that use attention differently; nobody here wrote them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import dspattn
import tiny_models

transformers = pytest.importorskip("transformers", minversion="5.0")

VOCABULARY = 97
PRUNED = ["dspattn_2_4", "dspattn_1_2", "dspattn_2_4_consecutive", "dspattn_1_2_consecutive"]


def llama_like(**changes: Any) -> Any:
    """Decoder with grouped-query attention and a sliding window shorter than the texts."""
    config = dict(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=8,
        num_key_value_heads=2, sliding_window=40, max_position_embeddings=512, initializer_range=0.3,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.MistralForCausalLM(transformers.MistralConfig(**(config | changes))).eval()


def t5_like() -> Any:
    """Encoder and decoder with a learned bias by relative position, and cross attention."""
    tiny_models.skip_if_not_looked_up("T5")
    torch.manual_seed(0)
    config = transformers.T5Config(
        vocab_size=VOCABULARY, d_model=64, d_kv=16, num_heads=4, num_layers=2, d_ff=96, decoder_start_token_id=0,
        dropout_rate=0.0,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config).eval()


def bert_like() -> Any:
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=VOCABULARY, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96
    )
    return transformers.BertForMaskedLM(config).eval()


def text(batch: int = 2, n: int = 90, pad: int = 13, left: bool = True) -> dict[str, torch.Tensor]:
    torch.manual_seed(3)
    ids = torch.randint(1, VOCABULARY, (batch, n))
    mask = torch.ones_like(ids)
    mask[-1, :pad] = 0
    return {"input_ids": ids, "attention_mask": mask if left else mask.flip(1)}


def logits(model: Any, implementation: str, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    model.set_attn_implementation(implementation)
    with torch.no_grad():
        return model(**inputs).logits


@pytest.mark.parametrize("family", ["llama", "llama without window", "t5", "bert"])
def test_dense_logits_match_the_stock_implementation(family: str) -> None:
    model, inputs = {
        "llama": lambda: (llama_like(), text()),
        "llama without window": lambda: (llama_like(sliding_window=None), text(pad=0)),
        "t5": lambda: (t5_like(), text(left=False) | {"decoder_input_ids": text(n=30)["input_ids"]}),
        "bert": lambda: (bert_like(), text(left=False)),
    }[family]()
    stock, ours = logits(model, "sdpa", inputs), logits(model, "dspattn_dense", inputs)
    real = torch.ones(ours.shape[:2]) if family == "t5" else inputs["attention_mask"]
    assert ((stock - ours) * real.unsqueeze(-1)).abs().max() < 1e-4
    pruned = logits(model, "dspattn_1_2_consecutive", inputs)
    assert ((stock - pruned) * real.unsqueeze(-1)).abs().max() > 1e-3, "the pruned pattern changes the result"


@pytest.mark.parametrize("implementation", PRUNED)
@pytest.mark.parametrize("family", ["llama", "llama without window", "t5"])
def test_generation_does_not_depend_on_the_cache(family: str, implementation: str) -> None:
    model = {"llama": llama_like, "llama without window": lambda: llama_like(sliding_window=None), "t5": t5_like}[
        family
    ]()
    model.set_attn_implementation(implementation)
    inputs = text(n=70, left=family != "t5")
    same = dict(max_new_tokens=40, do_sample=False, pad_token_id=0, eos_token_id=None, output_logits=True,
                return_dict_in_generate=True)  # fmt: skip
    with torch.no_grad():
        cached = model.generate(**inputs, **same, use_cache=True)
        fresh = model.generate(**inputs, **same, use_cache=False)
    assert torch.equal(cached.sequences, fresh.sequences)
    torch.testing.assert_close(torch.stack(cached.logits), torch.stack(fresh.logits), atol=1e-3, rtol=1e-3)


def test_a_window_cache_would_change_the_groups_without_the_shift(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison above can fail: counting groups from the first cached key gives other logits."""
    from dspattn.integrations import huggingface

    monkeypatch.setattr(huggingface, "group_period", lambda *names: 1)
    huggingface.register_pattern("1:2", "consecutive")
    try:
        with pytest.raises(AssertionError):
            test_generation_does_not_depend_on_the_cache("llama", "dspattn_1_2_consecutive")
    finally:
        monkeypatch.undo()
        huggingface.register()


def test_static_cache() -> None:
    model = llama_like(sliding_window=None)
    model.set_attn_implementation("dspattn_2_4")
    inputs = text(n=70)
    same = dict(max_new_tokens=20, do_sample=False, pad_token_id=0, eos_token_id=None, disable_compile=True)
    with torch.no_grad():
        static = model.generate(**inputs, **same, cache_implementation="static")
        fresh = model.generate(**inputs, **same, use_cache=False)
    assert torch.equal(static, fresh)


def test_padding_does_not_leak() -> None:
    model = llama_like()
    inputs = text()
    for implementation in ("dspattn_2_4", "dspattn_dense"):
        one = logits(model, implementation, inputs)
        inputs["input_ids"][-1, :13] = 5  # other tokens where the mask is 0
        two = logits(model, implementation, inputs)
        assert torch.equal(one[0], two[0])
        assert torch.equal(one[-1, 13:], two[-1, 13:])


def test_training_through_the_model() -> None:
    model = llama_like().train()
    inputs = text(n=50, pad=0)
    gradients = []
    for implementation in ("sdpa", "dspattn_dense"):
        model.set_attn_implementation(implementation)
        model.zero_grad()
        model(**inputs, labels=inputs["input_ids"]).loss.backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-3)


def test_compiled_model() -> None:
    model, inputs = llama_like(), text()
    eager = logits(model, "dspattn_1_2_consecutive", inputs)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        torch.testing.assert_close(compiled(**inputs).logits, eager)


def test_packed_sequences_by_cumulative_lengths() -> None:
    from dspattn.integrations.huggingface import make_attention

    attend = make_attention("2:4", "interleaved")
    q, k, v = torch.randn(1, 8, 50, 16), torch.randn(1, 2, 50, 16), torch.randn(1, 2, 50, 16)
    lengths = torch.tensor([0, 20, 50])
    module = torch.nn.Module()
    out, _ = attend(
        module, q, k, v, None, cu_seq_lens_q=lengths, cu_seq_lens_k=lengths, max_length_q=30, max_length_k=30
    )
    for start, end in ((0, 20), (20, 50)):
        one, _ = attend(module, q[:, :, start:end], k[:, :, start:end], v[:, :, start:end], None)
        torch.testing.assert_close(out[:, start:end], one)


@pytest.mark.parametrize("name", ["dspattn_2_4", "dspattn_2_4_mean"])
@pytest.mark.parametrize("window", [None, 40])
def test_a_models_packed_sequences_are_those_alone(name: str, window: int | None) -> None:
    """Positions that begin anew make transformers write a mask, beside which the lengths count."""
    torch.manual_seed(0)
    config = transformers.MistralConfig(
        vocab_size=64, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=64, sliding_window=window, initializer_range=0.3,
    )  # fmt: skip
    model = transformers.MistralForCausalLM(config).eval()
    model.set_attn_implementation(name)
    ids, lengths = torch.randint(0, 64, (1, 220)), torch.tensor([0, 90, 220], dtype=torch.int32)
    packed = {
        "position_ids": torch.cat([torch.arange(90), torch.arange(130)])[None], "cu_seq_lens_q": lengths,
        "cu_seq_lens_k": lengths, "max_length_q": 130, "max_length_k": 130, "use_cache": False,
    }  # fmt: skip
    with torch.no_grad():
        alone = torch.cat([model(part, use_cache=False).logits for part in (ids[:, :90], ids[:, 90:])], 1)
        torch.testing.assert_close(model(ids, **packed).logits, alone, atol=1e-4, rtol=1e-4)
        del packed["position_ids"]  # the lengths alone keep sequences apart, too
        torch.testing.assert_close(model(ids, **packed).logits[:, :90], alone[:, :90], atol=1e-4, rtol=1e-4)
        other = torch.cat([ids[:, :90].flip(1), ids[:, 90:]], 1)
        assert torch.equal(model(ids, **packed).logits[:, 90:], model(other, **packed).logits[:, 90:])
        with pytest.raises(dspattn.DspattnError, match="cu_seq_lens_q: expected none beside an attention_mask of more"):
            model(ids, attention_mask=(torch.arange(220) > 3)[None], **packed)


def test_packed_sequences_in_compiled_layers_and_not_in_a_compiled_model() -> None:
    """Layers get a mask that was made outside of them; in a compiled model nobody knows what its mask says."""
    model = llama_like()
    model.set_attn_implementation("dspattn_2_4")
    ids, lengths = torch.randint(0, 64, (1, 220)), torch.tensor([0, 90, 220], dtype=torch.int32)
    packed = {
        "position_ids": torch.cat([torch.arange(90), torch.arange(130)])[None], "cu_seq_lens_q": lengths,
        "cu_seq_lens_k": lengths, "max_length_q": 130, "max_length_k": 130, "use_cache": False,
    }  # fmt: skip
    with torch.no_grad():
        wanted = model(ids, **packed).logits
        for fullgraph in (True, False):
            torch._dynamo.reset()
            compiled = torch.compile(model, backend="eager", fullgraph=fullgraph)
            with pytest.raises(dspattn.DspattnError, match=r"compiled code made \(compile the model's layers"):
                compiled(ids, **packed)
        for layer in model.model.layers:
            layer.compile(backend="aot_eager")
        torch.testing.assert_close(model(ids, **packed).logits, wanted)


def test_output_attentions() -> None:
    from dspattn.integrations.huggingface import make_attention

    attend = make_attention("2:4", "consecutive")
    q, k, v = torch.randn(1, 8, 8, 16), torch.randn(1, 2, 8, 16), torch.randn(1, 2, 8, 16)
    out, weights = attend(torch.nn.Module(), q, k, v, None, is_causal=False, output_attentions=True)
    assert weights is not None and weights.shape == (1, 8, 8, 8)
    torch.testing.assert_close((weights @ v.repeat_interleave(4, 1)).transpose(1, 2), out, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    "argument,given",
    [("cache", object()), ("indices", torch.zeros(3)), ("invented_by_a_later_model", True)],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_what_is_not_supported_raises(argument: str, given: Any) -> None:
    from dspattn.integrations.huggingface import make_attention

    attend = make_attention("2:4", "interleaved")
    q = torch.randn(1, 8, 8, 16)
    with pytest.raises(dspattn.DspattnError, match=argument):
        attend(torch.nn.Module(), q, q, q, None, **{argument: given})
    attend(torch.nn.Module(), q, q, q, None, softcap=None, s_aux=None, use_cache=True, position_ids=torch.arange(8))


def test_use_and_the_names_agree() -> None:
    model, inputs = llama_like(), text()
    by_name = logits(model, "dspattn_2_4", inputs)
    with dspattn.use("2:4") as switched:
        by_block = logits(model, "sdpa", inputs)
    assert switched.served == 3
    torch.testing.assert_close(by_name[0], by_block[0], atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(by_name[1, 13:], by_block[1, 13:], atol=1e-5, rtol=1e-4)


def test_other_patterns_can_be_registered() -> None:
    from dspattn.integrations.huggingface import register_pattern

    model, inputs = llama_like(), text()
    assert not torch.allclose(logits(model, register_pattern("1:8"), inputs), logits(model, "dspattn_dense", inputs))


TINY = dict(vocab_size=VOCABULARY, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96)


@pytest.mark.parametrize(
    "family,changes",
    [
        ("GPT2", dict(vocab_size=VOCABULARY, n_embd=64, n_layer=2, n_head=4)),
        ("StableLm", TINY | dict(num_key_value_heads=4)),
        ("Mistral", TINY | dict(num_key_value_heads=2)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_output_attentions_of_a_model(family: str, changes: dict[str, Any]) -> None:
    """A model that records what its attention modules return gets the weights that eager attention gives."""
    model = getattr(transformers, family + "Model")(getattr(transformers, family + "Config")(**changes)).eval()
    ids = text(n=30, pad=0)["input_ids"]
    with torch.no_grad():
        model.set_attn_implementation("eager")
        eager = model(ids, output_attentions=True).attentions
        model.set_attn_implementation("dspattn_dense")
        ours = model(ids, output_attentions=True).attentions
        assert model(ids).attentions is None
    assert len(ours) == len(eager) == 2
    for a, b in zip(ours, eager, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("grouping", ["interleaved", "consecutive"])
def test_a_left_padded_text_keeps_the_keys_it_keeps_alone(grouping: Any) -> None:
    from dspattn.integrations.huggingface import implementation_name, register_pattern

    # Windows of 40 keys hold no two of an interleaved group; with them the cache drops keys, too.
    model, padded = llama_like(sliding_window=None if grouping == "interleaved" else 40), text(n=150, pad=13)
    alone = {"input_ids": padded["input_ids"][1:, 13:]}
    name = register_pattern("1:2", grouping, left_padding=True)
    assert name == implementation_name("1:2", grouping) + "_left_padding"
    wanted = logits(model, implementation_name("1:2", grouping), alone)[0]
    torch.testing.assert_close(logits(model, name, padded)[1, 13:], wanted, atol=1e-4, rtol=1e-4)
    plain = logits(model, implementation_name("1:2", grouping), padded)[1, 13:]
    assert (plain - wanted).abs().max() > 1e-3, "without the option the padding counts as keys"

    same = dict(max_new_tokens=20, do_sample=False, pad_token_id=0, eos_token_id=None)
    model.set_attn_implementation(name)
    with torch.no_grad():
        assert torch.equal(model.generate(**padded, **same)[1, 13:], model.generate(**alone, **same)[0])


def test_a_part_of_a_model_by_its_configuration() -> None:
    config = transformers.VisionTextDualEncoderConfig.from_vision_text_configs(
        transformers.ViTConfig(**(TINY | dict(image_size=32, patch_size=8))),
        transformers.MPNetConfig(**TINY),
        projection_dim=16,
    )
    model = transformers.VisionTextDualEncoderModel(config)
    with pytest.raises(dspattn.DspattnError, match="MPNet"):
        model.set_attn_implementation("dspattn_2_4")
    with pytest.raises(dspattn.DspattnError, match="MPNetModel can take"):
        model.set_attn_implementation({"text_config": "dspattn_2_4"})
    model.set_attn_implementation({"vision_config": "dspattn_2_4"})
    assert model.vision_model.config._attn_implementation == "dspattn_2_4"


def test_bloom_at_load_and_at_set(tmp_path: Any) -> None:
    config = transformers.BloomConfig(vocab_size=VOCABULARY, hidden_size=32, n_layer=1, n_head=2)
    model = transformers.BloomForCausalLM(config)
    model.save_pretrained(tmp_path)
    reason = r"attn_implementation: expected one that BloomForCausalLM can take, got .*its own code.*eager"
    with pytest.raises(dspattn.DspattnError, match=reason):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="dspattn_2_4")
    with pytest.raises(dspattn.DspattnError, match=reason):
        model.set_attn_implementation("dspattn_2_4")
    transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")


def test_biases_of_many_queries_are_refused_by_name_with_the_mean() -> None:
    model = t5_like()
    model.set_attn_implementation("dspattn_2_4_mean")
    with pytest.raises(dspattn.DspattnError, match="and no bias of several queries"):
        model(input_ids=torch.arange(3, 20)[None], decoder_input_ids=torch.zeros(1, 1, dtype=torch.long))
