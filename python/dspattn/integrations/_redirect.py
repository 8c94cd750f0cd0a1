"""What ``dspattn.use`` stands on: which block a call belongs to, and the mode that sees the call.

Two things hold a block. A context variable says which blocks are open *here*, in this thread and task; it decides.
A torch-function mode on the thread's stack makes PyTorch ask at all. The modes of all blocks are interchangeable, so
that tasks that take turns in a thread may leave their blocks in any order. Nothing of PyTorch is saved, changed and
put back.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from typing import Any, Protocol

import torch
from torch._ops import HigherOrderOperator
from torch.overrides import TorchFunctionMode

SDPA = torch.nn.functional.scaled_dot_product_attention
_SDPA_PACKET = torch.ops.aten.scaled_dot_product_attention  # as code calls it that names operators
_SDPA_OPERATOR = torch.ops.aten.scaled_dot_product_attention.default  # as exported programs call it
_MULTI_HEAD: Any = torch.nn.functional.multi_head_attention_forward
# Whole layers in one call. PyTorch's modules stand back from them where a mode is on, except in code that is compiled.
_FUSED_LAYER: Any = torch._transformer_encoder_layer_fwd
_FUSED_MODULE: Any = torch._native_multi_head_attention
# The one method of tensors, among those that models use, that a compiler cannot trace when a mode hands it over by name
# (it calls super()); called on the tensor it is as good as without a mode.
_UNFLATTEN: Any = torch.Tensor.unflatten


class Owner(Protocol):
    """A block, as ``dspattn.use`` is one: what becomes of the calls made in it."""

    def answer(self, *args: Any, **kwargs: Any) -> Any:
        """The result of a call of scaled_dot_product_attention."""

    def leave_to_pytorch(self, reasons: list[str], function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The result of a call that cannot be served, or an error."""

    def tell(self) -> None:
        """Say at a block's end what was not served."""


# The open blocks, the innermost last. None stands for "as if there were no block".
Blocks = tuple[Owner | None, ...]
_open: ContextVar[Blocks] = ContextVar("dspattn_use", default=())


def innermost() -> Owner | None:
    """The block that answers for this thread and task, if any."""
    blocks = _open.get()
    return blocks[-1] if blocks else None


# The open blocks, and how many modes are on the thread's stack.
State = tuple[Blocks, int]


def _state() -> State:
    return _open.get(), torch._C._len_torch_function_stack()


def _back_to(wanted: State) -> None:
    """Undo what has been opened since; safe to call again."""
    blocks, modes = wanted
    _open.set(blocks)
    while torch._C._len_torch_function_stack() > modes:
        torch._C._pop_torch_function_stack()  # the uppermost, whichever block it came from


def enter(owner: Owner | None) -> None:
    """Open a block here. Interrupted, as by Ctrl-C, it takes back what it did."""
    before = None
    try:
        before = _state()
        Redirect(owner).__enter__()
        _open.set((*before[0], owner))
    except BaseException:
        if before is not None:
            _back_to(before)
        raise


def leave(owner: Owner | None, wanted: list[State]) -> bool:
    """Close the latest block of this owner; True when none of its own is left open here.

    Args:
        owner: whose.
        wanted: an empty list. Where this was interrupted, as by Ctrl-C, another call with the same list does the rest.
    """
    if not wanted:
        blocks, modes = _state()
        latest = max([i for i, block in enumerate(blocks) if block is owner], default=len(blocks))
        wanted.append((blocks[:latest] + blocks[latest + 1 :], modes - 1))
    _back_to(wanted[0])
    return all([block is not owner for block in wanted[0][0]])


class as_in:  # noqa: N801 - reads as what it does: with as_in(owner):
    """Run what is inside as it would run in a block of this owner, None: in no block at all."""

    def __init__(self, owner: Owner | None) -> None:
        self.owner = owner

    def __enter__(self) -> None:
        enter(self.owner)

    def __exit__(self, *exception: object) -> None:
        left: list[State] = []
        try:
            leave(self.owner, left)
        except BaseException:
            leave(self.owner, left)
            raise


class Redirect(TorchFunctionMode):
    """Sees every PyTorch function call of the thread; hands those of attention to the block they are made in."""

    def __init__(self, owner: Owner | None) -> None:
        super().__init__()
        self.owner = owner

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        is_attention = func is SDPA or func is _SDPA_OPERATOR or func is _SDPA_PACKET
        is_fused = func is _FUSED_LAYER or func is _FUSED_MODULE
        if func is _UNFLATTEN:
            return args[0].unflatten(*args[1:], **kwargs)
        if not (is_attention or is_fused or func is _MULTI_HEAD):
            if self.owner is not None and torch.compiler.is_compiling() and isinstance(func, HigherOrderOperator):
                return _with_functions(self.owner, func, args, kwargs)
            return func(*args, **kwargs)
        # A compiler traces a whole block; it follows the mode itself and knows no context variables.
        owner = self.owner if torch.compiler.is_compiling() else innermost()
        if owner is None:
            return func(*args, **kwargs)
        if is_attention:
            return owner.answer(*args, **kwargs)
        if is_fused:
            reason = (
                f"{func.__name__}: expected scaled_dot_product_attention, got PyTorch's fused layer, which cannot be "
                "redirected; torch.backends.mha.set_fastpath_enabled(False) switches it off"
            )
            return owner.leave_to_pytorch([reason], func, *args, **kwargs)
        if not torch.compiler.is_compiling():
            return _multi_head(*args, **kwargs)
        _traced.owner = owner
        out = _multi_head(*args, **kwargs)
        _traced.owner = None
        return out


def _with_functions(owner: Owner, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of an operator that a compiler hands functions to, as checkpointing becomes one. It traces them while
    no mode is on, and none may be put on there: attention in them is not seen, but found in what was traced."""
    out = operator(*args, **kwargs)
    if not has_unseen_attention():
        return out
    reason = (
        f"{operator.__name__}: expected attention outside of functions that are handed to an operator, or code that is "
        "not compiled, got attention in one that torch.compile traces, as under torch.utils.checkpoint inside of "
        "compiled code, which cannot be redirected; compile what is checkpointed instead, or call dspattn.attention"
    )
    return owner.leave_to_pytorch([reason], lambda: out)


def has_unseen_attention() -> bool:
    """Called while tracing: whether functions of the operator that was traced last call PyTorch's attention."""
    try:
        from torch._dynamo.symbolic_convert import InstructionTranslator

        traced = InstructionTranslator.current_tx().output
        latest = next(n for n in reversed(traced.graph.nodes) if isinstance(n.target, HigherOrderOperator))
        bodies = [traced.nn_modules[n.target] for n in latest.all_input_nodes if n.op == "get_attr"]
    except (ImportError, AttributeError, KeyError, StopIteration):
        return False
    graphs = [part.graph for body in bodies for part in body.modules() if isinstance(part, torch.fx.GraphModule)]
    return any(node.target in _SEEN for graph in graphs for node in graph.nodes)


_SEEN = (SDPA, _SDPA_PACKET, _SDPA_OPERATOR, _FUSED_LAYER, _FUSED_MODULE)
# What torch.compiler.assume_constant_result does, which would load the compiler with the package.
has_unseen_attention._dynamo_marked_constant = True  # type: ignore[attr-defined]


class _Traced:
    """Which block answers for what a compiler traces inside of multi_head_attention_forward, one trace at a time."""

    owner: Owner | None = None


_traced = _Traced()


def _answer(*args: Any, **kwargs: Any) -> Any:
    """scaled_dot_product_attention, for multi_head_attention_forward."""
    owner = _traced.owner if torch.compiler.is_compiling() else innermost()
    return SDPA(*args, **kwargs) if owner is None else owner.answer(*args, **kwargs)


def _multi_head_that_asks() -> Callable[..., Any]:
    """torch.nn.functional.multi_head_attention_forward for which scaled_dot_product_attention means `_answer`.

    PyTorch asks no mode about what a function calls that went through one already. So the function that runs is a copy
    of PyTorch's with names of its own; nothing is replaced that another thread could see. There is one copy for all
    blocks, so that code compiled in one serves the next of the same pattern; it has no module's name, or a compiler
    would look up the names of PyTorch's module instead.
    """
    names = {**_MULTI_HEAD.__globals__, "scaled_dot_product_attention": _answer}
    del names["__name__"]
    copy = types.FunctionType(_MULTI_HEAD.__code__, names, _MULTI_HEAD.__name__, _MULTI_HEAD.__defaults__)
    copy.__kwdefaults__ = _MULTI_HEAD.__kwdefaults__
    names[_MULTI_HEAD.__name__] = copy  # what it hands to further modes
    return copy


_multi_head = _multi_head_that_asks()
