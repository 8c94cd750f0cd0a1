"""How ``torch.ops.dspattn.attention`` is run, differentiated and mapped over.

Offered are first derivatives in reverse mode, also per sample (``torch.vmap`` of ``torch.func.grad``) and as Jacobians
(``torch.func.jacrev``). Second derivatives and forward mode are not; they raise.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ._ops import attention, attention_backward
from ._schema import DIFFERENTIABLE, TENSORS, BackwardArguments, ProblemArguments
from ._vmap import batching_rule
from .errors import DspattnError

BIAS = ProblemArguments._fields.index("bias")


def run(problem: ProblemArguments) -> tuple[Tensor, Tensor]:
    """attention() as PyTorch would run it, without what its Python dispatch costs.

    The gradient registered below serves torch.compile and direct calls of the operator, but takes about 100
    microseconds a call (it re-reads the schema each time) and does not work under torch.func. Outside of compilation,
    the same formulas run through a plain autograd.Function, and nothing at all when no gradient is wanted.
    """
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return _FunctionalAttention.apply(*problem)
    if forward_ad._current_level >= 0:
        _refuse_tangents(problem)
    if torch.is_grad_enabled() and _wants_gradients(problem):
        return _Attention.apply(*problem)
    with torch._C._AutoDispatchBelowAutograd():
        return attention(*problem)


def _refuse_tangents(problem: ProblemArguments) -> None:
    for tensor in problem.tensors().values():
        if tensor is not None and forward_ad.unpack_dual(tensor).tangent is not None:
            _forward_mode()


def _forward_mode(*_: Any) -> NoReturn:
    raise DspattnError(
        [
            "query, key, value: expected no tangents (derivatives in forward mode, jvp and jacfwd, are not offered; "
            "torch.func.vjp and jacrev are), got a dual tensor"
        ]
    )


def _wants_gradients(problem: ProblemArguments) -> bool:
    """Spelt out, which is faster than any(); the tensors that are not named here have no floating type."""
    q, k, v, _, bias, *_ = problem
    return q.requires_grad or k.requires_grad or v.requires_grad or (bias is not None and bias.requires_grad)


class _Attention(torch.autograd.Function):
    """The registered gradient of attention() as a plain autograd function."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor]:
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

    jvp = staticmethod(_forward_mode)  # type: ignore[assignment]
    vmap = staticmethod(batching_rule(lambda *arguments: run(ProblemArguments(*arguments)), 0))


class _Gradient(torch.autograd.Function):
    """A gradient itself, which has none."""

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> NoReturn:
        _second_order()

    jvp = staticmethod(_forward_mode)  # type: ignore[assignment]


class _AttentionBackward(_Gradient):
    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
        with torch._C._AutoDispatchBelowAutograd():
            return attention_backward(*arguments)

    vmap = staticmethod(batching_rule(lambda *a: _AttentionBackward.apply(*a), len(BackwardArguments._fields)))


class _LseBackward(_Gradient):
    @staticmethod
    def forward(d_lse: Tensor, lse: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
        with torch._C._AutoDispatchBelowAutograd():
            return _lse_gradients(d_lse, lse, *arguments)

    vmap = staticmethod(batching_rule(lambda *a: _LseBackward.apply(*a), 2))


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:TENSORS], *output)
    ctx.options = inputs[TENSORS:]
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, d_out: Tensor | None, d_lse: Tensor | None) -> tuple[Tensor | None, ...]:
    """The gradients of every argument of attention(): None for all but q, k and v."""
    needed = ctx.needs_input_grad
    if needed[BIAS]:
        raise DspattnError(["attn_mask: expected requires_grad=False (its gradient is not computed), got True"])
    *tensors, out, lse = ctx.saved_tensors
    problem = ProblemArguments(*tensors, *ctx.options)
    traced = torch.compiler.is_compiling()  # before it is known whether the gradients are asked for
    if problem.rest_mean and not traced:
        raise DspattnError(['rest: expected "drop" for gradients ("mean" is for inference and has none), got "mean"'])
    d_q: Tensor | None = None
    d_k: Tensor | None = None
    d_v: Tensor | None = None
    if d_out is not None:
        backward = attention_backward if traced else _AttentionBackward.apply
        d_q, d_k, d_v = backward(*BackwardArguments(_rows(d_out), out, lse), *problem)
    if d_lse is not None:
        more_q, more_k = (_lse_gradients if traced else _LseBackward.apply)(d_lse, lse, *problem)
        d_q = more_q if d_q is None else d_q + more_q
        d_k = more_k if d_k is None else d_k + more_k
    dtype = problem.q.dtype  # fp32 results have fp32 gradients, to be added up before they are rounded
    wanted = (
        grad.to(dtype) if need and grad is not None else None
        for grad, need in zip((d_q, d_k, d_v), needed, strict=False)
    )
    return (*wanted, *(None,) * (len(needed) - DIFFERENTIABLE))  # arguments at their defaults may have been left out


def _rows(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _lse_gradients(d_lse: Tensor, lse: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    """The gradients of q and k through the LSE, whose derivative by a score is its weight.

    d_q = scale * d_lse * (weights k) is the attention of the keys themselves; d_k = weights^T (scale * d_lse * q) is
    the gradient of its values. Both come from the ordinary operators with k in the place of v.
    """
    problem = ProblemArguments(*arguments)
    q = problem.q
    of_keys = problem._replace(v=problem.k)
    factor = (d_lse * problem.factor()).masked_fill(lse == float("-inf"), 0).unsqueeze(-1)
    keys_seen, lse = attention(*of_keys)
    d_seen = (factor * q).to(q.dtype)
    _, _, d_k = attention_backward(*BackwardArguments(_rows(d_seen), keys_seen, lse), *of_keys)
    return (factor * keys_seen).to(q.dtype), d_k


def _second_order(*_: Any) -> NoReturn:
    raise DspattnError(
        ["dspattn computes first-order gradients only: a gradient of a gradient (double backward) was asked for"]
    )


torch.library.register_autograd("dspattn::attention", _gradients, setup_context=_save)
torch.library.register_autograd("dspattn::attention_backward", _second_order)
torch.library.register_vmap("dspattn::attention", batching_rule(attention, 0))
torch.library.register_vmap(
    "dspattn::attention_backward", batching_rule(attention_backward, len(BackwardArguments._fields))
)
