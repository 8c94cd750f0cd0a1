"""Gradients of the operators themselves, which is what code that PyTorch traces calls.

``torch.library.register_autograd`` would do but for one thing: what it registers cannot run inside of ``torch.func``'s
``grad``, ``vjp`` and ``jacrev``, which in compiled code call the operator, not the functions of this package.
An operator's gradient is asked for at one level of such transforms at a time, as of PyTorch's own operators, so that a
function of one level is all that is needed. It takes names that PyTorch keeps to itself: a PyTorch without them has
``register_autograd``, and all but those transforms inside of compiled code.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ._not_offered import GRADIENTS

try:
    from torch._library.utils import fill_defaults

    _functorch: Any = torch._C._functorch
    _AT_ONE_LEVEL: Any = torch.autograd.function._SingleLevelFunction
    _OFFERED = all(
        hasattr(where, name)
        for where, name in (
            (torch._C, "_AutoDispatchBelowAutograd"),
            (torch._C, "_after_autograd_keyset"),
            (torch._C, "_any_requires_grad"),
            (_functorch, "get_single_level_autograd_function_allowed"),
            (_functorch, "set_single_level_autograd_function_allowed"),
        )
    )
except (ImportError, AttributeError):
    _OFFERED = False


def register_gradient(
    operator: Any, backward: Callable[..., Any], setup_context: Callable[..., None] | None = None
) -> None:
    """As ``torch.library.register_autograd``: how an operator is differentiated."""
    if not _OFFERED:
        torch.library.register_autograd(
            operator._schema.name, backward, setup_context=setup_context, lib=GRADIENTS
        )  # fmt: skip
        return

    def computed(keyset: Any, arguments: tuple[Any, ...]) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return operator.redispatch(keyset & torch._C._after_autograd_keyset, *arguments)

    class Registered(_AT_ONE_LEVEL):  # type: ignore[misc]
        @staticmethod
        def forward(ctx: Any, keyset: Any, *arguments: Any) -> Any:
            with torch.enable_grad():  # as before PyTorch called this: the next level of transforms asks for it
                output = computed(keyset, arguments)
            if setup_context is not None:
                setup_context(ctx, fill_defaults(operator._schema, arguments, {})[0], output)
            return output

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            ctx.needs_input_grad = ctx.needs_input_grad[1:]  # without the keyset
            return None, *backward(ctx, *grads)

    def kernel(keyset: Any, *arguments: Any) -> Any:
        if not (torch.is_grad_enabled() and torch._C._any_requires_grad(*arguments)):
            return computed(keyset, arguments)
        before = _functorch.get_single_level_autograd_function_allowed()
        _functorch.set_single_level_autograd_function_allowed(True)
        try:
            return Registered.apply(keyset, *arguments)
        finally:
            _functorch.set_single_level_autograd_function_allowed(before)

    GRADIENTS.impl(operator._schema.name, kernel, "Autograd", with_keyset=True)
