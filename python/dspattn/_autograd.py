"""How ``torch.ops.dspattn.attention`` is run, differentiated and mapped over.

Offered are first derivatives in reverse mode, also per sample (``torch.vmap`` of ``torch.func.grad``) and as Jacobians
(``torch.func.jacrev``). Second derivatives and forward mode are not; they raise.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ._not_offered import forward_mode, refuse_tangents
from ._ops import attention, attention_backward, translated
from ._registered import register_gradient
from ._schema import DIFFERENTIABLE, TENSORS, BackwardArguments, ProblemArguments
from ._vmap import batching_rule
from .errors import DspattnError

DIFFERENTIATED = [ProblemArguments._fields.index(name) for name in DIFFERENTIABLE]
BIAS, SINKS = (ProblemArguments._fields.index(name) for name in ("bias", "sinks"))


def run(problem: ProblemArguments) -> tuple[Tensor, Tensor]:
    """attention() as PyTorch would run it, without what its Python dispatch costs.

    The gradient registered below serves torch.compile and direct calls of the operator, but takes about 100
    microseconds a call (it re-reads the schema each time). Outside of compilation, the same formulas run through a
    plain autograd.Function, and nothing at all when no gradient is wanted.
    """
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return _FunctionalAttention.apply(*problem)
    if forward_ad._current_level >= 0:
        refuse_tangents(problem[:TENSORS])
    if torch.is_grad_enabled() and _wants_gradients(problem):
        return _Attention.apply(*problem[:TENSORS], problem[TENSORS:])
    with torch._C._AutoDispatchBelowAutograd():
        return attention(*problem)


def repeatable(problem: ProblemArguments) -> ProblemArguments:
    """A problem whose forward runs on the kernel that its gradients will run on.

    A backward pass selects the keys anew, and two kernels may add up a score in different orders: where scores nearly
    tie, they could keep different keys. On a GPU the table may choose different kernels for the two passes where the
    gradients are of float32 inputs or results, or of a bias; the general kernel serves both.
    """
    q, bias = problem.q, problem.bias
    if not q.is_cuda or problem.kernel or not torch.is_grad_enabled() or not _wants_gradients(problem):
        return problem
    if q.dtype == torch.float32 or problem.fp32_results or (bias is not None and bias.requires_grad):
        return problem._replace(kernel=general_kernel(q))
    return problem


def general_kernel(q: Tensor) -> str:
    """The kernel that serves both passes, on a GPU; elsewhere and of other types, whichever the table chooses."""
    name = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}.get(q.dtype)
    return f"general_{name}" if q.is_cuda and name else ""


def _wants_gradients(problem: ProblemArguments) -> bool:
    """Spelt out, which is faster than any(); the tensors that are not named here have no floating type."""
    q, k, v, _, bias, *_ = problem
    if q.requires_grad or k.requires_grad or v.requires_grad or (bias is not None and bias.requires_grad):
        return True
    return problem.sinks is not None and problem.sinks.requires_grad


class _Attention(torch.autograd.Function):
    """The registered gradient of attention() as a plain autograd function. It takes the arguments that are no tensors
    as one: PyTorch looks at each, forward and back."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> tuple[Tensor, Tensor]:
        *tensors, options = given
        arguments = (*tensors, *options)
        with torch._C._AutoDispatchBelowAutograd():
            output = attention(*arguments)
        _save(ctx, arguments, output)
        return output

    @staticmethod
    def backward(ctx: Any, d_out: Tensor | None, d_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        return _gradients(ctx, d_out, d_lse)


class _FunctionalAttention(torch.autograd.Function):
    """The same in the form that torch.func asks for, which costs 20 microseconds more."""

    backward = _Attention.backward

    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor, Tensor]:
        with torch._C._AutoDispatchBelowAutograd():
            return attention(*arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        _save(ctx, inputs, output)

    jvp = staticmethod(forward_mode)  # type: ignore[assignment]
    vmap = staticmethod(batching_rule(lambda *arguments: run(ProblemArguments(*arguments)), 0))


class _Gradient(torch.autograd.Function):
    """A gradient itself, which has none."""

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> NoReturn:
        _second_order()

    jvp = staticmethod(forward_mode)  # type: ignore[assignment]


class _AttentionBackward(_Gradient):
    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor, ...]:
        with torch._C._AutoDispatchBelowAutograd():
            return attention_backward(*arguments)

    vmap = staticmethod(batching_rule(lambda *a: _AttentionBackward.apply(*a), len(BackwardArguments._fields)))


class _Final(_Gradient):
    """Gradients as they are, of something that wants one."""

    @staticmethod
    def forward(wanting: Tensor, *gradients: Tensor) -> tuple[Tensor, ...]:
        return tuple(gradient.view_as(gradient) for gradient in gradients)


def first_order(backward: Callable[..., tuple[Any, ...]]) -> Callable[..., tuple[Any, ...]]:
    """The ``backward`` of an autograd function whose results have no gradient: to ask for one raises. PyTorch's own
    ``once_differentiable`` takes them for constants where the gradient that comes in is one."""

    @functools.wraps(backward)
    def final(ctx: Any, *d_outputs: Tensor | None) -> tuple[Any, ...]:
        with torch.no_grad():
            found = backward(ctx, *d_outputs)
        if not torch.is_grad_enabled():
            return found
        gradients = [gradient for gradient in found if gradient is not None]
        without = iter(_Final.apply(torch.empty(0, device="cpu", requires_grad=True), *gradients))
        return tuple(None if gradient is None else next(without) for gradient in found)

    return final


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:TENSORS], *output)
    ctx.options = inputs[TENSORS:]
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, d_out: Tensor | None, d_lse: Tensor | None) -> tuple[Tensor | None, ...]:
    """The gradients of every argument of attention(): None for all but q, k, v, the bias and the sinks."""
    needed = ctx.needs_input_grad  # arguments at their defaults may have been left out
    given: list[Tensor | None] = [None] * len(needed)
    if d_out is None and d_lse is None:
        return tuple(given)
    *tensors, out, lse = ctx.saved_tensors
    wanted = [len(needed) > index and needed[index] for index in (BIAS, SINKS)]
    gradients = gradients_of(ProblemArguments(*tensors, *ctx.options), out, lse, d_out, d_lse, *wanted)
    for index, grad in zip(DIFFERENTIATED, gradients, strict=True):
        if index < len(needed) and needed[index]:
            given[index] = _as(grad, tensors[index])
    return tuple(given)


def gradients_of(
    problem: ProblemArguments,
    out: Tensor,
    lse: Tensor,
    d_out: Tensor | None,
    d_lse: Tensor | None,
    wants_d_bias: bool = False,
    wants_d_sinks: bool = False,
) -> tuple[Tensor, ...]:
    """The gradients as attention_backward() gives them, where one of d_out and d_lse is there."""
    traced = torch.compiler.is_compiling()  # before it is known whether the gradients are asked for
    if problem.rest_mean and not traced:
        raise DspattnError(['rest: expected "drop" for gradients ("mean" is for inference and has none), got "mean"'])
    if d_lse is not None:  # whatever is handed to a row without keys goes nowhere
        d_lse = d_lse.float().masked_fill(lse == float("-inf"), 0)
    d_out = torch.zeros_like(out) if d_out is None else d_out
    results = BackwardArguments(_rows(d_out), out, lse, d_lse, wants_d_bias, wants_d_sinks)
    return _backward(results, problem, traced)


def _as(grad: Tensor, of: Tensor) -> Tensor:
    """fp32 results have fp32 gradients, to be added up before they are rounded."""
    return grad if grad.dtype == of.dtype else grad.to(of.dtype)


def _backward(results: BackwardArguments, problem: ProblemArguments, traced: bool) -> tuple[Tensor, ...]:
    """attention_backward(), as something that has no gradient where one could be asked for: that costs 100
    microseconds, and every step of a training without need."""
    if traced:
        return attention_backward(*results, *problem)
    try:
        if torch.is_grad_enabled() or torch._C._functorch.peek_interpreter_stack() is not None:
            return _AttentionBackward.apply(*results, *problem)
        with torch._C._AutoDispatchBelowAutograd():
            return attention_backward(*results, *problem)
    except RuntimeError as error:  # of a call that has results, but no gradients
        raise translated(error) from None


def _rows(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _second_order(*_: Any) -> NoReturn:
    raise DspattnError(
        ["dspattn computes first-order gradients only: a gradient of a gradient (double backward) was asked for"]
    )


register_gradient(attention, _gradients, _save)
register_gradient(attention_backward, _second_order)
torch.library.register_vmap("dspattn::attention", batching_rule(attention, 0))
torch.library.register_vmap(
    "dspattn::attention_backward", batching_rule(attention_backward, len(BackwardArguments._fields))
)
