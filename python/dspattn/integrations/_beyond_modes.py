"""Two places of PyTorch that no torch-function mode reaches, each made to ask which block it is in.

Gradient checkpointing runs a function a second time in the backward pass, often after the block and sometimes in
another thread: so it is for blocks of ``dspattn.parallel.context``, too. TorchScript runs attention without asking
Python at all. Both are wrapped once, when the package is imported, and stay so; outside of any block they do what they
did.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.utils.checkpoint

from .. import _running
from . import _redirect

ATTENTION_OPERATORS = (
    "aten::scaled_dot_product_attention",
    "aten::_native_multi_head_attention",
    "aten::_transformer_encoder_layer_fwd",
)


def install() -> None:
    """Safe to call again."""
    # The classes, not the functions that use them: those are imported by name elsewhere.
    frame: Any = torch.utils.checkpoint._CheckpointFrame  # use_reentrant=False
    function: Any = torch.utils.checkpoint.CheckpointFunction  # use_reentrant=True
    if not hasattr(function, "dspattn_remembers_blocks"):
        frame.__init__ = _first_argument_remembers(frame.__init__)
        function.forward = staticmethod(_first_argument_remembers(function.forward))
        function.dspattn_remembers_blocks = True
    called: tuple[Any, ...] = (torch._C.ScriptFunction, torch._C.ScriptMethod)
    for scripted in called:
        if not hasattr(scripted, "dspattn_asks_for_blocks"):
            scripted.__call__ = _asking(scripted.__call__)
            scripted.dspattn_asks_for_blocks = True


def _first_argument_remembers(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method (self or ctx, function, ...) whose function will run in the block that is open now."""

    @functools.wraps(method)
    def remembering(target: Any, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        owner, parallel = _redirect.innermost(), _running.stand_in()

        def as_in_forward(*inner_args: Any, **inner_kwargs: Any) -> Any:
            if owner is parallel is None and _redirect.innermost() is _running.stand_in() is None:
                return function(*inner_args, **inner_kwargs)
            with _running.as_in_parallel(parallel), _redirect.as_in(owner):
                return function(*inner_args, **inner_kwargs)

        return method(target, as_in_forward, *args, **kwargs)

    return remembering


def _asking(call: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(call)
    def asked(scripted: Any, *args: Any, **kwargs: Any) -> Any:
        owner = _redirect.innermost()
        if owner is None:
            return call(scripted, *args, **kwargs)
        found = [name for name in ATTENTION_OPERATORS if scripted.inlined_graph.findAllNodes(name)]
        if not found:
            return call(scripted, *args, **kwargs)
        reason = (
            f"{scripted.name}: expected Python code, got TorchScript (torch.jit.trace or script) that calls "
            f"{', '.join(found)}, which cannot be redirected"
        )
        return owner.leave_to_pytorch([reason], call, scripted, *args, **kwargs)

    return asked
