"""More Hugging Face families, randomly initialised: with nothing pruned the outputs are the stock ones, and generation
with a cache gives the tokens of generation without one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import dspattn  # noqa: F401 - registers the names
import tiny_models

transformers = pytest.importorskip("transformers", minversion="5.0")

DECODER = dict(
    vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=256, pad_token_id=0,
)  # fmt: skip
ENCODER = {name: DECODER[name] for name in DECODER if name not in ("num_key_value_heads", "pad_token_id")}
SEQ2SEQ = dict(
    vocab_size=97, d_model=64, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
    encoder_ffn_dim=96, decoder_ffn_dim=96, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=2,
)  # fmt: skip
IMAGE = dict(
    hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, image_size=64, patch_size=8
)
LATENT = dict(
    num_key_value_heads=4, n_routed_experts=4, n_group=1, topk_group=1, num_experts_per_tok=2, q_lora_rank=16,
    kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=16, v_head_dim=16, moe_intermediate_size=32,
    first_k_dense_replace=1,
)  # fmt: skip

# Configuration, model, what is peculiar about its attention.
FAMILIES: dict[str, tuple[str, dict[str, Any], str]] = {
    "Qwen2": (
        "Qwen2ForCausalLM",
        DECODER | dict(use_sliding_window=True, sliding_window=20, max_window_layers=1),
        "mixed",
    ),
    "Gemma3Text": ("Gemma3ForCausalLM", DECODER | dict(head_dim=16, sliding_window=20), "windows, own scale"),
    "Phi3": ("Phi3ForCausalLM", DECODER | dict(sliding_window=20), "joint projection"),
    "GPT2": (
        "GPT2LMHeadModel",
        dict(vocab_size=97, n_embd=64, n_layer=2, n_head=4, n_positions=256),
        "heads = kv heads",
    ),
    "DeepseekV3": ("DeepseekV3ForCausalLM", DECODER | LATENT, "values narrower than keys"),
    "Bart": ("BartForConditionalGeneration", SEQ2SEQ | dict(max_position_embeddings=256), "cross attention"),
    "Whisper": (
        "WhisperForConditionalGeneration",
        SEQ2SEQ | dict(num_mel_bins=16, max_source_positions=50, max_target_positions=128),
        "sound",
    ),
    "Roberta": ("RobertaModel", ENCODER, "bidirectional"),
    "ModernBert": (
        "ModernBertModel",
        ENCODER | dict(global_attn_every_n_layers=2, local_attention=20, pad_token_id=0),
        "bidirectional windows",
    ),
    "ViT": ("ViTModel", IMAGE, "no mask"),
}


def inputs_of(family: str) -> dict[str, torch.Tensor]:
    ids = torch.randint(3, 97, (2, 90))
    mask = torch.ones_like(ids)
    mask[1, :9] = 0
    if family == "ViT":
        return {"pixel_values": torch.randn(2, 3, 64, 64)}
    if family == "Whisper":
        return {"input_features": torch.randn(2, 16, 100), "decoder_input_ids": ids}
    if family == "Bart":
        return {"input_ids": ids, "attention_mask": mask.flip(1), "decoder_input_ids": ids[:, :30]}
    return {"input_ids": ids, "attention_mask": mask}


@pytest.mark.parametrize("family", FAMILIES)
def test_family(family: str) -> None:
    tiny_models.skip_if_not_looked_up(family)
    torch.manual_seed(0)
    model_name, changes, _ = FAMILIES[family]
    model = getattr(transformers, model_name)(getattr(transformers, family + "Config")(**changes)).eval()
    inputs = inputs_of(family)

    def outputs(implementation: str) -> torch.Tensor:
        model.set_attn_implementation(implementation)
        with torch.no_grad():
            result = model(**inputs)
        return result.logits if hasattr(result, "logits") else result.last_hidden_state

    stock, dense, pruned = outputs("sdpa"), outputs("dspattn_dense"), outputs("dspattn_1_2_consecutive")
    real = torch.ones(stock.shape[:2], dtype=torch.bool)
    if "attention_mask" in inputs and stock.shape[1] == 90:
        real = inputs["attention_mask"].bool()
    assert (stock - dense).abs()[real].max() < 1e-4
    assert (stock - pruned).abs()[real].max() > 1e-3

    if "CausalLM" in model_name or "LMHead" in model_name:
        same = dict(max_new_tokens=15, do_sample=False, pad_token_id=0, eos_token_id=None)
        with torch.no_grad():
            cached, fresh = model.generate(**inputs, **same), model.generate(**inputs, **same, use_cache=False)
        assert torch.equal(cached, fresh)
