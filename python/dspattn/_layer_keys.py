"""How the layers and heads of a model are named to :func:`dspattn.apply`, and what is no such name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from .errors import DspattnError

Layers = Sequence[int | str] | Mapping[int | str, str] | None
Heads = Sequence[int] | Mapping[int | str, Sequence[int]] | None


def require_module(model: Any) -> None:
    if not isinstance(model, torch.nn.Module):
        raise DspattnError([f"model: expected a torch.nn.Module, got {type(model).__name__}"])


def check_keys(layers: Layers, skip: Sequence[int | str], heads: Heads) -> None:
    """Layers go by number or name, heads by number; a flag is no number."""

    def is_number(key: Any) -> bool:
        return isinstance(key, int) and not isinstance(key, bool)

    reasons = []
    for argument, keys in (("layers", layers), ("skip", skip), ("heads", heads)):
        if keys is None and argument != "skip":
            continue
        if isinstance(keys, str) or not isinstance(keys, (Mapping, Iterable)):
            reasons.append(f"{argument}: expected a list, got {keys!r}")
            continue
        numbers_alone = argument == "heads" and not isinstance(keys, Mapping)
        reasons += [
            f"{argument}: expected {'numbers' if numbers_alone else 'numbers or names'}, got {key!r}"
            for key in keys
            if not is_number(key) and (numbers_alone or not isinstance(key, str))
        ]
    if reasons:
        raise DspattnError(reasons)
