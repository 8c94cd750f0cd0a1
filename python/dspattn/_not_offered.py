"""What the package does not offer, said in its own words: derivatives in forward mode, and TorchScript's compiler."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .errors import DspattnError

Function = TypeVar("Function", bound=Callable[..., Any])


def forward_mode(*_: Any) -> NoReturn:
    raise DspattnError(
        [
            "query, key, value: expected no tangents (derivatives in forward mode, jvp and jacfwd, are not offered; "
            "torch.func.vjp and jacrev are), got a dual tensor"
        ]
    )


def refuse_tangents(arguments: Iterable[Any]) -> None:
    if forward_ad._current_level < 0:
        return
    for argument in arguments:
        if isinstance(argument, Tensor) and forward_ad.unpack_dual(argument).tangent is not None:
            forward_mode()


class Gradients(torch.library.Library):
    """Where operators' gradients are registered. PyTorch's own place for them lets tangents go in silence."""

    def __init__(self) -> None:
        super().__init__("dspattn", "FRAGMENT")

    def impl(self, op_name: Any, fn: Any, dispatch_key: str = "", **options: Any) -> None:
        def without_tangents(*arguments: Any, **named: Any) -> Any:
            refuse_tangents(arguments)
            return fn(*arguments, **named)

        super().impl(op_name, without_tangents, dispatch_key, **options)


GRADIENTS = Gradients()


def not_scriptable(function: Function) -> Function:
    """A function or class that torch.jit.script refuses by name: it asks what it is given for this attribute."""

    def refuse(*_: Any) -> NoReturn:
        raise DspattnError(
            [
                f"torch.jit.script: expected code without dspattn.{function.__name__}, which it does not compile "
                "(torch.compile, torch.export and torch.jit.trace do), got a call of it"
            ]
        )

    function.__prepare_scriptable__ = refuse  # type: ignore[attr-defined]
    return function
