"""Which transformers models can take attention from a name, and an error at load and at set for those that cannot.

transformers checks a name it knows ("sdpa") against the model and takes any registered one for granted. A model that
computes attention in its own code then either ignores the name, or is handed the boolean mask that belongs to it and
adds it to the scores as 0 and 1. Two methods of ``PreTrainedModel`` therefore get a check in front of them, and one
behind, that act on the names of this package alone.
"""

from __future__ import annotations

import functools
import inspect
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ..errors import DspattnError

PREFIX = "dspattn_"
OWN_CODE = "this model computes attention in its own code instead of looking it up by name"
# A module's class is chosen from a table by the implementation's name; ours is in no such table.
_TABLE_OF_CLASSES = re.compile(r"_CLASSES\[\s*(?:self\.)?config\._attn_implementation")
_ATTENTION_CLASS = re.compile(r"^class \w*Att(?:n|ention)\w*\(", re.MULTILINE)
_TOP_LEVEL_CLASS = re.compile(r"^class (\w+)\b.*\n(?:[ \t)].*\n|\n|#.*\n)*", re.MULTILINE)
_ATTENTION_NAME = re.compile(r"Att(?:n|ention)")
_LOOKS_UP = re.compile(r"ALL_ATTENTION_FUNCTIONS|\battention_interface\(")
_COMPUTES = re.compile(r"softmax\(|Softmax|scaled_dot_product_attention\(|multi_head_attention_forward\(")
_CALLS_SDPA = re.compile(r"scaled_dot_product_attention\(")
_TAKES_MASK = re.compile(r"\bmask\b|_mask\b")
# What some modules hand to the attention function that has no counterpart here: (name, where the value comes from).
_FOREIGN = re.compile(r"\b(indices|block_indices)=(self\.\w+|\w+)")
# Sinks and soft caps keep a model from PyTorch's own attention, which knows neither, and not from this package's.
_SERVED_HERE = re.compile(r"\b(?:s_aux|sinks|softcap)=self\.\w+")


def is_ours(name: object) -> bool:
    """Whether a model was asked for an implementation of this package."""
    return isinstance(name, str) and name.startswith(PREFIX)


@functools.cache
def source_of(cls: type) -> str:
    """The class's own source and that of its bases outside torch; "" where there is none to read."""
    parts = []
    for base in cls.__mro__:
        if base.__module__.startswith(("torch.", "builtins")) or base.__name__ == "PreTrainedModel":
            continue
        if "<locals>" in base.__qualname__ or "." in base.__qualname__:
            parts.append(_source_by_inspection(base))
        else:
            parts.append(_class_sources(base.__module__).get(base.__name__, ""))
    return "\n".join(parts)


@functools.cache
def _class_sources(module_name: str) -> dict[str, str]:
    """Source of every class at the top level of a module; inspect would parse the whole file once for each."""
    source = _source_by_inspection(sys.modules.get(module_name))
    return {match[1]: match[0] for match in _TOP_LEVEL_CLASS.finditer(source)}


@functools.cache
def _source_by_inspection(what: Any) -> str:
    try:
        return inspect.getsource(what)
    except (OSError, TypeError):
        return ""


def takes_a_name(cls: type) -> bool:
    """Whether an attention module asks transformers for the function to call."""
    return bool(_LOOKS_UP.search(source_of(cls)))


def computes_itself(cls: type) -> bool:
    """Whether a module is attention that no name reaches."""
    if cls is torch.nn.MultiheadAttention:
        return True
    if not _ATTENTION_NAME.search(cls.__name__) or takes_a_name(cls):
        return False
    return bool(_COMPUTES.search(source_of(cls)))


@functools.cache
def _class_refuses(cls: Any) -> str:
    """Why a model's class cannot take a name, as far as it can be said before it is built; "" where it may.

    That is transformers' verdict on setting a name and on masks for PyTorch's own attention (which are ours too), and
    tables of classes by name. Models without attention take any name.
    """
    source = _module_source(cls)
    if not _ATTENTION_CLASS.search(source):
        return ""
    if not cls._can_set_attn_implementation() or _TABLE_OF_CLASSES.search(source):
        return OWN_CODE
    # A model that takes no other attention by name either works on its masks, which it expects to be additive.
    only_for_want_of_them = cls._supports_flash_attn and _SERVED_HERE.search(source)
    if not cls._supports_sdpa and not only_for_want_of_them:
        foreign = sorted({name for name, value in _FOREIGN.findall(source) if value != "None"})
        more = f", and it adds {', '.join(foreign)} to its attention" if foreign else ""
        return f"transformers does not offer it masks for scaled_dot_product_attention, which dspattn needs{more}"
    return ""


def _module_source(cls: type) -> str:
    return _source_by_inspection(sys.modules.get(cls.__module__))


def _attention_classes(model: torch.nn.Module) -> tuple[set[type], set[type], set[type]]:
    """(those a name reaches, those that compute attention themselves, all that are called so) of a built model."""
    classes = {type(module) for module in model.modules()}
    named = {c for c in classes if _ATTENTION_NAME.search(c.__name__)}
    return {c for c in classes if takes_a_name(c)}, {c for c in classes if computes_itself(c)}, named


def _foreign_arguments(model: torch.nn.Module) -> list[str]:
    """What modules of the model add to attention that is not offered here."""
    found = set()
    for module in model.modules():
        cls: Any = type(module)
        if not takes_a_name(cls):
            continue
        for name, value in _FOREIGN.findall(source_of(cls)):
            if value == "None" or (value.startswith("self.") and getattr(module, value[5:], None) is None):
                continue
            found.add(f"{name} in {cls.__name__}")
    return sorted(found)


def raise_if_refused(model: Any, name: str) -> None:
    """Raise where the name would change nothing or, worse, something else; warn where it changes a part only."""
    served, own, named = _attention_classes(model)
    masked = {c for c in own if c is not torch.nn.MultiheadAttention and _TAKES_MASK.search(source_of(c))}
    reason = next(filter(None, map(_class_refuses, _model_classes(model))), "")
    if masked or (named and not served):
        reason = reason or OWN_CODE
    if reason:
        culprits = {c.__name__ for c in (masked or own or (set() if served else named))}
        raise _refusal(type(model), name, reason, culprits, any(map(calls_sdpa, own)))
    foreign = _foreign_arguments(model)
    if foreign:
        raise DspattnError(
            [
                f'attn_implementation: expected one that {type(model).__name__} can take, got "{name}": this model '
                f"adds to its attention what dspattn does not offer ({', '.join(foreign)}); load it with "
                'attn_implementation="sdpa" or "eager"'
            ]
        )
    if own:
        warnings.warn(
            f'attn_implementation="{name}": {type(model).__name__} keeps its own attention in '
            f"{', '.join(sorted(c.__name__ for c in own))}; the rest is switched",
            stacklevel=3,
        )


def calls_sdpa(cls: type) -> bool:
    """Whether a module goes through PyTorch's own function, where ``dspattn.use`` reaches it."""
    return bool(_CALLS_SDPA.search(source_of(cls)))


def _model_classes(model: Any) -> Iterator[Any]:
    """The classes of the model and the models inside it that have attention."""
    from transformers import PreTrainedModel

    for module in model.modules():
        if isinstance(module, PreTrainedModel) and any(_has_attention(type(part)) for part in module.modules()):
            yield type(module)


def _has_attention(cls: type) -> bool:
    return takes_a_name(cls) or computes_itself(cls)


def _refusal(cls: type, name: str, reason: str, own: set[str], sdpa: bool) -> DspattnError:
    where = f" (in {', '.join(sorted(own))})" if own and reason == OWN_CODE else ""
    pattern = ":".join(part for part in name.removeprefix(PREFIX).split("_") if part.isdecimal()) or "dense"
    advice = 'load it with attn_implementation="eager", which leaves its attention as it is'
    if sdpa:
        advice = (
            f'load it with attn_implementation="sdpa" and call it inside dspattn.use("{pattern}"), which prunes its '
            "calls of scaled_dot_product_attention"
        )
    return DspattnError(
        [f'attn_implementation: expected one that {cls.__name__} can take, got "{name}": {reason}{where}; {advice}']
    )


def install(model_class: Any) -> None:
    """Put the checks around the methods of ``PreTrainedModel``; safe to call again."""
    if getattr(model_class.set_attn_implementation, "_dspattn", False):
        return

    def checked_at_init(original: Callable[..., str]) -> Callable[..., str]:
        @functools.wraps(original)
        def get_correct_attn_implementation(self: Any, requested: str | None, *args: Any, **kwargs: Any) -> str:
            cls: Any = type(self)
            reason = _class_refuses(cls) if is_ours(requested) else ""
            if requested is not None and reason:
                raise _refusal(cls, requested, reason, set(), bool(_CALLS_SDPA.search(_module_source(cls))))
            return original(self, requested, *args, **kwargs)

        return get_correct_attn_implementation

    def checked_when_built(original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def post_init(self: Any) -> None:
            original(self)
            name = self.config._attn_implementation
            if is_ours(name):
                raise_if_refused(self, name)

        return post_init

    def checked_at_set(original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def set_attn_implementation(self: Any, attn_implementation: Any, *args: Any, **kwargs: Any) -> None:
            for part, name in _requests(self, self.config, attn_implementation):
                raise_if_refused(part, name)
            return original(self, attn_implementation, *args, **kwargs)

        set_attn_implementation._dspattn = True  # type: ignore[attr-defined]
        return set_attn_implementation

    model_class.get_correct_attn_implementation = checked_at_init(model_class.get_correct_attn_implementation)
    model_class.post_init = checked_when_built(model_class.post_init)
    model_class.set_attn_implementation = checked_at_set(model_class.set_attn_implementation)


def _requests(model: Any, config: Any, requested: Any) -> Iterator[tuple[Any, str]]:
    """The models inside ``model`` that are asked for an implementation of this package, from a name or a dict of names
    by sub-configuration."""
    if is_ours(requested):
        parts = [module for module in model.modules() if getattr(module, "config", None) is config]
        yield (parts[0] if parts else model), requested
    elif isinstance(requested, dict):
        yield from _requests(model, config, requested.get(""))
        for key in config.sub_configs:
            inner = getattr(config, key)
            if inner is not None:
                yield from _requests(model, inner, requested.get(key))
