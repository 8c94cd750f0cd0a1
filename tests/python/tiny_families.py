"""One small random model of any transformers family, and inputs for it, from its configuration alone.

Every configuration class has defaults that fit together; here the numbers that say how large something is are replaced
by small ones, by their names. What does not fit together then has a line in tiny_changes.py.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import logging
from collections.abc import Iterator
from typing import Any

import torch

from dspattn import DspattnError
from tiny_changes import CHANGES, CLASSES, INPUTS, NONE

WIDTH, HEADS, HEAD_DIM, LAYERS, VOCABULARY = 64, 4, 16, 2, 256
LARGEST = 300_000_000  # parameters
DRAWN = 1 << 20  # random numbers; larger tensors repeat them, since drawing more would take longer than all the rest
PADDED = 5  # tokens at the end of the second text

BY_NAME: dict[str, Any] = {
    **dict.fromkeys(
        [
            "hidden_size",
            "d_model",
            "n_embd",
            "dim",
            "embed_dim",
            "emb_dim",
            "encoder_hidden_size",
            "decoder_hidden_size",
            "out_hidden_size",
            "output_dim",
            "projection_dim",
            "hidden_dim",
            "embedding_size",
            "projector_hidden_size",
            "word_embed_proj_dim",
            "width",
            "text_hidden_size",
            "output_hidden_size",
            "pooler_output_size",
            "embedding_dim",
            "encoder_hidden_dim",
            "memory_attention_hidden_size",
            "n_embed",
            "fpn_hidden_size",
            "output_channels",
            "feature_size",
            "attention_hidden_size",
            "text_embed_dim",
            "hidden_size_per_layer_input",
            "d_embed",
        ],
        WIDTH,
    ),
    **dict.fromkeys(
        [
            "intermediate_size",
            "ffn_dim",
            "encoder_ffn_dim",
            "decoder_ffn_dim",
            "d_ff",
            "n_inner",
            "moe_intermediate_size",
            "shared_expert_intermediate_size",
            "d_inner",
            "ffn_hidden_size",
            "dim_feedforward",
            "encoder_intermediate_size",
            "decoder_intermediate_size",
            "mlp_dim",
            "shared_intermediate_size",
            "moe_shared_expert_intermediate_size",
        ],
        WIDTH,
    ),
    **dict.fromkeys(
        [
            "num_attention_heads",
            "n_head",
            "n_heads",
            "num_heads",
            "encoder_attention_heads",
            "decoder_attention_heads",
            "num_key_value_heads",
            "attention_heads",
            "num_kv_heads",
            "encoder_num_attention_heads",
            "decoder_num_attention_heads",
            "swa_num_attention_heads",
            "swa_num_key_value_heads",
            "num_query_heads",
            "cross_num_attention_heads",
            "decoder_num_key_value_heads",
            "encoder_num_key_value_heads",
            "num_attn_heads",
            "num_self_attention_heads",
            "num_cross_attention_heads",
        ],
        HEADS,
    ),
    **dict.fromkeys(("head_dim", "d_kv", "swa_head_dim", "attention_head_dim", "kv_channels", "v_head_dim"), HEAD_DIM),
    **dict.fromkeys(
        [
            "num_hidden_layers",
            "n_layer",
            "n_layers",
            "num_layers",
            "encoder_layers",
            "decoder_layers",
            "depth",
            "num_encoder_layers",
            "num_decoder_layers",
            "memory_attention_num_layers",
            "decoder_num_hidden_layers",
            "encoder_num_hidden_layers",
            "num_block_repeats",
        ],
        LAYERS,
    ),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k"), 2),
    **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace"), 1),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 16),
    **dict.fromkeys(("num_queries", "num_query_tokens"), 12),
    "rotary_dim": 8,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "qk_head_dim": 32,
    "num_mel_bins": 16,
    "max_source_positions": 64,
    "sliding_window": 20,
    "max_window_layers": 1,
}


def shrink(config: Any) -> Any:
    """The configuration with small numbers, sub-configurations included."""
    for name, value in list(vars(config).items()):
        if hasattr(value, "sub_configs"):
            shrink(value)
        elif (
            name == "embed_dim"
            and isinstance(value, int)
            and isinstance(getattr(config, "num_heads", None), (list, tuple))
        ):
            config.embed_dim = min(value, 48)  # divided by 3, 6, ... heads, stage by stage
        elif name in BY_NAME and isinstance(value, int) and not isinstance(value, bool) and value > 0:
            setattr(config, name, min(value, BY_NAME[name]))
        elif name in ("vocab_size", "n_vocab") and isinstance(value, int):
            setattr(config, name, min(value, VOCABULARY))
        elif name.endswith("_token_id") and isinstance(value, int) and value >= VOCABULARY:
            setattr(config, name, 3)
        elif name in ("layer_types", "mlp_layer_types") and isinstance(value, list):
            kinds = list(dict.fromkeys(value))
            setattr(config, name, (kinds + value)[: max(LAYERS, len(kinds))])
            if hasattr(config, "num_hidden_layers"):
                config.num_hidden_layers = max(LAYERS, len(kinds))
        elif name == "image_size" and isinstance(value, int):
            patch = getattr(config, "patch_size", 16)
            config.image_size = min(value, 4 * patch if isinstance(patch, int) else 64)
        elif name == "rope_parameters" and isinstance(value, dict) and "rope_theta" in value:
            _shrink_rope(value)
    return config


def _shrink_rope(parameters: dict[str, Any]) -> None:
    """The three parts of a multi-dimensional rotary embedding share the pairs of a small head."""
    pairs = int(HEAD_DIM * parameters.get("partial_rotary_factor", 1.0)) // 2
    side = pairs * 3 // 8
    parameters["mrope_section"] = [pairs - 2 * side, side, side]


@contextlib.contextmanager
def quiet() -> Any:
    """No advice of transformers about configurations nobody trained."""
    logger = logging.getLogger("transformers")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(before)


class NotMadeError(Exception):
    """No small model of a family, or no inputs for it, comes out of its configuration's names alone."""


class NoModelError(Exception):
    """There is no model to make: a package is missing, it cannot be made small, or tiny_changes.py says why."""


def build(model_type: str, seed: int = 0, attn_implementation: str | None = None) -> Any:
    """A model of the family with random weights, in evaluation; as transformers would load it with that attention."""
    import transformers
    from transformers.initialization import no_init_weights
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_MAPPING

    if model_type in NONE:
        raise NoModelError(NONE[model_type])
    with quiet():
        try:
            config = shrink(CONFIG_MAPPING[model_type]())
            for name, value in CHANGES.get(model_type, {}).items():
                change(config, name, value)
            if attn_implementation is not None:
                config._attn_implementation = attn_implementation
            if model_type in CLASSES:
                cls: Any = getattr(transformers, CLASSES[model_type])
            else:
                cls = MODEL_MAPPING[type(config)]
                cls = cls[0] if isinstance(cls, tuple) else cls
            with no_init_weights():
                model = cls(config).eval()
        except DspattnError:
            raise
        except ImportError as error:
            raise NoModelError(" ".join(str(error).split())) from error
        except Exception as error:
            raise NotMadeError(f"{type(error).__name__}: {' '.join(str(error).split())}") from error
        if sum(parameter.numel() for parameter in model.parameters()) > LARGEST:
            raise NoModelError(f"more than {LARGEST} parameters remain")
    fill(model, seed)
    return model


def change(config: Any, name: str, value: Any) -> None:
    """Set a value by its path, as ``text_config.hidden_size``."""
    *path, last = name.split(".")
    for part in path:
        config = getattr(config, part)
    setattr(config, last, value() if callable(value) else value)


@functools.lru_cache(1)
def _drawn(seed: int) -> torch.Tensor:
    """The numbers twice over, so that from any of the first on as many follow."""
    return torch.randn(DRAWN, generator=torch.Generator().manual_seed(seed)).repeat(2)


def fill(model: torch.nn.Module, seed: int) -> None:
    """Weights that keep activations near 1, so that a difference anywhere shows at the end."""
    drawn = _drawn(seed)
    offset = 0
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not parameter.is_floating_point():
                continue
            count = parameter.numel()
            offset = (offset + 65_537) % DRAWN  # so that no two tensors are alike
            noise = drawn[offset : offset + DRAWN]
            noise = noise[:count] if count <= DRAWN else noise.repeat(-(-count // DRAWN))[:count]
            noise = noise.view(parameter.shape).to(parameter.dtype)
            if parameter.dim() > 1:
                torch.mul(noise, parameter.shape[-1] ** -0.5, out=parameter)
            elif name.endswith("weight"):
                parameter.copy_(1 + 0.1 * noise)
            else:
                parameter.copy_(0.1 * noise)


def _inside(config: Any) -> list[Any]:
    """The configuration and those inside it."""
    return [config, *(getattr(config, key, None) for key in getattr(config, "sub_configs", {}))]


def _image_size(config: Any, default: int = 32) -> tuple[int, int]:
    for where in _inside(config):
        for name in ("image_size", "input_size", "pretrain_image_size", "img_size"):
            size = getattr(where, name, None)
            if isinstance(size, int) and not isinstance(size, bool):
                return size, size
            if isinstance(size, (list, tuple)) and len(size) == 2:
                return int(size[0]), int(size[1])
    return default, default


def _of(config: Any, *names: str, default: int) -> int:
    """The first of the values that the configuration or one of those inside it has."""
    for where in _inside(config):
        for name in names:
            value = getattr(where, name, None)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
    return default


def candidate_inputs(model: torch.nn.Module, n: int = 24) -> Iterator[dict[str, Any]]:
    """Random inputs by the names of the forward method's arguments, in forms from the simplest on: what a family takes
    cannot be read off its signature, so the first form that runs is the one."""
    parameters = inspect.signature(model.forward).parameters
    config: Any = model.config
    batch, frames = 2, _of(config, "num_frames", default=4)
    generator = torch.Generator().manual_seed(1)
    random = functools.partial(torch.randn, generator=generator)
    vocabulary = _of(config, "vocab_size", default=VOCABULARY)
    ids = torch.randint(4, max(6, min(vocabulary, VOCABULARY) - 1), (batch, n), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, n - PADDED :] = 0
    size, channels = _image_size(config), _of(config, "num_channels", "in_channels", "in_chans", default=3)
    mels = _of(config, "num_mel_bins", "input_feat_per_channel", "feature_size", "input_dim", default=16)
    width = _of(config, "hidden_size", "d_model", default=WIDTH)
    patch, steps = _of(config, "patch_size", default=16), _of(config, "temporal_patch_size", default=1)
    grid = torch.tensor([[1, 4, 4], [1, 4, 4]])
    made: dict[str, Any] = {
        "input_ids": ids,
        "pixel_values": random(batch, channels, *size),
        "input_features": random(batch, 64, mels),
        "input_values": random(batch, 3200),
        "hidden_states": random(batch, n, width),
        "inputs_embeds": random(batch, n, width),
        "query_embeds": random(batch, n, width),
        "past_values": random(
            batch, _of(config, "context_length", default=32), _of(config, "num_input_channels", default=1)
        ),
        "input_features_mask": torch.ones(batch, 64, dtype=torch.long),
        "attention_mask": mask,
        "decoder_input_ids": ids[:, : n // 2],
        "bbox": torch.randint(0, 60, (batch, n, 2), generator=generator).sort(1).values.repeat(1, 1, 2),
        "use_cache": False,
    }
    if config.model_type in INPUTS:
        given = INPUTS[config.model_type]
        if callable(given):
            yield given(model, random)
        else:
            yield {name: make(random) if callable(make) else make for name, make in given.items()}
        return
    video = {"pixel_values": random(batch, frames, channels, *size)}
    other_forms: tuple[dict[str, Any], ...] = (
        {},
        video,
        {"pixel_values_videos": video["pixel_values"]},
        {"input_features": random(batch, mels, 128)},
        {"input_features": random(batch, 128, 128), "input_features_mask": torch.ones(batch, 128, dtype=torch.long)},
        {"input_values": random(batch, 1, 3840)},
        {"hidden_states": random(32, channels * steps * patch * patch), "grid_thw": grid},
        {"pixel_values": random(32, channels * steps * patch * patch), "grid_thw": grid},
        {"pixel_values": random(32, channels, patch, patch), "grid_thw": grid},
        {"bbox": made["bbox"]},
        {"pixel_values": random(batch, channels, 128, 128)},
        {"past_values": random(batch, 64)},
    )
    for wide in (False, True):
        for form in other_forms:
            chosen = _chosen(model, parameters, made | form, set(form), wide)
            if chosen is not None:
                yield chosen


def _chosen(
    model: torch.nn.Module, parameters: Any, made: dict[str, Any], asked: set[str], wide: bool
) -> dict[str, Any] | None:
    """What is required, or the main input; with ``wide`` also pixels and sound beside ids."""
    required = [
        name
        for name, p in parameters.items()
        if p.default is p.empty and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
    ]
    if any(name not in made for name in required) or any(name not in parameters for name in asked):
        return None
    first = next(iter(parameters), "")
    main = getattr(model, "main_input_name", first)
    names = {*asked, *(required or [main if main in parameters and main in made else first])}
    if wide:
        names |= {name for name in ("pixel_values", "input_features", "input_values") if name in parameters}
    if "input_ids" in names:
        names |= {"attention_mask"} & set(parameters)
    names |= {"decoder_input_ids", "use_cache"} & set(parameters)
    return {name: made[name] for name in names} if names <= set(made) else None


def runnable_inputs(model: torch.nn.Module) -> tuple[dict[str, Any], Any]:
    """Inputs that the model takes, and its output."""
    failures: dict[str, None] = {}
    for inputs in candidate_inputs(model):
        try:
            with torch.no_grad():
                return inputs, model(**copy.deepcopy(inputs))  # a video's session remembers
        except Exception as error:
            failures[f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"] = None
    raise NotMadeError(f"no inputs that {type(model).__name__} takes: {'; '.join(failures)}")


def tensors_of(output: Any) -> list[torch.Tensor]:
    """Every floating tensor of an output, in order."""
    if isinstance(output, torch.Tensor):
        return [output] if output.is_floating_point() else []
    if isinstance(output, dict):
        return [t for value in output.values() for t in tensors_of(value)]
    if isinstance(output, (list, tuple)):
        return [t for value in output for t in tensors_of(value)]
    return []
