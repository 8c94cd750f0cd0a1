"""A diffusion transformer of Flux's shapes from PyTorch's own layers, random weights: what a forward pass of that model
costs, where the diffusers package is not at hand. Joint blocks keep text and image apart but for attention; the single
blocks after them run both as one sequence, attention and MLP side by side."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn


@dataclass(frozen=True)
class Shape:
    """The published model at 1024 x 1024 pixels, unless said otherwise."""

    joint_blocks: int = 19
    single_blocks: int = 38
    heads: int = 24
    head_dim: int = 128
    image_tokens: int = 4096
    text_tokens: int = 512
    image_channels: int = 64
    text_channels: int = 4096
    pooled_channels: int = 768

    @property
    def width(self):
        return self.heads * self.head_dim

    @property
    def tokens(self):
        return self.image_tokens + self.text_tokens


# For trying the programs; a head's eighth is even, as diffusers' rotary positions need it.
TINY = Shape(1, 1, 2, 32, 160, 32, 8, 24, 16)


def attend(q, k, v, angles):
    """[batch, n, 3 parts of width] as heads, turned by position, through PyTorch's attention and back."""
    out = F.scaled_dot_product_attention(turn(q, angles), turn(k, angles), v)
    return out.transpose(1, 2).flatten(2)


def turn(x, angles):
    """Rotary positions: pairs of elements as complex numbers."""
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * angles).flatten(-2).to(x.dtype)


def modulated(x, shift, scale):
    return F.layer_norm(x, x.shape[-1:], eps=1e-6) * (1 + scale) + shift


class Heads(nn.Module):
    """Queries, keys and values of one stream, queries and keys normalised head by head."""

    def __init__(self, shape):
        super().__init__()
        self.heads = shape.heads
        self.project = nn.Linear(shape.width, 3 * shape.width)
        self.norm_q, self.norm_k = nn.RMSNorm(shape.head_dim, eps=1e-6), nn.RMSNorm(shape.head_dim, eps=1e-6)

    def forward(self, x):
        q, k, v = self.project(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return self.norm_q(q), self.norm_k(k), v


class Stream(nn.Module):
    """What a joint block has once for the text and once for the image."""

    def __init__(self, shape):
        super().__init__()
        width = shape.width
        self.modulation = nn.Linear(width, 6 * width)
        self.heads = Heads(shape)
        self.out = nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU("tanh"), nn.Linear(4 * width, width))


class JointBlock(nn.Module):
    def __init__(self, shape):
        super().__init__()
        self.text, self.image = Stream(shape), Stream(shape)

    def forward(self, text, image, condition, angles):
        streams, inputs = (self.text, self.image), (text, image)
        parts = [stream.modulation(condition).unsqueeze(1).chunk(6, -1) for stream in streams]
        qkv = [s.heads(modulated(x, p[0], p[1])) for s, x, p in zip(streams, inputs, parts, strict=True)]
        joined = attend(*(torch.cat(pair, 2) for pair in zip(*qkv, strict=True)), angles)
        results = []
        split = joined.split([text.shape[1], image.shape[1]], 1)
        for stream, x, part, attended in zip(streams, inputs, parts, split, strict=True):
            x = x + part[2] * stream.out(attended)
            results.append(x + part[5] * stream.mlp(modulated(x, part[3], part[4])))
        return results


class SingleBlock(nn.Module):
    def __init__(self, shape):
        super().__init__()
        width = shape.width
        self.modulation = nn.Linear(width, 3 * width)
        self.heads = Heads(shape)
        self.widen = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU("tanh"))
        self.out = nn.Linear(5 * width, width)

    def forward(self, x, condition, angles):
        shift, scale, gate = self.modulation(condition).unsqueeze(1).chunk(3, -1)
        inner = modulated(x, shift, scale)
        attended = attend(*self.heads(inner), angles)
        return x + gate * self.out(torch.cat([attended, self.widen(inner)], -1))


class Transformer(nn.Module):
    def __init__(self, shape):
        super().__init__()
        self.shape = shape
        self.of_image = nn.Linear(shape.image_channels, shape.width)
        self.of_text = nn.Linear(shape.text_channels, shape.width)
        self.of_condition = nn.Sequential(
            nn.Linear(shape.pooled_channels, shape.width), nn.SiLU(), nn.Linear(shape.width, shape.width), nn.SiLU()
        )
        self.joint = nn.ModuleList(JointBlock(shape) for _ in range(shape.joint_blocks))
        self.single = nn.ModuleList(SingleBlock(shape) for _ in range(shape.single_blocks))
        self.out = nn.Linear(shape.width, shape.image_channels)

    def forward(self, image, text, pooled):
        steps = torch.arange(self.shape.tokens, device=image.device, dtype=torch.float32)
        rates = 1e4 ** -torch.linspace(0, 1, self.shape.head_dim // 2, device=image.device)
        angles = torch.polar(torch.ones_like(rates), steps[:, None] * rates)
        image, text, condition = self.of_image(image), self.of_text(text), self.of_condition(pooled)
        for block in self.joint:
            text, image = block(text, image, condition, angles)
        x = torch.cat([text, image], 1)
        for block in self.single:
            x = block(x, condition, angles)
        return self.out(F.layer_norm(x[:, self.shape.text_tokens :], (self.shape.width,), eps=1e-6))
