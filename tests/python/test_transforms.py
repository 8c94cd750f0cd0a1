"""What PyTorch's function transforms and tracers make of dspattn.attention: served, or refused in plain words."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

import dspattn
from dspattn import _ops
from dspattn._schema import ProblemArguments

SIZE = 3
OPTIONS: dict[str, Any] = {"pattern": "1:2", "grouping": "consecutive", "enable_gqa": True}


def tensors(*lead: int) -> list[Tensor]:
    """Query, key and value with heads that share keys, the leading dimensions in front."""
    torch.manual_seed(0)
    return [torch.randn(*lead, 2, heads, n, 8) for heads, n in ((4, 5), (2, 9), (2, 9))]


def one_by_one(function: Callable[..., Any], in_dims: tuple[int | None, ...], *given: Tensor) -> Any:
    """What vmap is to give, by its definition."""
    samples = [
        function(*(t if dim is None else t.select(dim, i) for t, dim in zip(given, in_dims, strict=True)))
        for i in range(SIZE)
    ]
    if isinstance(samples[0], Tensor):
        return torch.stack(samples)
    return tuple(torch.stack(one) for one in zip(*samples, strict=True))


MASKS: dict[str, tuple[Tensor, int | None, str]] = {
    "allowed, mapped": (torch.rand(SIZE, 2, 4, 5, 9) > 0.4, 0, "attn_mask"),
    "allowed, mapped last": (torch.rand(5, 9, SIZE) > 0.4, 2, "attn_mask"),
    "allowed, one for all": (torch.rand(2, 1, 5, 9) > 0.4, None, "attn_mask"),
    "bias, mapped": (torch.randn(4, SIZE, 1, 9), 1, "attn_mask"),
    "bias, one for all": (torch.randn(9), None, "attn_mask"),
    "lengths, mapped": (torch.tensor([[9, 3], [0, 5], [1, 9]]), 0, "key_lengths"),
    "lengths, one for all": (torch.tensor([4, 7], dtype=torch.int32), None, "key_lengths"),
}


@pytest.mark.parametrize("in_dims", [(0, 0, 0), (2, None, 4), (None, 0, None)])
def test_vmap(in_dims: tuple[int | None, ...]) -> None:
    given = [t[0] if dim is None else t.movedim(0, dim) for t, dim in zip(tensors(SIZE), in_dims, strict=True)]

    def function(*qkv: Tensor) -> Any:
        return dspattn.attention(*qkv, is_causal=True, return_lse=True, **OPTIONS)

    for got, wanted in zip(vmap(function, in_dims)(*given), one_by_one(function, in_dims, *given), strict=True):
        assert torch.equal(got, wanted)


@pytest.mark.parametrize("name", MASKS)
def test_vmap_with_masks(name: str) -> None:
    mask, dim, argument = MASKS[name]
    given, in_dims = (*tensors(SIZE), mask), (0, 0, 0, dim)

    def function(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return dspattn.attention(q, k, v, **{argument: mask}, **OPTIONS)

    assert torch.equal(vmap(function, in_dims)(*given), one_by_one(function, in_dims, *given))


@pytest.mark.parametrize("map_lengths", [False, True])
def test_vmap_of_packed_batches(map_lengths: bool) -> None:
    q, k, v = torch.randn(SIZE, 7, 4, 8), torch.randn(SIZE, 12, 2, 8), torch.randn(SIZE, 12, 2, 6)
    cu_q, cu_k = torch.tensor([[0, 3, 7], [0, 0, 7], [0, 5, 6]]), torch.tensor([[0, 7, 12], [0, 4, 12], [0, 6, 12]])
    if not map_lengths:
        cu_q, cu_k = cu_q[0], cu_k[0]
    dim = 0 if map_lengths else None
    given, in_dims = (q, k, v, cu_q, cu_k), (0, 0, 0, dim, dim)

    def function(*arguments: Tensor) -> Tensor:
        out = dspattn.varlen_attention(*arguments, 7, 12, is_causal=True, pattern="1:2", grouping="consecutive")
        return out[:6]  # rows past the last sequence belong to none

    assert torch.equal(vmap(function, in_dims)(*given), one_by_one(function, in_dims, *given))
    if map_lengths:
        with pytest.raises(dspattn.DspattnError, match="max_seqlen_q: expected a number where vmap maps cu_seqlens_q"):
            vmap(lambda *a: dspattn.varlen_attention(*a))(*given)


def test_vmap_inside_vmap_and_inside_grad() -> None:
    given = tensors(SIZE, 2)

    def function(*qkv: Tensor) -> Tensor:
        return dspattn.attention(*qkv, **OPTIONS)

    joined = vmap(vmap(function))(*given)
    assert torch.equal(joined[1, 1], function(*(t[1, 1] for t in given)))
    through = grad(lambda q: vmap(vmap(function))(q, *given[1:]).sin().sum())(given[0])
    alone = grad(lambda q: function(q, *(t[1, 1] for t in given[1:])).sin().sum())(given[0][1, 1])
    assert torch.equal(through[1, 1], alone)


@pytest.mark.parametrize("of_lse", [False, True])
def test_gradients_of_each_sample(of_lse: bool) -> None:
    def loss(*qkv: Tensor) -> Tensor:
        out, lse = dspattn.attention(*qkv, return_lse=True, **OPTIONS)
        return lse.sin().sum() if of_lse else out.sin().sum()

    wanted_of = (0, 1) if of_lse else (0, 1, 2)
    each = grad(loss, argnums=wanted_of)
    given = tensors(SIZE)
    for got, wanted in zip(vmap(each)(*given), one_by_one(each, (0, 0, 0), *given), strict=True):
        assert torch.equal(got, wanted)


def test_gradients_of_a_modules_parameters_for_each_sample() -> None:
    torch.manual_seed(0)
    module = dspattn.nn.MultiheadAttention(16, 2, batch_first=True, pattern="1:2", grouping="consecutive")
    parameters = {name: p.detach() for name, p in module.named_parameters()}
    x = torch.randn(SIZE, 1, 12, 16)

    def loss(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        return functional_call(module, parameters, (x, x, x), {"need_weights": False})[0].sin().sum()

    each = vmap(grad(loss), in_dims=(None, 0))(parameters, x)
    for i in range(SIZE):
        for name, alone in grad(loss)(parameters, x[i]).items():
            torch.testing.assert_close(each[name][i], alone)


def test_jacobian_in_reverse_mode() -> None:
    q, k, v = (t[:1, :2] for t in tensors())

    def function(q: Tensor) -> Tensor:
        return dspattn.attention(q, k, v, **OPTIONS)

    jacobian = jacrev(function)(q)
    leaf = q.clone().requires_grad_()
    (row,) = torch.autograd.grad(function(leaf)[0, 1, 3, 2], leaf)
    assert torch.equal(jacobian[0, 1, 3, 2], row)


def test_vmap_over_nothing_is_refused() -> None:
    nothing = torch.empty(0, 1, 2, 9, 8)
    with pytest.raises(dspattn.DspattnError, match=r"torch\.vmap: expected a mapped dimension of 1 or more, got 0"):
        vmap(dspattn.attention)(nothing, nothing, nothing)


def test_operator_itself_under_vmap() -> None:
    given = tensors(SIZE)

    def function(*qkv: Tensor) -> tuple[Tensor, Tensor]:
        return _ops.attention(*ProblemArguments(*qkv, keep=2, group=4))

    for got, wanted in zip(vmap(function)(*given), one_by_one(function, (0, 0, 0), *given), strict=True):
        assert torch.equal(got, wanted)


TRANSFORMED: dict[str, Callable[[Tensor], Any]] = {
    "grad": grad(lambda t: dspattn.attention(t, t, t, is_causal=True, pattern="1:2").sin().sum()),
    "grad of the LSE": grad(lambda t: dspattn.attention(t, t, t, return_lse=True)[1].sin().sum()),
    "grad of blocks": grad(lambda t: dspattn.block_attention(t, t, t, BLOCKS, pattern="1:2").sin().sum()),
    "gradients of each sample": lambda t: vmap(grad(lambda t: dspattn.attention(t, t, t).sin().sum()))(t[:, None]),
    "grad around grad": grad(lambda x: grad(lambda t: (dspattn.attention(x, x, x) * t).sum())(x.cos()).sum()),
    "jacrev": jacrev(lambda t: dspattn.attention(t, t, t)[0, 0, :2, 0]),
    "vjp": lambda t: vjp(lambda t: dspattn.attention(t, t, t), t)[1](t)[0],
}
BLOCKS = dspattn.block_masks.sliding_window(70, 70)


@pytest.mark.parametrize("name", TRANSFORMED)
def test_transforms_inside_compiled_code(name: str) -> None:
    function = TRANSFORMED[name]
    x = torch.randn(2, 3, 70, 8)
    torch._dynamo.reset()
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x), function(x))


def test_second_derivatives_inside_compiled_code_are_refused() -> None:
    x = torch.randn(2, 3, 70, 8)
    first = grad(lambda t: dspattn.attention(t, t, t).sin().sum())
    torch._dynamo.reset()
    with pytest.raises(RuntimeError, match="double backward"):
        torch.compile(grad(lambda t: first(t).sum()), backend="aot_eager")(x)


WITHOUT_ITS_OWN_NAMES = """
import torch
names = [(torch.autograd.function, "_SingleLevelFunction"), (torch._C, "_any_requires_grad")]
kept = [getattr(*name) for name in names]
for name in names[{first}:{last}]: delattr(*name)
import dspattn
for name, value in zip(names, kept): setattr(*name, value)
x = torch.randn(2, 3, 70, 8, requires_grad=True)
call = lambda: dspattn.attention(x, x, x).sin().sum()
eager, compiled = (torch.autograd.grad(f(), x)[0] for f in (call, torch.compile(call, backend="aot_eager")))
assert torch.equal(eager, compiled) and eager.abs().max() > 0
"""


@pytest.mark.parametrize(("first", "last"), [(0, 1), (1, 2)])
def test_a_pytorch_without_what_it_keeps_to_itself(first: int, last: int) -> None:
    code = WITHOUT_ITS_OWN_NAMES.format(first=first, last=last)
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


def test_forward_mode_is_refused() -> None:
    q, k, v = tensors()
    for call in (
        lambda: jvp(lambda q: dspattn.attention(q, k, v, **OPTIONS), (q,), (q,)),
        lambda: jacfwd(lambda k: dspattn.attention(q, k, v, **OPTIONS))(k),
        lambda: hessian(lambda v: dspattn.attention(q, k, v, **OPTIONS).sum())(v),
    ):
        with pytest.raises(dspattn.DspattnError, match="forward mode"):
            call()
    for requires_grad in (False, True):
        for i in range(3):
            with forward_ad.dual_level():
                given = [t.clone().requires_grad_(requires_grad) for t in (q, k, v)]
                given[i] = forward_ad.make_dual(given[i], torch.ones_like(given[i]))
                with pytest.raises(dspattn.DspattnError, match="forward mode"):
                    dspattn.attention(*given, **OPTIONS)
    with forward_ad.dual_level():
        dspattn.attention(q, k, v, **OPTIONS)  # no tangent, no error


def test_forward_mode_of_the_operators_themselves_is_refused() -> None:
    q, k, v = tensors()
    problem = ProblemArguments(q, k, v, keep=2, group=4)
    out, lse = _ops.attention(*problem)
    leaf = v.clone().requires_grad_()
    blocks = dspattn.block_masks.sliding_window(5, 9)
    for call in (
        lambda t: _ops.attention(*problem._replace(q=t)),
        lambda t: _ops.attention(*problem._replace(q=t, v=leaf)),
        lambda t: _ops.attention_backward(t, out, lse, None, False, False, *problem),
        lambda t: dspattn.block_attention(t, k, v, blocks),
        lambda t: dspattn.sddmm(t, q),
    ):
        with forward_ad.dual_level(), pytest.raises(dspattn.DspattnError, match="forward mode"):
            call(forward_ad.make_dual(q, torch.ones_like(q)))
        with pytest.raises(dspattn.DspattnError, match="forward mode"):
            jvp(call, (q,), (q,))
    with forward_ad.dual_level():
        _ops.attention(*problem)


class Scripted(torch.nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return dspattn.attention(x, x, x)


@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_torchscripts_compiler_is_refused_by_name() -> None:
    functions = (dspattn.attention, dspattn.varlen_attention, dspattn.attention_weights, dspattn.block_attention)
    for what in (*functions, dspattn.merge, dspattn.sddmm, dspattn.nn.MultiheadAttention(8, 2), Scripted()):
        with pytest.raises(dspattn.DspattnError, match=r"^torch\.jit\.script: expected code without dspattn\.\w+"):
            torch.jit.script(what)


@pytest.mark.parametrize("of_lse", [False, True])
def test_second_derivatives_are_refused(of_lse: bool) -> None:
    leaves = [t.requires_grad_() for t in tensors()]
    for number in range(2 if of_lse else 3):
        out, lse = dspattn.attention(*leaves, return_lse=True, **OPTIONS)
        chosen = lse if of_lse else out
        (first,) = torch.autograd.grad(chosen.sin().sum(), leaves[number], create_graph=True)
        with pytest.raises(dspattn.DspattnError, match="double backward"):
            torch.autograd.grad(first.sum(), leaves[number])


def test_gradient_of_the_lse_without_elements() -> None:
    q, k, v = (torch.empty(1, 2, 3, d, device="meta", requires_grad=True) for d in (0, 0, 4))
    _, lse = dspattn.attention(q, k, v, return_lse=True)
    d_q, d_k = torch.autograd.grad(lse.sum(), (q, k))
    assert d_q.shape == q.shape and d_k.shape == k.shape


def test_symbolic_tracing_records_one_call() -> None:
    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return dspattn.attention(q, k, v, is_causal=True, **OPTIONS) + 1

    traced = torch.fx.symbolic_trace(function)
    assert next(node.target for node in traced.graph.nodes if node.op == "call_function") is dspattn.attention
    assert torch.equal(traced(*tensors()), function(*tensors()))


def test_weights_of_one_query_need_no_square_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    eye = torch.eye

    def counted(n: int, *args: Any, **kwargs: Any) -> Tensor:
        made.append(n)
        return eye(n, *args, **kwargs)

    monkeypatch.setattr(torch, "eye", counted)
    q, k = torch.randn(1, 8), torch.randn(700, 8)
    weights = dspattn.attention_weights(q, k, pattern="1:2", grouping="consecutive")
    monkeypatch.undo()
    assert max(made) <= 256
    torch.testing.assert_close(weights @ k, dspattn.attention(q, k, k, pattern="1:2", grouping="consecutive"))
    assert (weights > 0).sum() == 350
