"""The operators ``torch.ops.dspattn.*``: the shared object, their meta implementations and their gradients.

Nothing here checks arguments or changes shapes; ``functional`` does, and the C++ library has the last word.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .errors import DspattnError

LIBRARY = "dspattn_torch.so"
LIBRARY_VARIABLE = "DSPATTN_TORCH_LIBRARY"
ERROR_PREFIX = "dspattn: "  # of every error of the C++ library, see bindings/torch

# Positions within the arguments of attention(): see the schema in bindings/torch/attention_ops.cpp.
TENSOR_ARGUMENTS = 8  # q, k, v, allowed, bias, key_lengths, cu_q, cu_k
BIAS = 4


def _library_file() -> Path:
    """The shared object: where the variable says, inside the package, or in the build folder of a source tree."""
    here = Path(__file__)
    chosen = os.environ.get(LIBRARY_VARIABLE)
    places = [Path(chosen)] if chosen else [here.with_name(LIBRARY), here.parents[2] / "build" / "python" / LIBRARY]
    for place in places:
        if place.is_file():
            return place
    raise ImportError(
        f"dspattn's operators were not found in {' or '.join(map(str, places))}. Install the package with "
        f"`pip install .` in the project's folder, or set {LIBRARY_VARIABLE} to a built {LIBRARY}."
    )


torch.ops.load_library(_library_file())

attention = torch.ops.dspattn.attention.default
attention_backward = torch.ops.dspattn.attention_backward.default


def translated(error: RuntimeError) -> Exception:
    """An error of the C++ library as DspattnError; any other error as it is."""
    text = str(error)
    if not text.startswith(ERROR_PREFIX):
        return error
    return DspattnError(text[len(ERROR_PREFIX) :].split("\n"))


def _heads(like: Tensor, n_from: Tensor, d: Any) -> Tensor:
    """[batch, heads, n, d] laid out as the operators do: the heads of one position side by side."""
    return like.new_empty((n_from.shape[0], n_from.shape[2], n_from.shape[1], d)).transpose(1, 2)


@torch.library.register_fake("dspattn::attention")
def _attention_meta(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return _heads(q, q, v.shape[3]), q.new_empty(q.shape[:3], dtype=torch.float32)


@torch.library.register_fake("dspattn::attention_backward")
def _attention_backward_meta(
    d_out: Tensor, out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return _heads(q, q, q.shape[3]), _heads(k, k, k.shape[3]), _heads(v, v, v.shape[3])


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:TENSOR_ARGUMENTS], *output)
    ctx.options = inputs[TENSOR_ARGUMENTS:]
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, d_out: Tensor | None, d_lse: Tensor | None) -> tuple[Tensor | None, ...]:
    if ctx.needs_input_grad[BIAS]:
        raise NotImplementedError(
            "attn_mask: its gradient is not computed; expected a mask or bias with requires_grad=False"
        )
    *tensors, out, lse = ctx.saved_tensors
    none = (None,) * (len(tensors) - 3 + len(ctx.options))
    if d_out is None:
        if d_lse is None:
            return (None, None, None, *none)
        d_out = torch.zeros_like(out)
    v = tensors[2]
    if d_lse is not None:
        tensors[2], out, d_out = _with_lse_gradient(v, out, d_out, d_lse)
    if d_out.stride(-1) != 1:
        d_out = d_out.contiguous()
    d_q, d_k, d_v = attention_backward(d_out, out, lse, *tensors, *ctx.options)
    if d_lse is not None:
        d_v = d_v[..., : v.shape[3]]
    wanted = (grad if need else None for grad, need in zip((d_q, d_k, d_v), ctx.needs_input_grad, strict=False))
    return (*wanted, *none)


def _with_lse_gradient(v: Tensor, out: Tensor, d_out: Tensor, d_lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Operands whose ordinary backward adds the gradient through the LSE.

    dS = P * (d_out v^T - rowsum(d_out * out) + d_lse): a further column of ones in v, with d_lse as its d_out and 0 as
    its out, contributes exactly the last term.
    """
    if v.shape[3] >= 256:
        raise NotImplementedError(f"lse: its gradient needs a value head dim of at most 255, got {v.shape[3]}")
    pad = (0, 1)
    return (
        torch.nn.functional.pad(v, pad, value=1.0),
        torch.nn.functional.pad(out, pad),
        torch.cat((d_out, d_lse.unsqueeze(-1).to(d_out.dtype)), -1),
    )


def _second_order(ctx: Any, *grads: Tensor | None) -> tuple[None, ...]:
    raise NotImplementedError(
        "dspattn computes first-order gradients only: a gradient of a gradient (double backward) was asked for"
    )


torch.library.register_autograd("dspattn::attention", _gradients, setup_context=_save)
torch.library.register_autograd("dspattn::attention_backward", _second_order)
