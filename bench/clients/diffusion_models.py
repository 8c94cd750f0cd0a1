"""The diffusion transformers that bench/clients/flux.py times, with random weights: Flux's and SD3.5's shapes."""

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import dspattn
from bench.clients.flux_model import Transformer
from dspattn.integrations.diffusers import fuse_norm_rope, register, unfuse_norm_rope
from dspattn.integrations.huggingface import implementation_name


@dataclasses.dataclass
class Model:
    """A forward pass that can be called, and what is to be known of it."""

    name: str
    forward: Callable[[], torch.Tensor]
    blocks: list[nn.Module]
    attention: dict[int, int]  # calls by their number of tokens
    fuse: Callable[[], Any] | None = None  # makes one product of each block's projections to q, k and v
    switch: Callable[[str], Any] = dspattn.use  # a context in which attention that is not compiled has the pattern
    norm_rope: Callable[[bool], None] | None = None  # prepares queries and keys by dspattn.norm_rope, or as before


def plain(shape, device, dtype):
    """Flux's shapes from plain PyTorch layers (flux_model.py)."""
    with torch.device(device):
        model = Transformer(shape).to(dtype).eval()
        inputs = (
            torch.randn(1, shape.image_tokens, shape.image_channels, dtype=dtype),
            torch.randn(1, shape.text_tokens, shape.text_channels, dtype=dtype),
            torch.randn(1, shape.pooled_channels, dtype=dtype),
        )
    blocks = [*model.joint, *model.single]
    return Model("plain PyTorch layers", lambda: model(*inputs), blocks, {shape.tokens: len(blocks)})


def flux(shape, device, dtype):
    """diffusers' own model of Flux."""
    import diffusers

    rope = [shape.head_dim // 8, shape.head_dim * 7 // 16, shape.head_dim * 7 // 16]
    with torch.device(device):
        model = diffusers.FluxTransformer2DModel(
            num_layers=shape.joint_blocks, num_single_layers=shape.single_blocks, attention_head_dim=shape.head_dim,
            num_attention_heads=shape.heads, in_channels=shape.image_channels, axes_dims_rope=rope,
            joint_attention_dim=shape.text_channels, pooled_projection_dim=shape.pooled_channels,
        ).to(dtype).eval()  # fmt: skip
        inputs = {
            "hidden_states": torch.randn(1, shape.image_tokens, shape.image_channels, dtype=dtype),
            "encoder_hidden_states": torch.randn(1, shape.text_tokens, shape.text_channels, dtype=dtype),
            "pooled_projections": torch.randn(1, shape.pooled_channels, dtype=dtype),
            "timestep": torch.ones(1, dtype=dtype),
            "img_ids": torch.rand(shape.image_tokens, 3),
            "txt_ids": torch.zeros(shape.text_tokens, 3),
        }
    blocks = [*model.transformer_blocks, *model.single_transformer_blocks]
    name = f"diffusers {diffusers.__version__}"
    return Model(
        name, lambda: model(**inputs, return_dict=False)[0], blocks, {shape.tokens: len(blocks)},
        model.fuse_qkv_projections, *processor_switches(model),
    )  # fmt: skip


def processor_switches(model):
    """Exchange backends and processors, which are made once: what that takes is not timed with the model."""
    from diffusers.models.attention_dispatch import AttentionBackendName

    register()
    modules = dict(model.named_modules())
    changed = [modules[name] for name in fuse_norm_rope(model)]
    fused = [module.processor for module in changed]
    unfuse_norm_rope(model)
    own = [module.processor for module in changed]

    @contextlib.contextmanager
    def switch(pattern):
        backend = AttentionBackendName(implementation_name(pattern, "interleaved"))
        for processor in own + fused:
            processor._attention_backend = backend
        try:
            yield
        finally:
            for processor in own + fused:
                processor._attention_backend = None

    def norm_rope(on):
        for module, processor in zip(changed, fused if on else own, strict=True):
            module.processor = processor

    return switch, norm_rope


@dataclasses.dataclass(frozen=True)
class Sd3Blocks:
    """SD3.5-medium has 24 blocks, and in the first 13 a second attention among the tokens of the image alone."""

    count: int = 24
    dual: int = 13


def sd3(shape, device, dtype):
    """diffusers' own model of SD3.5-medium's blocks with Flux's tokens, heads and head dimension."""
    import diffusers

    blocks = Sd3Blocks() if shape.joint_blocks > 1 else Sd3Blocks(2, 1)
    rows = next(rows for rows in range(int(shape.image_tokens**0.5), 0, -1) if shape.image_tokens % rows == 0)
    columns = shape.image_tokens // rows
    with torch.device(device):
        model = diffusers.SD3Transformer2DModel(
            sample_size=2 * columns, in_channels=16, num_layers=blocks.count, attention_head_dim=shape.head_dim,
            num_attention_heads=shape.heads, joint_attention_dim=shape.text_channels, qk_norm="rms_norm",
            caption_projection_dim=shape.width, pooled_projection_dim=shape.pooled_channels,
            pos_embed_max_size=columns, dual_attention_layers=tuple(range(blocks.dual)),
        ).to(dtype).eval()  # fmt: skip
        inputs = {
            "hidden_states": torch.randn(1, 16, 2 * rows, 2 * columns, dtype=dtype),
            "encoder_hidden_states": torch.randn(1, shape.text_tokens, shape.text_channels, dtype=dtype),
            "pooled_projections": torch.randn(1, shape.pooled_channels, dtype=dtype),
            "timestep": torch.ones(1, dtype=dtype),
        }
    return Model(
        f"SD3.5-medium's blocks, diffusers {diffusers.__version__}", lambda: model(**inputs, return_dict=False)[0],
        list(model.transformer_blocks), {shape.tokens: blocks.count, shape.image_tokens: blocks.dual},
    )  # fmt: skip


MODELS = {"plain": plain, "diffusers": flux, "sd3": sd3}


class Fp8Linear(nn.Module):
    """A linear layer whose product is of fp8 numbers, each row of both sides scaled to its largest element."""

    def __init__(self, linear):
        super().__init__()
        weight, scale = scaled(linear.weight.detach())
        self.register_buffer("weight", weight)
        self.register_buffer("scale", scale)
        self.bias = linear.bias
        self.dtype = linear.weight.dtype

    def forward(self, x):
        rows, scale = scaled(x.flatten(0, -2))
        out = torch._scaled_mm(rows, self.weight.t(), scale_a=scale, scale_b=self.scale.t(), out_dtype=self.dtype)
        return (out if self.bias is None else out + self.bias).unflatten(0, x.shape[:-1])


def scaled(matrix):
    """(matrix in fp8, what its rows are to be multiplied by)"""
    scale = matrix.float().abs().amax(-1, keepdim=True).clamp_min(1e-12) / torch.finfo(torch.float8_e4m3fn).max
    return (matrix.float() / scale).to(torch.float8_e4m3fn), scale


def use_fp8(blocks):
    """Puts Fp8Linear in the place of the blocks' linear layers, but for those of the modulation, which see one row."""
    for block in blocks:
        layers = [
            (name, layer)
            for name, layer in block.named_modules()
            if isinstance(layer, nn.Linear) and "norm" not in name and "modulation" not in name
        ]
        for name, layer in layers:
            block.set_submodule(name, Fp8Linear(layer))
