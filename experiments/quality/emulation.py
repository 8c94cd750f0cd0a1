"""Pruned attention in a few lines of plain fp32 PyTorch: an independent judge of the package.

It materialises every score, ranks each group's members by counting, and shares no code with the library. Slow and
hungry for memory on purpose: it is here to be obviously right, and to be compared with.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

BLOCK = 128  # keys per block of the interleaved grouping


def parse(pattern: str) -> tuple[int, int]:
    """("2:4") -> (2, 4); "dense" -> (1, 1)."""
    if pattern == "dense":
        return 1, 1
    keep, group = pattern.split(":")
    return int(keep), int(group)


def kept(scores: Tensor, pattern: str, grouping: str) -> Tensor:
    """Which scores stay: bool, the shape of ``scores`` [..., keys]; masked scores are -inf and never stay."""
    keep, group = parse(pattern)
    allowed = scores > float("-inf")
    if keep == group:
        return allowed
    keys = scores.shape[-1]
    unit = group if grouping == "consecutive" else BLOCK
    padded = torch.nn.functional.pad(scores, (0, -keys % unit), value=float("-inf"))
    if grouping == "consecutive":
        members = padded.unflatten(-1, (-1, group)).unbind(-1)
    elif grouping == "interleaved":
        members = padded.unflatten(-1, (-1, group, BLOCK // group)).unbind(-2)
    else:
        raise ValueError(f"grouping: expected consecutive or interleaved, got {grouping}")
    # A member stays when fewer than `keep` others beat it; an equal one beats it when its key index is lower.
    stays = []
    for own in range(group):
        beaten_by = torch.zeros(members[0].shape, dtype=torch.int8)
        for other in range(group):
            if other < own:
                beaten_by += members[other] >= members[own]
            elif other > own:
                beaten_by += members[other] > members[own]
        stays.append(beaten_by < keep)
    stacked = torch.stack(stays, dim=-1 if grouping == "consecutive" else -2)
    flat = stacked.reshape(padded.shape)[..., :keys]
    return flat & allowed


def weights(scores: Tensor, pattern: str, grouping: str) -> Tensor:
    """Softmax over the scores that stay; a row with none is zero."""
    pruned = scores.masked_fill(~kept(scores, pattern, grouping), float("-inf"))
    return torch.softmax(pruned, dim=-1).nan_to_num(0.0)


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    scale: float | None = None,
    pattern: str = "2:4",
    grouping: str = "interleaved",
) -> Tensor:
    """softmax(prune(scale q k^T + mask)) v for q [batch, heads, n_q, d], k and v [batch, kv_heads, n_k, d]."""
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    share = query.shape[1] // key.shape[1]
    out = query.new_empty((*query.shape[:-1], value.shape[-1]))
    for batch in range(query.shape[0]):
        for head in range(query.shape[1]):  # one at a time: a score matrix that fits the cache
            scores = query[batch, head] @ key[batch, head // share].T * scale
            if mask is not None:
                own = mask.expand(query.shape[0], query.shape[1], *mask.shape[-2:])[batch, head]
                scores = scores.masked_fill(~own, float("-inf")) if own.dtype == torch.bool else scores + own
            out[batch, head] = weights(scores, pattern, grouping) @ value[batch, head // share]
    return out


def transformers_name(pattern: str, grouping: str) -> str:
    """Registers the pattern with transformers and returns the name for ``model.set_attn_implementation``."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    def forward(
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        dropout: float = 0.0,
        **_: Any,
    ) -> tuple[Tensor, None]:
        assert dropout == 0.0
        out = attention(query, key, value, attention_mask, scaling, pattern, grouping)
        return out.transpose(1, 2).contiguous(), None

    def full_mask(*arguments: Any, **options: Any) -> Any:
        options["allow_is_causal_skip"] = False  # never leave the causal mask to the attention function
        return sdpa_mask(*arguments, **options)

    name = f"emulation_{pattern.replace(':', '_')}_{grouping}"
    AttentionInterface.register(name, forward)
    AttentionMaskInterface.register(name, full_mask)
    return name
