"""What single transformers families need beside small numbers, for tiny_families.py: values of their configurations by
path, and inputs that the names of the forward method's arguments do not tell."""

from __future__ import annotations

import importlib
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
_PP_BACKBONE = {  # the default is one that reads lines of text, which keeps their length
    "backbone_config.out_features": [f"stage{i}" for i in range(1, 5)], "backbone_config.depths": [1, 1, 1, 1],
    "backbone_config.block_configs": [
        [[3, 96, 96, 1, True]], [[3, 96, 96, 2, False]], [[3, 96, 192, 2, False]], [[3, 192, 384, 2, False]],
    ],
}  # fmt: skip
_PP_OCR = {
    name: [3, 1, 1]
    for name in (
        "reduce_channel", "return_channel",
        *(
            f"{kind}_{ratio}ratio"
            for kind in ("vertical_long_to_small_conv", "horizontal_small_to_long_conv", "symmetric_conv_long")
            for ratio in ("long", "mid", "short")
        ),
    )
}  # fmt: skip
_VIBEVOICE = {"num_filters": 4, "depths": (1, 1, 1, 1, 1, 1, 1)}

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
    "blip-2": {"image_token_index": 3},
    "instructblip": {"image_token_index": 3},
    "instructblipvideo": {"video_token_index": 3},
    "blt": {
        "global_config.hidden_size": 128, "global_config.head_dim": 32, "encoder_config.hidden_size_global": 128,
        "decoder_config.hidden_size_global": 128, "encoder_hash_byte_group_vocab": 500,
    },
    "depth_pro": {
        "patch_size": 56, "intermediate_hook_ids": [1, 0], "fusion_hidden_size": 32,
        "scaled_images_feature_dims": [32, 32, 16], "intermediate_feature_dims": [32, 32],
    },
    "ernie4_5_vl_moe": {
        "text_config.rope_parameters": {"rope_type": "default", "rope_theta": 5e5, "mrope_section": [3, 3, 2]},
        "text_config.moe_intermediate_size": [64, 32],
    },
    "diffusion_gemma": {
        "text_config.num_experts": 4, "text_config.top_k_experts": 2, "text_config.moe_intermediate_size": 64,
    },
    "granite4_vision": {
        "downsample_rate": "2/4", "deepstack_layer_map": [[0, 0]], "spatial_target_layers": [1, 1, 1, 1],
        "image_token_index": 3,
    },
    "nemotron3_diarization": {"head_config.audio_hidden_size": 64},
    "nemotron3_5_transcribe_audio": {"diarization_config.head_config.audio_hidden_size": 64},
    **{
        name: {"semantic_model_config.feature_projection_input_dim": 16, "quantization_dim": 128}
        for name in ("neucodec", "xcodec2")
    },
    "pp_ocrv6_small_det": {"layer_list_out_channels": (96, 96, 192, 384), **_PP_BACKBONE},
    "sam2": {
        "vision_config.backbone_config.hidden_size": 96, "vision_config.backbone_config.image_size": [64, 64],
        "vision_config.backbone_feature_sizes": [[16, 16], [8, 8], [4, 4]],
    },
    "sam3_tracker": {"vision_config.backbone_feature_sizes": [[16, 16], [8, 8], [4, 4]]},
    "sapiens2": {"num_key_value_heads_per_layer": [4, 2]},
    "vibevoice_acoustic_tokenizer": _VIBEVOICE,
    "vibevoice_acoustic_tokenizer_encoder": _VIBEVOICE,
    "vibevoice_acoustic_tokenizer_decoder": _VIBEVOICE,
    "vibevoice": {f"{part}.{k}": v for part in ("audio_config", "semantic_model_config") for k, v in _VIBEVOICE.items()},
    "vibevoice_asr": {
        f"{part}.{k}": v for part in ("acoustic_tokenizer_encoder_config", "semantic_tokenizer_encoder_config")
        for k, v in _VIBEVOICE.items()
    },
    "xclip": {
        "vision_config.mit_hidden_size": 64, "vision_config.mit_intermediate_size": 64,
        "vision_config.mit_num_attention_heads": 4,
    },
    "xcodec": {"codebook_dim": 128},
    "kosmos-2": {"text_config.layers": 2, "latent_query_num": 8},
    "uvdoc": {"backbone_config.out_features": [f"stage{i}" for i in range(1, 7)]},
    "minicpm_ocr_vision": {"insert_layer_id": 0},
    "minicpmv4_7_vision": {"insert_layer_id": 0},
    "dia": {
        "decoder_config.cross_hidden_size": 64, "decoder_config.cross_head_dim": 16,
        "decoder_config.cross_num_key_value_heads": 4,
    },
    "efficientloftr": {"hidden_size": 256, "num_attention_heads": 8, "num_key_value_heads": 8},
    "lightglue": {"descriptor_dim": 64, "keypoint_detector_config.descriptor_decoder_dim": 64, "intermediate_size": 128},
    "mimo_v2_flash": {"num_key_value_heads": 2},
    "muse_spark_audio": {"num_hidden_layers": 4},
    "pp_ocrv6_medium_det": {
        **_PP_BACKBONE, "kernel_list": [3, 2, 2], "scale_factor_list": [1, 2, 4, 8],
        "intraclass_block_config": _PP_OCR,
    },
    **{name: {"audio_encoder.codebook_dim": 64} for name in ("musicgen", "musicgen_melody")},
    **{
        name: {
            "vision_config.backbone_config.hidden_size": 96, "vision_config.backbone_config.image_size": [64, 64],
            "vision_config.backbone_feature_sizes": [[16, 16], [8, 8], [4, 4]],
            "memory_attention_rope_feat_sizes": [4, 4], "memory_encoder_hidden_size": 64,
            "memory_encoder_output_channels": 64, "mask_downsampler_embed_dim": 64, "memory_fuser_embed_dim": 64,
        }
        for name in ("edgetam_video", "sam2_video")
    },
    "sam3_tracker_video": {
        "vision_config.backbone_config.image_size": 56, "prompt_encoder_config.image_size": 56,
        "vision_config.backbone_feature_sizes": [[16, 16], [8, 8], [4, 4]], "memory_encoder_hidden_size": 64,
        "mask_downsampler_embed_dim": 64, "memory_fuser_embed_dim": 64,
    },
    "muse_glimmer_assistant": {"target_layer_ids": [0, 1]},
}  # fmt: skip

_IDS = torch.arange(48).view(2, 24) * 7 % 200 + 5



def _with_images(images: int, words: int) -> torch.Tensor:
    """Two texts that begin with places for images (token 3)."""
    places = torch.full((2, images), 3)
    return torch.cat([places, torch.arange(2 * words).view(2, words) * 7 % 200 + 5], 1)


def _grid(side: int) -> torch.Tensor:
    """The positions of two square images' patches, [2, side * side, 2]."""
    x, y = torch.meshgrid(torch.arange(side), torch.arange(side), indexing="xy")
    return torch.stack([x.flatten(), y.flatten()], -1).expand(2, -1, -1)


def _second_frame(module: str, prefix: str) -> Any:
    """A video whose first frame, with one point on an object, was seen already: attention over that memory is next."""

    def make(model: Any, random: Any) -> dict[str, Any]:
        modeling = importlib.import_module(f"transformers.models.{module}.modeling_{module}")
        side = model.config.prompt_encoder_config.image_size
        session = getattr(modeling, f"{prefix}InferenceSession")(
            random(2, 3, side, side), side, side, dtype=torch.float32
        )
        point = {"point_coords": torch.tensor([[[[9.0, 9.0]]]]), "point_labels": torch.ones(1, 1, 1, dtype=torch.int32)}
        session.add_point_inputs(session.obj_id_to_idx(1), 0, point)
        session.obj_with_new_inputs = [1]
        with torch.no_grad():
            model(session, frame_idx=0)
        return {"inference_session": session, "frame_idx": 1}

    return make


# Families whose name stands for a class that their configuration does not fit.
CLASSES = {
    "musicgen": "MusicgenForConditionalGeneration",
    "musicgen_melody": "MusicgenMelodyForConditionalGeneration",
}

# By family: each input, or a function of the random numbers that makes it; or one function of both, model and numbers.
INPUTS: dict[str, Any] = {
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
    "blip-2": {"pixel_values": lambda random: random(2, 3, 56, 56), "input_ids": _with_images(12, 24)},
    "instructblip": {"pixel_values": lambda random: random(2, 3, 56, 56), "input_ids": _with_images(12, 24),
                     "qformer_input_ids": _IDS[:, :8]},
    "instructblipvideo": {"pixel_values": lambda random: random(2, 4, 3, 56, 56), "input_ids": _with_images(48, 24),
                          "qformer_input_ids": _IDS[:, :8]},
    "depth_pro": {"pixel_values": lambda random: random(1, 3, 224, 224)},
    "dia": {"input_ids": _IDS, "decoder_input_ids": _IDS[:, :12, None].repeat(1, 1, 9)},
    "efficientloftr": {"pixel_values": lambda random: random(1, 2, 3, 64, 64)},
    "lightglue": {"pixel_values": lambda random: random(1, 2, 3, 64, 64)},
    "fun_asr_nano_encoder": {"input_features": lambda random: random(2, 64, 112),
                             "input_features_mask": torch.ones(2, 64, dtype=torch.long)},
    "kosmos-2": {"pixel_values": lambda random: random(2, 3, 56, 56), "input_ids": _IDS,
                 "image_embeds_position_mask": (torch.arange(24) < 8).expand(2, 24)},
    "mimi_decoder": {"latents": lambda random: random(2, 64, 12)},
    "pocket_tts_audio_tokenizer_decoder": {"latents": lambda random: random(2, 64, 12)},
    **{
        name: {"pixel_values": lambda random: random(1, 3, 16, 512), "target_sizes": torch.tensor([[4, 4], [4, 4]])}
        for name in ("minicpm_ocr_vision", "minicpmv4_7_vision")
    },
    "muse_glimmer_assistant": {"noise_embeds": lambda random: random(2, 16, 64),
                               "context_hidden_states": lambda random: random(2, 24, 128)},
    "muse_spark_audio": {"input_values": lambda random: random(2, 3840)},
    "qwen3_asr_encoder": {"input_features": lambda random: random(2, 16, 200),
                          "input_features_mask": torch.ones(2, 200, dtype=torch.long)},
    "sam3_lite_text": {"pixel_values": lambda random: random(1, 3, 56, 56), "input_ids": _IDS[:1]},
    "timesfm": {"past_values": lambda random: random(2, 512), "past_values_padding": torch.zeros(2, 512),
                "freq": torch.zeros(2, 1, dtype=torch.long)},
    "video_llama_3_vision": {"pixel_values": lambda random: random(32, 768), "merge_sizes": torch.tensor([1, 1]),
                             "grid_thw": torch.tensor([[1, 4, 4], [1, 4, 4]])},
    "voxtral_realtime": {"input_ids": _IDS, "input_features": lambda random: random(2, 16, 192)},
    "xclip": {"input_ids": _IDS, "pixel_values": lambda random: random(2, 8, 3, 128, 128)},
    "gemma4_vision": {"pixel_values": lambda random: random(2, 36, 768), "pixel_position_ids": _grid(6)},
    "inkling2_vision": {"pixel_values": lambda random: random(8, 40, 40, 3),
                        "image_grid_thw": torch.tensor([[1, 2, 2], [1, 2, 2]])},
    "pi0": {"action_embeds": lambda random: random(2, 6, 64), "input_ids": _with_images(16, 8),
            "pixel_values": lambda random: random(2, 1, 3, 56, 56), "attention_mask": torch.ones(2, 24),
            "pixel_attention_mask": torch.ones(2, 1, dtype=torch.bool)},
    "vibevoice_acoustic_tokenizer_decoder": {"hidden_states": lambda random: random(2, 64, 4)},
    "vibevoice_acoustic_tokenizer_encoder": {"hidden_states": lambda random: random(2, 1, 3200)},
    **{
        name: {"input_values": lambda random: random(2, 1, 3200), "input_features": lambda random: random(2, 10, 16)}
        for name in ("neucodec", "xcodec2")
    },
    **{
        name: {"input_ids": _IDS, "decoder_input_ids": _IDS.repeat(4, 1)}
        for name in ("musicgen", "musicgen_melody")
    },
    "sam2_video": _second_frame("sam2_video", "Sam2Video"),
    "edgetam_video": _second_frame("edgetam_video", "EdgeTamVideo"),
    "sam3_tracker_video": _second_frame("sam3_tracker_video", "Sam3TrackerVideo"),
}  # fmt: skip
