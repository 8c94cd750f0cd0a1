"""Attention backends for diffusers, by name:

    dspattn.integrations.diffusers.register()
    pipeline.transformer.set_attention_backend("dspattn_1_2")

diffusers keeps its backends in an enumeration that has no way to add one, so :func:`register` makes a member the way
the enumeration makes its own. Modules that still have processors of their own (in SD3, UNets and VAEs) are left as they
are by ``set_attention_backend``, which does not say so; :func:`dspattn.apply` and :class:`dspattn.use` reach those.

Flux spends as long on norm, rotation and joining of queries and keys as on attention. :func:`fuse_norm_rope` gives it
:func:`dspattn.norm_rope` for these, whatever attention follows:

    dspattn.integrations.diffusers.fuse_norm_rope(pipeline.transformer)
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .._flags import as_flag
from ..errors import DspattnError
from ..functional import attention
from ..patterns import Grouping
from .huggingface import GROUPINGS, PATTERNS, implementation_name


def register(pattern: str | None = None, grouping: Grouping = "interleaved") -> list[str]:
    """Make backends known to diffusers.

    Args:
        pattern: ``"N:M"`` or ``"dense"``; None: those that the Hugging Face names have, in both groupings.
        grouping: of the one pattern.

    Returns:
        The names for ``set_attention_backend``: ``dspattn_2_4``, ``dspattn_1_2_consecutive``, ``dspattn_dense``, ...
    """
    if pattern is not None:
        return [_register(pattern, grouping)]
    return [_register("dense", "interleaved"), *(_register(p, g) for p in PATTERNS for g in GROUPINGS)]


def fuse_norm_rope(model: Any) -> list[str]:
    """Prepare queries and keys of a Flux transformer (FluxTransformer2DModel, ChromaTransformer2DModel) by
    :func:`dspattn.norm_rope`: one pass over memory on a GPU, with the roundings that the model's own operators have
    when they are not compiled. Calls that it does not take (gradients, autocast) are prepared as before.

    Args:
        model: a module; every Flux attention in it with the processor that diffusers gives it is changed. Others, as an
            IP adapter's, stay.

    Returns:
        Names of the attention modules that were changed. Raises when there were none.
    """
    own, fused = _flux_processors()
    return _exchange(model, own, fused, "with diffusers' own processor")


def unfuse_norm_rope(model: Any) -> list[str]:
    """Undo :func:`fuse_norm_rope`."""
    own, fused = _flux_processors()
    return _exchange(model, fused, own, "that fuse_norm_rope changed")


def _flux_processors() -> tuple[type, type]:
    try:
        from diffusers.models.transformers.transformer_flux import FluxAttnProcessor

        from ._flux import NormRopeProcessor
    except ImportError as error:
        raise DspattnError([f"diffusers: expected a version with FluxAttnProcessor (0.35 or later): {error}"]) from None
    return FluxAttnProcessor, NormRopeProcessor


def _exchange(model: Any, before: type, after: type, which: str) -> list[str]:
    changed = []
    for name, module in model.named_modules():
        old = getattr(module, "processor", None)
        if type(old) is not before:
            continue
        new = after()
        new.__dict__.update(old.__dict__)  # the attention backend and the like
        module.set_processor(new)
        changed.append(name)
    if not changed:
        raise DspattnError([f"model: expected a Flux attention {which}, found none in {type(model).__name__}"])
    return changed


def _register(pattern: str, grouping: Grouping) -> str:
    try:
        from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry
    except ImportError as error:
        raise DspattnError(
            [f"diffusers: expected a version with attention backends (0.35 or later): {error}"]
        ) from None
    name = implementation_name(pattern, grouping)
    if name not in AttentionBackendName._value2member_map_:
        member = str.__new__(AttentionBackendName, name)
        member._name_, member._value_ = name.upper(), name
        member.__objclass__ = AttentionBackendName
        AttentionBackendName._member_names_.append(member._name_)
        AttentionBackendName._member_map_[member._name_] = member
        AttentionBackendName._value2member_map_[name] = member
    _AttentionBackendRegistry.register(AttentionBackendName(name))(_backend(pattern, grouping))
    return name


def _backend(pattern: str, grouping: Grouping) -> Any:
    def dspattn_backend(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
        return_lse: bool = False,
        _parallel_config: Any = None,
    ) -> Any:
        """[batch, n, heads, d], as diffusers lays it out."""
        if _parallel_config is not None:
            raise DspattnError(["_parallel_config: expected None (context parallelism is not offered), got one"])
        return_lse = as_flag("return_lse", return_lse)
        q, k, v = (tensor.transpose(1, 2) for tensor in (query, key, value))
        if attn_mask is not None and attn_mask.dim() == 2:  # which keys are there, [batch, n_k]
            attn_mask = attn_mask[:, None, None, :]
        out, lse = attention(
            q,
            k,
            v,
            attn_mask,
            dropout_p,
            is_causal,
            scale,
            enable_gqa,
            pattern=pattern,
            grouping=grouping,
            return_lse=True,
        )
        out = out.transpose(1, 2)
        return (out, lse.transpose(1, 2)) if return_lse else out

    return dspattn_backend
