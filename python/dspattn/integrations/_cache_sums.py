"""Sums of V beside the caches of transformers, so that steps under a name with ``_mean`` read of V the kept rows alone.

An attention function is handed keys and values without their cache. So the values that a layer of a growing or a static
cache returns carry a :class:`Kept`: empty until attention asks for sums, brought up to date by every ``update`` after
that. It belongs to the layer. What changes a layer in another way (cropping, reordering, moving to another device)
empties it, and so do values that are not those last seen. A compiled step updates the sums of a static cache inside its
graph, and uses them if they were there when it was made: attention asks for them while it reads the prompt.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .._running import stand_in, stand_ins
from ..caching import BLOCK, attention_with_cache, update_value_sums
from ..plans import Plan
from . import _bands

ATTRIBUTE = "_dspattn_sums"  # of a layer, and of the values that it returns
FEW = 16  # queries; with more nearly every row of V is read anyway
# What changes a layer in place or for good without adding keys. A static layer's reset is not among them: it has no
# keys then, and sums past the keys are never read.
CHANGES = ("crop", "reorder_cache", "batch_repeat_interleave", "batch_select_indices", "offload", "prefetch", "reset")

_wanted = False  # some model prunes with the mean: before that no cache is followed


class Kept:
    """Sums of one layer's values, [batch, kv_heads, 2 * blocks, d_v + 1] as of :func:`dspattn.value_sums`."""

    def __init__(self, fixed: bool = False) -> None:
        self.fixed = fixed  # the values stay where they are, and lengths say how many there are
        self.sums: Tensor | None = None
        self.lengths: Tensor | None = None
        self.values: Callable[[], Tensor | None] = _nothing  # that the sums are of
        self.version = 0  # of these: writes to them

    def __reduce__(self) -> tuple[Any, ...]:
        return Kept, (self.fixed,)  # a copied or stored layer has none

    def forget(self) -> None:
        self.sums = None
        self.values = _nothing

    def is_of(self, values: Tensor | None) -> bool:
        """Whether the sums are of these values, to which nobody has written since."""
        return values is not None and self.values() is values and (self.fixed or self.version == _version(values))

    def see(self, values: Tensor) -> None:
        self.values, self.version = weakref.ref(values), _version(values)

    def begin(self, values: Tensor) -> None:
        """Sums of all keys that there are."""
        blocks = values.shape[2] // BLOCK
        room = max(blocks, 1) if self.fixed else 2 * blocks + 1
        self.sums = values.new_zeros((*values.shape[:2], 2 * room, values.shape[3] + 1), dtype=torch.float32)
        if self.fixed:  # as the layer does with its values, for CUDA graphs
            torch._dynamo.mark_static_address(self.sums)
        update_value_sums(self.sums, values, values.shape[2], self.lengths)
        self.see(values)

    def follow(self, values: Tensor, new_keys: int) -> None:
        """After keys were added to values that grow."""
        blocks = values.shape[2] // BLOCK
        if self.sums is None or 2 * blocks > self.sums.shape[2]:
            return self.begin(values)
        if blocks > (values.shape[2] - new_keys) // BLOCK:
            update_value_sums(self.sums, values, new_keys)
        self.see(values)


def _nothing() -> None:
    return None


def _version(values: Tensor) -> int:
    return 0 if values.is_inference() else values._version


def want() -> None:
    """A model prunes with the mean: from now on caches are followed."""
    global _wanted
    _wanted = True


def install() -> None:
    """Follow what happens to the layers of transformers' caches. Once; costs next to nothing before :func:`want`."""
    from transformers import cache_utils

    for layer in (cache_utils.DynamicLayer, cache_utils.StaticLayer):
        if not hasattr(layer.update, "__wrapped__"):
            following = _following_fixed if layer is cache_utils.StaticLayer else _following_growing
            layer.update = following(layer.update)
    for owner in (cache_utils.CacheLayerMixin, cache_utils.DynamicLayer, cache_utils.StaticLayer):
        for name in CHANGES:
            method = owner.__dict__.get(name)
            if method is not None and not hasattr(method, "__wrapped__"):
                setattr(owner, name, _forgetting(method))


def _following_growing(update: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(update)
    def followed(self: Any, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        if not _wanted or torch.compiler.is_compiling():
            return update(self, key_states, value_states, *args, **kwargs)
        kept = self.__dict__.setdefault(ATTRIBUTE, Kept())
        known = kept.sums is not None and kept.is_of(self.values)
        result = update(self, key_states, value_states, *args, **kwargs)
        if known:
            kept.follow(self.values, value_states.shape[-2])
        else:
            kept.forget()
        setattr(self.values, ATTRIBUTE, kept)
        return result

    return followed


def _following_fixed(update: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(update)
    def followed(self: Any, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        result = update(self, key_states, value_states, *args, **kwargs)
        kept = self.__dict__.get(ATTRIBUTE)
        compiling = torch.compiler.is_compiling()
        if kept is None:
            if not _wanted or compiling or not isinstance(getattr(self, "cumulative_length", None), Tensor):
                return result
            kept = self.__dict__[ATTRIBUTE] = Kept(fixed=True)
        if compiling:
            if kept.sums is not None:
                update_value_sums(kept.sums, self.values, value_states.shape[-2], _lengths(self))
            return result
        kept.lengths = _lengths(self)
        if kept.sums is not None and kept.is_of(self.values):
            update_value_sums(kept.sums, self.values, value_states.shape[-2], kept.lengths)
        else:
            kept.forget()
        setattr(self.values, ATTRIBUTE, kept)
        return result

    return followed


def _lengths(layer: Any) -> Tensor:
    """Keys there are, [batch]."""
    length: Tensor = layer.cumulative_length.to(torch.int32)
    return length.reshape(1).expand(layer.values.shape[0])


def _forgetting(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def changed(self: Any, *args: Any, **kwargs: Any) -> Any:
        kept = self.__dict__.get(ATTRIBUTE)
        if kept is not None and not (kept.fixed and method.__name__ == "reset"):
            kept.forget()
        return method(self, *args, **kwargs)

    return changed


def attention(
    plan: Plan, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, scaling: float | None
) -> Tensor | None:
    """Attention of few queries by the sums of the values' cache, [batch, n_q, heads, d_v]; None where there are none or
    they do not help: of many queries, of padded batches, of windows."""
    if stand_ins and stand_in() is not None:
        return None  # these are pieces of longer sequences
    kept: Kept | None = getattr(value, ATTRIBUTE, None)
    trains = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value))
    if kept is None or plan.pattern == "dense" or trains:
        return None
    n_q, n_k = query.shape[2], key.shape[2]
    compiling = torch.compiler.is_compiling()
    if kept.sums is None or (not compiling and not kept.is_of(value)):
        if compiling or (n_q > FEW and not kept.fixed):
            return None
        kept.begin(value)
    if n_q > FEW:
        return None
    lengths: Tensor | None = None
    causal = False
    band: _bands.Band | None = getattr(attention_mask, _bands.ATTRIBUTE, None)
    if band is None:
        if attention_mask is not None or kept.fixed or n_q > 1:
            return None
    elif band.padded:
        return None
    elif band.lengths is not None:
        lengths = band.lengths
    elif kept.fixed:
        return None
    elif band.window != (None, None):
        causal = band.window == (None, 0) and band.offset == n_k - n_q
        if not causal:
            return None
    out = attention_with_cache(
        query, key, value, lengths, sums=kept.sums, is_causal=causal, scale=scaling, **plan.options()
    )
    return out.transpose(1, 2).contiguous()
