"""``dspattn.apply``: put pruned attention under a model and make sure that it is there; ``restore`` takes it away.

Three kinds of attention layers are served: modules of transformers that look their attention up by name, PyTorch's
``nn.MultiheadAttention``, and any other module that calls ``scaled_dot_product_attention``. Which layers a model has is
not guessed from its structure: one call of the model with the user's own inputs shows every attention call and the
module it comes from, before the switch and after it.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, Literal

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from . import nn
from ._layer_keys import Heads, Layers, check_keys, require_module
from .errors import DspattnError
from .functional import attention
from .integrations import _refusal
from .integrations._redirect import Redirect
from .integrations.sdpa import use
from .patterns import Grouping, Rest, Selection, parse_grouping, parse_pattern, parse_rest, parse_selection, prunes
from .plans import Plan

Kind = Literal["by name", "nn.MultiheadAttention", "scaled_dot_product_attention", "own code"]
# Kept on the modules themselves, as plain values: what copies or pickles a model takes them along, and the copy can be
# restored without the original.
MARK = "_dspattn_applied"  # on the model
PLAN = "_dspattn_plan"  # on an attention module: what it is to compute
BEFORE = "_dspattn_before"  # on a transformers model: the name that its attention had


@dataclass(frozen=True)
class Layer:
    """One attention layer of a model and what became of it."""

    index: int  # in the order of the calls
    name: str  # of the module, as in ``model.named_modules()``
    kind: Kind
    plan: Plan | None  # None: left as it was
    reason: str  # why it was left, or a remark; "" otherwise
    n_k: int = 0  # keys it saw in the traced call

    @property
    def changed(self) -> bool:
        return self.plan is not None

    def __str__(self) -> str:
        what = f"left: {self.reason}" if self.plan is None else "; ".join(filter(None, (str(self.plan), self.reason)))
        return f"{self.index:4d}  {self.name}: {what}"


@dataclass(frozen=True)
class Applied:
    """The report of :func:`apply`."""

    layers: tuple[Layer, ...]

    @property
    def changed(self) -> tuple[Layer, ...]:
        return tuple(layer for layer in self.layers if layer.changed)

    @property
    def left(self) -> tuple[Layer, ...]:
        return tuple(layer for layer in self.layers if not layer.changed)

    def __str__(self) -> str:
        head = f"{len(self.changed)} of {len(self.layers)} attention layers changed"
        return "\n".join([head, *map(str, self.layers)])


@dataclass
class _Trace:
    """Attention calls of one run of a model, by the module they come from."""

    stack: list[torch.nn.Module]
    calls: dict[torch.nn.Module, tuple[Kind, int]]  # what kind of call, and the keys of the longest one
    pruned: dict[torch.nn.Module, int]  # calls that ran under a plan

    def saw(self, module: torch.nn.Module, kind: Kind, n_k: int) -> None:
        """Note a call. A module that looks as if it computed attention itself may turn out to call PyTorch's."""
        known, longest = self.calls.get(module, ("own code", 0))
        self.calls[module] = (kind if known == "own code" else known, max(n_k, longest))


_TRACE: ContextVar[_Trace | None] = ContextVar("dspattn_trace", default=None)


def apply(
    model: torch.nn.Module,
    pattern: str = "2:4",
    *,
    example: Any = None,
    grouping: Grouping = "interleaved",
    rest: Rest = "drop",
    selection: Selection = "own",
    layers: Layers = None,
    skip: Sequence[int | str] = (),
    heads: Heads = None,
) -> Applied:
    """Prune a model's attention, layer by layer, and check by a call that it is so.

    The switch is part of the model: a deep copy, a pickle and compiled code have it, its ``state_dict`` does not.

    Args:
        model: any ``torch.nn.Module``; transformers models, and modules that contain them, go by name.
        pattern: ``"2:4"``, ``"1:2"``, any ``"N:M"``, or ``"dense"``.
        example: what the model is called with for the check: a dict of keyword arguments, a tuple of positional ones or
            one tensor. May be left out for transformers models that read token ids. A text of the usual length also
            tells which layers see too few keys for anything to be pruned.
        grouping: ``"interleaved"`` or ``"consecutive"``.
        rest: ``"drop"``, or ``"mean"`` (for inference), as in :func:`dspattn.attention`.
        selection: ``"own"``, or ``"shared"`` between the query heads that share a key head.
        layers: which layers, by number (in the order of the calls) or name (``*`` stands for anything); a dict gives
            each its own pattern, and leaves those alone that it does not name. Default: all.
        skip: layers to leave as they are.
        heads: query heads to prune, in every layer or, as a dict, by layer; the others stay dense.

    Returns:
        A report: every attention layer, its pattern, and of those that were left, why.

    Raises:
        DspattnError: nothing changed, or a layer that should have does not. The model is then as it was.

    Example:
        >>> encoder = torch.nn.TransformerEncoderLayer(64, 4, batch_first=True).eval()
        >>> print(apply(encoder, "2:4", example=torch.randn(1, 100, 64)))
        1 of 1 attention layers changed
           0  self_attn: 2:4 interleaved
        >>> restore(encoder)
    """
    parse_pattern(pattern)
    parse_grouping(grouping)
    parse_rest(rest)
    parse_selection(selection)
    require_module(model)
    check_keys(layers, skip, heads)
    for name, module in model.named_modules():
        if MARK in vars(module):
            what = f"its module {name} was" if name else "it was"
            raise DspattnError(
                [f"model: expected one that dspattn.apply has not switched yet, but {what}; dspattn.restore undoes it"]
            )
    call = _caller(model, example)
    names = {module: name for name, module in model.named_modules()}
    found = _run(model, call)
    calls = {module: entry for module, entry in found.calls.items() if module in names}
    if not calls:
        raise DspattnError(
            [
                "model: expected attention layers; none was seen in the traced call, so nothing changed (a model with "
                'a dspattn name must be set back first, with set_attn_implementation("sdpa"); models made from one '
                "config object share the name)"
            ]
        )
    planned = [
        _planned(index, names[module], kind, n_k, Plan(pattern, grouping, None, rest, selection), layers, skip, heads)
        for index, (module, (kind, n_k)) in enumerate(calls.items())
    ]
    _check_selection(planned, layers, skip, heads)
    if not any(layer.changed for layer in planned):
        raise DspattnError(["model: nothing would change:", *map(str, planned)])
    object.__setattr__(model, MARK, _Mark())
    try:
        for module, layer in zip(calls, planned, strict=True):
            if layer.plan is not None:
                _switch(module, layer)
        if any(layer.kind == "by name" for layer in planned):
            _switch_names(model, rest)
        after = _run(model, call)
        missed = [
            f"{layer.name}: expected pruned attention calls, saw none"
            for module, layer in zip(calls, planned, strict=True)
            if layer.changed and not after.pruned.get(module)
        ]
        if missed:
            raise DspattnError(["model: expected every chosen layer to change in the traced call", *missed])
    except BaseException:
        restore(model)
        raise
    return Applied(tuple(planned))


def restore(model: torch.nn.Module) -> None:
    """Undo :func:`apply`.

    Args:
        model: the module that was given to :func:`apply`, a copy of it, or one that contains it.

    Example:
        >>> encoder = torch.nn.TransformerEncoderLayer(64, 4, batch_first=True)
        >>> applied = apply(encoder, "2:4", example=torch.randn(1, 100, 64))
        >>> restore(encoder)
        >>> type(encoder.self_attn).__module__
        'torch.nn.modules.activation'
    """
    require_module(model)
    if not any(MARK in vars(module) for module in model.modules()):
        raise DspattnError(["model: expected one that dspattn.apply has switched, got one that it has not"])
    module: Any
    for module in model.modules():
        if PLAN in vars(module):
            _switch_back(module)
        if BEFORE in vars(module):
            module.config._attn_implementation_internal = getattr(module, BEFORE)
        for attribute in (BEFORE, MARK):
            if attribute in vars(module):
                object.__delattr__(module, attribute)


def _caller(model: torch.nn.Module, example: Any) -> Callable[[], Any]:
    """The traced call."""
    if example is None:
        example = getattr(model, "dummy_inputs", None)
        if not isinstance(example, dict) or getattr(model, "main_input_name", "") != "input_ids":
            raise DspattnError(
                ["example: expected what the model is called with (a dict, a tuple or a tensor), got None"]
            )
    if isinstance(example, Mapping):
        return lambda: model(**{name: _own(value) for name, value in example.items()})
    if isinstance(example, tuple):
        return lambda: model(*_own(example))
    if isinstance(example, Tensor):
        return lambda: model(example)
    raise DspattnError([f"example: expected a dict, a tuple or a tensor, got {type(example).__name__}"])


def _own(value: Any) -> Any:
    """The value for one call: a model may write its results into the dicts and lists that it is given."""
    if type(value) in (tuple, list):
        return type(value)(_own(part) for part in value)
    if isinstance(value, MutableMapping):
        copied = copy.copy(value)
        for key in value:
            copied[key] = _own(value[key])
        return copied
    return value


def called(model: torch.nn.Module, example: Any) -> Any:
    """The model's output for an example, in evaluation."""
    modes = {module: module.training for module in model.modules()}
    try:
        model.eval()
        with torch.no_grad():
            return _caller(model, example)()
    finally:
        for module, training in modes.items():
            module.training = training


def _planned(
    index: int, name: str, kind: Kind, n_k: int, plan: Plan, layers: Layers, skip: Sequence[int | str], heads: Heads
) -> Layer:  # fmt: skip
    layer = Layer(index, name, kind, None, "", n_k)
    if kind == "own code":
        return replace(layer, reason="computes attention in its own code")
    if any(_names(key, layer) for key in skip):
        return replace(layer, reason="in skip")
    chosen: str | None = plan.pattern
    if isinstance(layers, Mapping):
        chosen = next((each for key, each in layers.items() if _names(key, layer)), None)
    elif layers is not None and not any(_names(key, layer) for key in layers):
        chosen = None
    if chosen is None:
        return replace(layer, reason="not in layers")
    parse_pattern(chosen)
    some: Iterable[int] | None
    if isinstance(heads, Mapping):
        some = next((each for key, each in heads.items() if _names(key, layer)), None)
    else:
        some = heads
    few = chosen != "dense" and not prunes(n_k, chosen, plan.grouping)
    remark = f"{n_k} keys in the traced call, too few for anything to be pruned" if few else ""
    return replace(
        layer, plan=replace(plan, pattern=chosen, heads=None if some is None else tuple(some)), reason=remark
    )


def _names(key: int | str, layer: Layer) -> bool:
    return key == layer.index if isinstance(key, int) else fnmatchcase(layer.name, key)


def _check_selection(planned: list[Layer], layers: Layers, skip: Sequence[int | str], heads: Heads) -> None:
    """Every number and name must mean a layer: a misspelt one would leave it out without a word."""
    reasons = []
    for argument, keys in (("layers", layers), ("skip", skip), ("heads", heads if isinstance(heads, Mapping) else ())):
        if isinstance(keys, str):
            raise DspattnError([f"{argument}: expected a list, got {keys!r}"])
        for key in keys or ():
            if not any(_names(key, layer) for layer in planned):
                known = ", ".join(layer.name for layer in planned)
                reasons.append(f"{argument}: expected numbers below {len(planned)} or names among {known}, got {key!r}")
    if reasons:
        raise DspattnError(reasons)


def _run(model: torch.nn.Module, call: Callable[[], Any]) -> _Trace:
    """Call the model in evaluation and see which modules compute attention."""
    trace = _Trace([], {}, {})
    handles = []
    modes = {module: module.training for module in model.modules()}

    def enter(module: torch.nn.Module, *_: Any) -> None:
        trace.stack.append(module)
        if isinstance(module, torch.nn.MultiheadAttention):
            return
        if _refusal.computes_itself(type(module)) and not _refusal.calls_sdpa(type(module)):
            trace.saw(module, "own code", 0)

    def leave(module: torch.nn.Module, *_: Any) -> None:
        trace.stack.pop()

    for module in modes:
        handles.append(module.register_forward_pre_hook(enter))
        handles.append(module.register_forward_hook(leave, always_call=True))
    token = _TRACE.set(trace)
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        model.eval()
        # Compiled code asks neither hooks nor modes that came after it.
        with torch.no_grad(), torch.compiler.set_stance("force_eager"), _Watch(trace):
            call()
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
        _TRACE.reset(token)
        for handle in handles:
            handle.remove()
        for module, training in modes.items():
            module.training = training
    return trace


class _Watch(TorchFunctionMode):
    """Notes attention calls with the module they come from."""

    def __init__(self, trace: _Trace) -> None:
        super().__init__()
        self.trace = trace

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.trace.stack and func in (
            torch.nn.functional.scaled_dot_product_attention,
            torch.nn.functional.multi_head_attention_forward,
        ):
            module = self.trace.stack[-1]
            key = args[1] if len(args) > 1 else kwargs["key"]
            if isinstance(module, torch.nn.MultiheadAttention):
                self.trace.saw(module, "nn.MultiheadAttention", key.shape[0])
            elif _refusal.takes_a_name(type(module)):
                self.trace.saw(module, "by name", key.shape[-2])
            else:
                self.trace.saw(module, "scaled_dot_product_attention", key.shape[-2])
        elif self.trace.stack and getattr(func, "__name__", "") == "softmax":
            module = self.trace.stack[-1]  # "eager" attention of a module that looks its function up
            if _refusal.takes_a_name(type(module)) and args[0].dim() == 4:
                self.trace.saw(module, "by name", args[0].shape[-1])
        return func(*args, **kwargs)


class _LayerBlock(use):
    """``use`` around one call of a layer, which need not compute attention every time."""

    def tell(self) -> None:
        pass


class _InCompiledCode:
    """What a layer's block is to code that is compiled, in which nothing is counted."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    def answer(self, *args: Any, **kwargs: Any) -> Any:
        return attention(*args, **(self.plan.options() | kwargs))

    def leave_to_pytorch(self, reasons: list[str], function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        raise DspattnError(reasons)

    def tell(self) -> None:
        pass


@dataclass
class _Mark:
    """On a model that was switched. ``rest`` is of the plans of those layers that go by name."""

    rest: Rest | None = None

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if self.rest is not None:  # read from a file, perhaps by a process that has switched nothing yet
            _register(self.rest)


class _Forward:
    """``forward`` of a module that calls scaled_dot_product_attention: its own, in a block of the module's plan. It is
    an object and no function so that a copy of the module has one of the copy."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = module
        self.before = vars(module).get("forward")  # where another package has put one in the class's place

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        plan: Plan | None = getattr(self.module, PLAN, None)
        if plan is None:  # restored behind another package's back, whose own forward still leads here
            return self.inner(*args, **kwargs)
        if torch.compiler.is_compiling():
            with Redirect(_InCompiledCode(plan)):
                return self.inner(*args, **kwargs)
        with _LayerBlock(**plan.options()) as switched:
            out = self.inner(*args, **kwargs)
        if switched.served:
            _count(self.module)
        return out

    def inner(self, *args: Any, **kwargs: Any) -> Any:
        if self.before is not None:
            return self.before(*args, **kwargs)
        return type(self.module).forward(self.module, *args, **kwargs)


def _switch(module: torch.nn.Module, layer: Layer) -> None:
    """Make one module compute its plan."""
    plan = layer.plan
    assert plan is not None
    if layer.kind == "nn.MultiheadAttention":
        if plan.heads is not None:
            raise DspattnError([f"heads: expected None for nn.MultiheadAttention ({layer.name}), got {plan.heads}"])
        if type(module) is not torch.nn.MultiheadAttention:
            raise DspattnError([f"{layer.name}: expected nn.MultiheadAttention itself, got {type(module).__name__}"])
        module.__class__ = nn.MultiheadAttention
        for option, chosen in plan.options().items():
            setattr(module, option, chosen)
        module.register_forward_hook(_count)
    elif layer.kind == "scaled_dot_product_attention":
        if plan.heads is not None:
            raise DspattnError([f"heads: expected None for {layer.name} (it calls PyTorch directly), got {plan.heads}"])
        module.forward = _Forward(module)
    object.__setattr__(module, PLAN, plan)


def _switch_back(module: Any) -> None:
    plan: Plan = getattr(module, PLAN)
    forward = vars(module).get("forward")
    if isinstance(module, nn.MultiheadAttention):
        for key, hook in list(module._forward_hooks.items()):
            if hook is _count:
                del module._forward_hooks[key]
        object.__setattr__(module, "__class__", torch.nn.MultiheadAttention)
        for option in plan.options():
            delattr(module, option)
    elif isinstance(forward, _Forward):
        del module.forward
        if forward.before is not None:
            module.forward = forward.before
    object.__delattr__(module, PLAN)


def _count(module: torch.nn.Module, *_: Any) -> None:
    if torch.compiler.is_compiling():
        return
    trace = _TRACE.get()
    if trace is not None:
        trace.pruned[module] = trace.pruned.get(module, 0) + 1


def _register(rest: Rest) -> str:
    """The name under which each attention module's own plan runs."""
    from .integrations import huggingface

    return huggingface.register_planned(PLAN, _count, rest)


def _switch_names(model: torch.nn.Module, rest: Rest) -> None:
    """Give that name to every transformers model inside."""
    from transformers import PreTrainedModel

    name = _register(rest)
    getattr(model, MARK).rest = rest
    inside: set[torch.nn.Module] = set()
    for module in model.modules():
        if not isinstance(module, PreTrainedModel) or module in inside:
            continue
        inside.update(module.modules())
        for part in module.modules():
            if isinstance(part, PreTrainedModel):
                object.__setattr__(part, BEFORE, part.config._attn_implementation)
        with contextlib.suppress(AttributeError):
            module.set_attn_implementation(name)
