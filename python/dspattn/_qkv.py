"""Calls of attention with q, k and v alone, as nearly all are, at little more than what the library itself takes.

PyTorch's operators cost by the argument, and ``attention`` has thirty; a small call, or a step of training, waited
longer for those than for the result. Here everything but the tensors goes into one number, which is made once for each
set of options, and the gradient runs without PyTorch's Python around it. Whatever is not plain (other tensors, rare
options, something that traces, maps or watches operators) is left to the general way, with the same results.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from . import _autograd, _ops
from ._inputs import Window, fits_operator, parse_alignment, parse_window
from ._schema import ProblemArguments
from .patterns import parse_grouping, parse_pattern, parse_rest, parse_selection

# How options become a number, (name, bits) from the lowest bit on, as bindings/torch/attention_ops.cpp reads it. The
# sides of a window are one more than they are, 0 for no bound.
FIELDS = (
    ("keep", 6), ("group", 6), ("interleaved", 1), ("causal", 1), ("top_left", 1), ("full_fp32", 1), ("rest_mean", 1),
    ("shared_choice", 1), ("window_left", 22), ("window_right", 22), ("heads_last", 1),
)  # fmt: skip
WINDOW_BITS = 22
MOST_CODES = 1000  # that are kept


class Code(NamedTuple):
    """Options as the operators take them."""

    number: int
    differentiable: bool


_codes: dict[tuple[Any, ...], Code | None] = {}

_peek_interpreter_stack = torch._C._functorch.peek_interpreter_stack
_unwrap_if_dead = torch._C._functorch.unwrap_if_dead
_length_of_dispatch_stack = torch._C._len_torch_dispatch_stack
_tracing_state = torch._C._get_tracing_state


def code_of(
    pattern: str,
    grouping: str,
    rest: str,
    selection: str,
    alignment: str,
    is_causal: bool,
    allow_tf32: bool,
    window: Window = None,
    heads_last: bool = False,
) -> Code | None:
    """The options as a number; None where they have none. Raises for what is no option.

    With `heads_last` the result is [batch, n_q, heads, d_v].
    """
    keep, group = parse_pattern(pattern)
    mean = parse_rest(rest)
    sides = parse_window(window)
    if any(side is not None and not 0 <= side < (1 << WINDOW_BITS) - 1 for side in sides):
        return None
    left, right = (0 if side is None else side + 1 for side in sides)
    options = {
        "keep": keep, "group": group, "interleaved": parse_grouping(grouping), "causal": is_causal,
        "top_left": parse_alignment(alignment), "full_fp32": not allow_tf32, "rest_mean": mean,
        "shared_choice": parse_selection(selection), "window_left": left, "window_right": right,
        "heads_last": heads_last,
    }  # fmt: skip
    number = place = 0
    for name, bits in FIELDS:
        number |= int(options[name]) << place
        place += bits
    return Code(number, differentiable=not mean)


def options_of(number: int) -> dict[str, Any]:
    """What a number stands for, by the names of ProblemArguments."""
    options: dict[str, Any] = {}
    for name, bits in FIELDS:
        field, number = number & ((1 << bits) - 1), number >> bits
        if bits == WINDOW_BITS:
            options[name] = field - 1 if field > 0 else None
        else:
            options[name] = field if name in ("keep", "group") else bool(field)
    return options


def _code(options: tuple[Any, ...]) -> Code | None:
    """code_of, remembered. Options that equal others without being such, as 5.0 does 5, are not looked up."""
    window = options[7]
    if window is not None and not (type(window) is tuple and all(s is None or type(s) is int for s in window)):
        return None
    try:
        return _codes[options]
    except TypeError:  # something that has no hash, and is no option
        return None
    except KeyError:
        if len(_codes) >= MOST_CODES:
            _codes.clear()
        return _codes.setdefault(options, code_of(*options))


def attention(
    query: Tensor, key: Tensor, value: Tensor, options: tuple[Any, ...], scale: float | None, enable_gqa: bool
) -> Tensor | None:
    """The result for the options of ``code_of``; None where the general way has to be taken.

    It does what ``_running.run`` does around the operator. Not for code that is being compiled.
    """
    if (
        type(query) is not Tensor
        or type(key) is not Tensor
        or type(value) is not Tensor
        or _peek_interpreter_stack() is not None
        or forward_ad._current_level >= 0
        or _length_of_dispatch_stack() > 0
        or _tracing_state() is not None
    ):
        return None
    code = _code(options)
    device = "cuda" if query.is_cuda else "cpu" if query.is_cpu else None
    if code is None or device is None or not fits_operator(query, key, value, enable_gqa):
        return None
    if not (query.stride(-1) == 1 and key.stride(-1) == 1 and value.stride(-1) == 1):
        return None
    wants_gradients = torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad)
    if wants_gradients and not code.differentiable:
        return None  # and be refused
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    if not wants_gradients:
        if dtype is not None:
            query, key, value = _autocast(query, dtype), _autocast(key, dtype), _autocast(value, dtype)
        return _ops.attention_qkv(query, key, value, code.number, scale)[0]
    if device == "cuda" and dtype is None and query.dtype == torch.float32:
        return None  # another kernel is forced there
    query, key, value = _unwrap_if_dead(query), _unwrap_if_dead(key), _unwrap_if_dead(value)
    return _apply(query, key, value, dtype, code.number, scale)


def _autocast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """As autocast does: floating types are cast, except float64."""
    if tensor.dtype == dtype or not tensor.is_floating_point() or tensor.dtype == torch.float64:
        return tensor
    return tensor.to(dtype)


class _Attention(torch.autograd.Function):
    """The operator with its gradient. Without the LSE as a result, and with autocast's casts inside: PyTorch takes time
    for each result and each step. It casts the gradients itself."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, dtype: torch.dtype | None, options: int, scale: float | None
    ) -> Tensor:
        if dtype is not None:
            q, k, v = _autocast(q, dtype), _autocast(k, dtype), _autocast(v, dtype)
        out, lse = _ops.attention_qkv(q, k, v, options, scale)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.options = options, scale
        return out

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        options, scale = ctx.options
        if (
            torch.is_grad_enabled()
            or torch.compiler.is_compiling()
            or _peek_interpreter_stack() is not None
            or _length_of_dispatch_stack() > 0
        ):
            named = options_of(options)
            if named.pop("heads_last"):
                out, d_out = out.transpose(1, 2), d_out.transpose(1, 2)
            problem = ProblemArguments(q, k, v, **named, scale=scale)
            d_q, d_k, d_v, *_ = _autograd.gradients_of(problem, out, lse, d_out, None)
        else:
            d_out = d_out if d_out.stride(-1) == 1 else d_out.contiguous()
            try:
                d_q, d_k, d_v = _ops.attention_qkv_backward(d_out, out, lse, q, k, v, options, scale)
            except RuntimeError as error:  # of a call that has results, but no gradients
                raise _ops.translated(error) from None
        of_q, of_k, of_v, *_ = ctx.needs_input_grad
        return d_q if of_q else None, d_k if of_k else None, d_v if of_v else None, None, None, None


# What Function.apply comes to where no transform of torch.func is active.
_apply = super(torch.autograd.Function, _Attention).apply
