"""The processor that :func:`dspattn.integrations.diffusers.fuse_norm_rope` gives diffusers' Flux attention: the same as
its own but for norm, rotation and joining of queries and keys. Imported only when diffusers is there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from diffusers.models.attention_dispatch import dispatch_attention_fn
from diffusers.models.embeddings import apply_rotary_emb
from diffusers.models.transformers.transformer_flux import FluxAttnProcessor, _get_qkv_projections
from torch import Tensor

from ..preparing import norm_rope

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
LARGEST_HEAD = 256  # that norm_rope takes


class NormRopeProcessor(FluxAttnProcessor):  # type: ignore[misc]
    """What a call has that :func:`dspattn.norm_rope` does not take is prepared as before: gradients, autocast, norms
    that are no ``torch.nn.RMSNorm`` or are called by others (hooks, offloading), tensors of other classes."""

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        image_rotary_emb: Any = None,
    ) -> Any:
        projections = _get_qkv_projections(attn, hidden_states, encoder_hidden_states)
        joint = attn.added_kv_proj_dim is not None
        image = [part.unflatten(-1, (-1, attn.head_dim)) for part in projections[:3]]
        text = [part.unflatten(-1, (-1, attn.head_dim)) for part in projections[3:]] if joint else []
        queries, keys, values = ([text[i], image[i]] if joint else [image[i]] for i in range(3))
        query_norms = [attn.norm_added_q, attn.norm_q] if joint else [attn.norm_q]
        key_norms = [attn.norm_added_k, attn.norm_k] if joint else [attn.norm_k]
        if _taken([*queries, *keys], [*query_norms, *key_norms], image_rotary_emb):
            cos, sin = image_rotary_emb if image_rotary_emb is not None else (None, None)
            query, key = norm_rope(
                queries,
                keys,
                query_weight=_weights(query_norms),
                key_weight=_weights(key_norms),
                eps=attn.norm_q.eps,
                cos=cos,
                sin=sin,
            )
        else:
            query = _as_before(queries, query_norms, image_rotary_emb)
            key = _as_before(keys, key_norms, image_rotary_emb)
        out = dispatch_attention_fn(
            query,
            key,
            torch.cat(values, 1) if joint else values[0],
            attn_mask=attention_mask,
            backend=self._attention_backend,
            parallel_config=self._parallel_config,
        )
        out = out.flatten(2, 3).to(query.dtype)
        if encoder_hidden_states is None:
            return out
        n = encoder_hidden_states.shape[1]
        of_text, of_image = out.split_with_sizes([n, out.shape[1] - n], dim=1)
        of_image = attn.to_out[1](attn.to_out[0](of_image.contiguous()))
        return of_image, attn.to_add_out(of_text.contiguous())


def _taken(parts: Sequence[Tensor], norms: Sequence[Any], rotary: Any) -> bool:
    """Whether norm_rope gives what the norms and diffusers' rotation give."""
    first = parts[0]
    device = first.device.type
    if device not in ("cpu", "cuda") or first.dtype not in FLOATS or torch.is_autocast_enabled(device):
        return False
    if not (first.shape[-1] <= LARGEST_HEAD and first.shape[-1] % 2 == 0):
        return False
    for part in parts:
        if type(part) is not Tensor or part.dtype != first.dtype or (part.requires_grad and torch.is_grad_enabled()):
            return False
    for norm in norms:
        if type(norm) is not torch.nn.RMSNorm or norm._forward_hooks or norm._forward_pre_hooks:
            return False
        if "forward" in norm.__dict__:  # offloading: its weight comes when it is called
            return False
        if norm.eps is None or norm.eps != norms[0].eps or (norm.weight is None) != (norms[0].weight is None):
            return False
        weight = norm.weight
        if weight is not None and not (weight.dtype == first.dtype and weight.device == first.device):
            return False
        if weight is not None and type(weight) not in (Tensor, torch.nn.Parameter):
            return False
    if rotary is None:
        return True
    if not (isinstance(rotary, tuple) and len(rotary) == 2):
        return False
    n = sum(part.shape[1] for part in parts[: len(parts) // 2])
    return all(
        t.dtype == torch.float32 and t.device == first.device and t.shape == (n, first.shape[-1]) for t in rotary
    )


def _weights(norms: Sequence[Any]) -> list[Tensor]:
    return [norm.weight for norm in norms if norm.weight is not None]


def _as_before(parts: Sequence[Tensor], norms: Sequence[Any], rotary: Any) -> Tensor:
    normed = [norm(part) for norm, part in zip(norms, parts, strict=True)]
    joined = torch.cat(normed, dim=1) if len(normed) > 1 else normed[0]
    return joined if rotary is None else apply_rotary_emb(joined, rotary, sequence_dim=1)
