"""Attention for transformers models that prunes by any rule and lets an observer see every score."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from .rules import DENSE, Rule, kept_keys

NAME = "dspattn_theory"

# observer(layer, scores, weights): scores with -inf where masked, weights their softmax; [batch, heads, n, n].
Observer = Callable[[int, Tensor, Tensor], None]


class _State:
    rule: Rule = DENSE
    observer: Observer | None = None


def _attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, scaling: float, **_: Any
) -> tuple[Tensor, Tensor]:
    repeats = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    scores = query @ key.transpose(2, 3) * scaling
    if attention_mask is not None:
        # transformers marks masked keys by the least float.
        scores = scores.masked_fill(attention_mask < -1e30, float("-inf"))
    if _State.rule is not DENSE:
        scores = scores.masked_fill(~kept_keys(scores, _State.rule), float("-inf"))
    weights = scores.softmax(-1)
    if _State.observer is not None:
        _State.observer(module.layer_idx, scores, weights)
    return (weights @ value).transpose(1, 2).contiguous(), weights


def register() -> str:
    """Makes the attention known to transformers; returns its name for ``set_attn_implementation``."""
    transformers: Any = importlib.import_module("transformers")
    masking: Any = importlib.import_module("transformers.masking_utils")
    transformers.AttentionInterface.register(NAME, _attend)
    masking.AttentionMaskInterface.register(NAME, masking.eager_mask)
    return NAME


@contextmanager
def using(rule: Rule = DENSE, observer: Observer | None = None) -> Iterator[None]:
    """Within the block, models set to this attention prune by ``rule`` and show their scores to ``observer``."""
    before = (_State.rule, _State.observer)
    _State.rule, _State.observer = rule, observer
    try:
        with torch.inference_mode():
            yield
    finally:
        _State.rule, _State.observer = before
