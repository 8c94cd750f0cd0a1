"""What single transformers families need beside small numbers, for tiny_families.py: values of their configurations by
path, and inputs that the names of the forward method's arguments do not tell."""

from __future__ import annotations

from typing import Any

import torch


def _resnet() -> Any:
    """A small backbone in place of one that another package has."""
    from transformers import ResNetConfig

    return ResNetConfig(
        embedding_size=16, hidden_sizes=[16, 16, 32, 32], depths=[1, 1, 1, 1], layer_type="basic",
        out_features=["stage2", "stage3", "stage4"],
    )  # fmt: skip


def _last_of_resnet() -> Any:
    config = _resnet()
    config.out_features = ["stage4"]
    return config


_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16}
_CODEC = {"upsample_groups": 64}

CHANGES: dict[str, dict[str, Any]] = {
    "bailing_hybrid": {"num_group": 1, "n_group": 1, "num_experts_per_tok": 2, "num_experts": 4},
    "bamba": {"attn_layer_indices": [1], **_MAMBA},
    "granitemoehybrid": _MAMBA,
    "zamba2": {
        "n_mamba_heads": 8, "mamba_headdim": 16, "attention_hidden_size": 128, "attention_head_dim": 32,
        "layers_block_type": ["linear_attention", "hybrid"], "hybrid_layer_ids": [1],
    },
    "mamba2": {"num_heads": 8, "head_dim": 16},
    **{name: {"head_dim": 16} for name in ("hunyuan_v1_dense", "hunyuan_v1_moe", "ministral", "hunyuan_vl_text")},
    "hunyuan_vl": {"text_config.head_dim": 16},
    "nemotron": {"head_dim": 16, "num_key_value_heads": 4},
    "esm": {"vocab_size": 40, "pad_token_id": 1},
    "luke": {"entity_vocab_size": 40},
    "deepseek_v2": {"topk_method": "greedy", "num_experts_per_tok": 2},
    "lilt": {"channel_shrink_ratio": 4, "hidden_size": 96},
    "reformer": {"axial_pos_embds_dim": (16, 48)},
    "layoutlmv3": {"coordinate_size": 8, "shape_size": 16},
    "xmod": {"default_language": "en_XX"},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "chameleon": {"vocabulary_map": {"<image>": 4}},
    "emu3": {"vocabulary_map": {"<image>": 4, "<|extra_200|>": 5}},
    "cohere_compass_text": {
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}},
        "layer_types": ["full_attention", "full_attention"],
    },
    "cohere_compass": {
        "text_config.rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}},
        "text_config.layer_types": ["full_attention", "full_attention"],
    },
    "csm": {"codec_config.upsample_groups": 64},
    "mimi": _CODEC,
    "mimi_decoder": _CODEC,
    "pocket_tts_audio_tokenizer": _CODEC,
    "pocket_tts_audio_tokenizer_decoder": _CODEC,
    "dbrx": {"attn_config.rope_theta": 10000.0, "attn_config.clip_qkv": 8.0},
    "deepseek_ocr2": {"text_config.mlp_layer_types": ["dense", "sparse"]},
    **{
        name: {"backbone_config": _last_of_resnet}
        for name in ("conditional_detr", "dab-detr", "detr", "table-transformer")
    },
    "deformable_detr": {"backbone_config": _resnet},
    "efficientnet": {"hidden_dim": 2560},
    "align": {"vision_config.hidden_dim": 2560},
    "encodec": {"codebook_dim": 64},
    "kimi_linear": {"num_experts_per_token": 2},
    "mistral4": {"qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "qk_head_dim": 16},
    "moonshine_streaming": {"num_key_value_heads": 4},
    "swinv2": {"window_size": 2, "depths": [1, 1], "num_heads": [2, 4], "embed_dim": 32, "num_layers": 2,
               "hidden_size": 64, "out_features": ["stage2"], "stage_names": ["stem", "stage1", "stage2"],
               "image_size": 32},
    "swin": {"window_size": 2, "depths": [1, 1], "num_heads": [2, 4], "embed_dim": 32, "num_layers": 2,
             "hidden_size": 64, "out_features": ["stage2"], "stage_names": ["stem", "stage1", "stage2"],
             "image_size": 32},
    "wav2vec2-bert": {"feature_projection_input_dim": 16},
    "zamba": {"attention_hidden_size": 128, "attention_head_dim": 32},
    "qwen4_exp_text": {
        "indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 16,
        "indexer_compress_ratio": 4,
    },
    "qwen4_exp": {
        "text_config.indexer_n_heads": 4, "text_config.indexer_kv_heads": 1, "text_config.indexer_head_dim": 16,
        "text_config.indexer_budget": 16, "text_config.indexer_compress_ratio": 4,
    },
    **{
        name: {path + "hidden_size": 96, path + "image_size": [64, 64]}
        for name, path in (("sam2_hiera_det_model", ""), ("sam2_vision_model", "backbone_config."))
    },
    "t5gemma2_encoder": {"text_config.dropout_rate": 0.0},
    "gemma3n_text": {"num_kv_shared_layers": 0, "vocab_size_per_layer_input": 256,
                     "intermediate_size": [64, 64], "activation_sparsity_pattern": [0.0, 0.0]},
    **{name: {"text_config.projection_size": 64} for name in ("siglip", "siglip2")},
    "owlv2": {"text_config.max_position_embeddings": 24},
    "owlvit": {"text_config.max_position_embeddings": 24},
    "aimv2": {"vision_config.image_size": 56},
    **{name: {"vision_start_token_id": 3} for name in ("qwen2_5_omni_thinker", "qwen3_omni_moe_thinker")},
    "t5gemma": {"decoder.cross_attention_hidden_size": 64},
    "step3p7": {"text_config.sliding_window": 20},
    **{
        name: {"context_length": 16, "prediction_length": 4}
        for name in ("autoformer", "informer", "time_series_transformer")
    },
}  # fmt: skip

_IDS = torch.arange(48).view(2, 24) * 7 % 200 + 5

INPUTS: dict[str, dict[str, Any]] = {
    "blip_2_qformer": {"query_embeds": lambda random: random(2, 24, 64),
                       "encoder_hidden_states": lambda random: random(2, 30, 64)},
    "decision_transformer": {
        "states": lambda random: random(2, 24, 17), "actions": lambda random: random(2, 24, 4),
        "rewards": lambda random: random(2, 24, 1), "returns_to_go": lambda random: random(2, 24, 1),
        "timesteps": torch.arange(24).expand(2, 24), "attention_mask": torch.ones(2, 24),
    },
    "kyutai_speech_to_text": {"input_ids": _IDS[:, :, None].repeat(1, 1, 33) % 20},
    "sam3": {"pixel_values": lambda random: random(1, 3, 56, 56), "input_ids": _IDS[:1]},
    "idefics": {"pixel_values": lambda random: random(2, 1, 3, 56, 56), "input_ids": _IDS,
                "image_attention_mask": torch.ones(2, 24, 1, dtype=torch.long), "use_cache": False},
    **{
        name: {"pixel_values": lambda random: random(32, 1176), "grid_thw": torch.tensor([[1, 4, 4], [1, 4, 4]])}
        for name in ("muse_glimmer_vision", "muse_spark_vision")
    },
    **{
        name: {"input_features": lambda random: random(2, 64, 64)}
        for name in ("granite_speech5_encoder", "granite_speech5_ctc")
    },
    "audioflamingo3_encoder": {"input_features": lambda random: random(2, 16, 128),
                               "input_features_mask": torch.ones(2, 128, dtype=torch.long)},
    "siglip2_vision_model": {
        "pixel_values": lambda random: random(2, 16, 768), "pixel_attention_mask": torch.ones(2, 16, dtype=torch.long),
        "spatial_shapes": torch.tensor([[4, 4], [4, 4]]),
    },
    "siglip2": {
        "input_ids": _IDS, "pixel_values": lambda random: random(2, 16, 768),
        "pixel_attention_mask": torch.ones(2, 16, dtype=torch.long), "spatial_shapes": torch.tensor([[4, 4], [4, 4]]),
    },
    "audio-spectrogram-transformer": {"input_values": lambda random: random(2, 1024, 16)},
}  # fmt: skip
