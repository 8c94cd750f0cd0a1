"""Norm, rotation and joining of queries and keys: against float64, against PyTorch's own operators, and what PyTorch's
transforms find."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import dspattn
from dspattn import _ops
from dspattn.preparing import PAIRS, plain

D = 32


def problem(dtype: torch.dtype = torch.float32, d: int = D) -> tuple[Any, dict[str, Any]]:
    torch.manual_seed(0)
    queries = [torch.randn(2, n, 3, d).to(dtype) for n in (5, 9)]
    keys = [torch.randn(2, n, 1, d).to(dtype) for n in (5, 9)]
    weights = [torch.randn(d).to(dtype) for _ in range(4)]
    angles = torch.rand(14, d) * 6
    named = dict(query_weight=weights[:2], key_weight=weights[2:], eps=1e-5, cos=angles.cos(), sin=angles.sin())
    return (queries, keys), named


def in_float64(parts: Any, weights: Any, eps: float, cos: Any, sin: Any, pairs: str) -> torch.Tensor:
    """Pairs as complex numbers: nothing in common with either implementation. cos and sin of a pair are equal here."""
    normed = [
        part.double() * (part.double().square().mean(-1, True) + eps).rsqrt() * weight
        for part, weight in zip(parts, weights, strict=True)
    ]
    x = torch.cat(normed, 1)
    shape = (2, -1) if pairs == "halves" else (-1, 2)
    x = x.unflatten(-1, shape)
    axis = -2 if pairs == "halves" else -1
    turns = torch.complex(cos.double(), sin.double()).unflatten(-1, shape).select(axis, 0)[:, None]
    turned = torch.complex(*x.unbind(axis)) * turns
    return torch.stack([turned.real, turned.imag], axis).flatten(-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("pairs", PAIRS)
def test_against_float64(pairs: Any, dtype: torch.dtype) -> None:
    parts, named = problem(dtype)
    angles = torch.rand(14, D // 2) * 6
    angles = torch.cat([angles, angles], -1) if pairs == "halves" else angles.repeat_interleave(2, -1)
    named |= dict(cos=angles.cos(), sin=angles.sin())
    results = dspattn.norm_rope(*parts, **named, pairs=pairs)
    for result, of, name in zip(results, parts, ("query_weight", "key_weight"), strict=True):
        exact = in_float64(of, named[name], 1e-5, angles.cos(), angles.sin(), pairs)
        assert result.dtype == dtype and result.shape == exact.shape and result.is_contiguous()
        # Two roundings, of which the first is of elements that the rotation adds.
        close = 2e-6 if dtype == torch.float32 else torch.finfo(dtype).eps
        assert ((result - exact).abs() <= close * (exact.abs() + exact.abs().amax(-1, True))).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "change", [{}, {"pairs": "halves"}, {"cos": None, "sin": None}, {"query_weight": None}, {"d": 7}], ids=str
)
def test_as_pytorchs_own_operators(change: dict[str, Any], dtype: torch.dtype) -> None:
    """The same roundings: 16-bit results differ in a few elements at most, where a norm's last bit does."""
    change = dict(change)
    parts, named = problem(dtype, change.pop("d", D))
    if parts[0][0].shape[-1] % 2:
        named |= dict(cos=None, sin=None)
    named = {"pairs": "neighbours"} | named | change
    result, _ = dspattn.norm_rope(*parts, **named)
    options = [named[name] for name in ("eps", "cos", "sin", "pairs")]
    stock = plain(parts[0], named["query_weight"] or [], *options)
    if dtype == torch.float32:
        torch.testing.assert_close(result, stock, atol=3e-6, rtol=3e-6)
    else:
        assert (result != stock).float().mean() < 0.01
        torch.testing.assert_close(result, stock, atol=2 * torch.finfo(dtype).eps, rtol=2 * torch.finfo(dtype).eps)


def test_single_tensors_of_any_stride() -> None:
    (queries, keys), _ = problem()
    together = torch.randn(2, 9, 3, 3 * D)  # as one product for q, k and v leaves them
    q, k, _ = together.chunk(3, -1)
    weight = torch.rand(D)
    result = dspattn.norm_rope(q, k, query_weight=weight, key_weight=weight, eps=1e-5)
    for found, of in zip(result, (q, k), strict=True):
        torch.testing.assert_close(found, torch.nn.functional.rms_norm(of, (D,), weight, 1e-5))
    copied, _ = dspattn.norm_rope(queries, keys)  # neither norm nor rotation
    assert torch.equal(copied, torch.cat(queries, 1))


def test_gradients_are_pytorchs_own() -> None:
    parts, named = problem()
    leaves = [t.clone().requires_grad_() for t in (*parts[0], *named["query_weight"])]
    named["query_weight"] = leaves[2:]
    result, _ = dspattn.norm_rope(leaves[:2], parts[1], **named)
    found = torch.autograd.grad(result.sin().sum(), leaves)
    stock = plain(leaves[:2], leaves[2:], named["eps"], named["cos"], named["sin"], "neighbours")
    for one, other in zip(found, torch.autograd.grad(stock.sin().sum(), leaves), strict=True):
        assert torch.equal(one, other)
    with torch.no_grad():
        assert not dspattn.norm_rope(leaves[:2], parts[1], **named)[0].requires_grad
    (queries, keys), named = problem()
    cos = named["cos"].requires_grad_()  # a rotation that is learned
    (learned,) = torch.autograd.grad(dspattn.norm_rope(queries, keys, **named)[0].sum(), cos)
    assert learned.shape == cos.shape


def test_compile_fullgraph() -> None:
    def model(queries: Any, keys: Any, **named: Any) -> torch.Tensor:
        q, k = dspattn.norm_rope([q * 2 for q in queries], keys, **named)
        return q.sin() + k

    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="aot_eager")
    parts, named = problem()
    for n in (9, 4):
        of = [[t[:, :n] for t in part] for part in parts]
        with torch.no_grad():
            torch.testing.assert_close(compiled(*of, **named), model(*of, **named))
    (queries, keys), _ = problem()
    leaf = queries[0].clone().requires_grad_()
    grads = [torch.autograd.grad(run([leaf, queries[1]], keys, **named).sum(), leaf)[0] for run in (model, compiled)]
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("kind", ["all", "norm", "turn"])
def test_opcheck(kind: str) -> None:
    (queries, keys), named = problem()
    weights = (named["query_weight"], named["key_weight"]) if kind == "all" else ([], [])
    eps = named["eps"] if kind != "turn" else None
    angles = (named["cos"], named["sin"]) if kind != "norm" else (None, None)
    torch.library.opcheck(_ops.norm_rope, (queries, keys, *weights, eps, *angles, kind == "all"))


def test_errors_name_arguments() -> None:
    (queries, keys), named = problem()

    def reasons(**changes: Any) -> str:
        with pytest.raises(dspattn.DspattnError) as raised:
            dspattn.norm_rope(**({"query": queries, "key": keys} | named | changes))
        return str(raised.value)

    assert "pairs: expected one of neighbours, halves, got 'other'" in reasons(pairs="other")
    assert "key[1].dtype: expected fp32 as query[0] has, got bf16" in reasons(key=[keys[0], keys[1].bfloat16()])
    assert "key_weight[0].shape[0]: expected d = 32, got 4" in reasons(key_weight=[torch.ones(4)] * 2)
    assert "query_weight: expected one for each of 2 parts or none, got 1" in reasons(query_weight=torch.ones(D))
    assert "sin: expected both of cos and sin, or neither, got none" in reasons(sin=None)
    assert "cos.shape[0]: expected a row for each position of query[1], from 5 on 9, got 13" in reasons(
        cos=named["cos"][:13]
    )
    assert "cos.dtype: expected fp32, got bf16" in reasons(cos=named["cos"].bfloat16())
    assert "query: expected at least one part, got none" in reasons(query=[], query_weight=None)
    assert "query[1]: expected 3 heads as the first part has, got 1" in reasons(query=[queries[0], keys[1]])
    assert "query[0]: expected four dimensions [batch, n, heads, d], got 3" in reasons(query=[queries[0][0]] * 2)
    assert "got float64" in reasons(query=[q.double() for q in queries])
    meta = [q.to("meta") for q in queries]
    assert "cos: expected a tensor on meta as query is" in reasons(query=meta, key=[k.to("meta") for k in keys])


@pytest.mark.parametrize("way", ["gradients", "vmap"])
def test_what_the_operator_refuses_pytorchs_own_do_not_serve_in_part(way: str) -> None:
    (queries, keys), named = problem()

    def reasons(**changes: Any) -> str:
        given = {"query": queries[0], "key": keys[0]} | {n: named[n] for n in ("eps", "cos", "sin")} | changes
        with pytest.raises(dspattn.DspattnError) as raised:
            if way == "gradients":
                dspattn.norm_rope(**(given | {"key": given["key"].clone().requires_grad_()}))
            else:
                torch.vmap(lambda k: dspattn.norm_rope(**(given | {"key": k}))[1])(
                    given["key"].expand(2, -1, -1, -1, -1)
                )
        return str(raised.value)

    assert "sin: expected both of cos and sin, or neither, got none" in reasons(sin=None)
    assert "query_weight[0]: expected none without eps, got one" in reasons(eps=None, query_weight=torch.ones(D))
    assert "query_weight: expected one for each of 1 parts or none, got 2" in reasons(query_weight=[torch.ones(D)] * 2)
    assert "cos.shape[0]: expected a row for each position of query[0], from 0 on 5, got 1" in reasons(
        cos=named["cos"][:1]
    )
    assert "cos.shape[1]: expected d = 32, got 1" in reasons(cos=named["cos"][:, :1])
    assert "eps: expected a finite number >= 0" in reasons(eps=-1.0)


def test_forward_mode_is_refused() -> None:
    (queries, keys), _ = problem()
    with pytest.raises(dspattn.DspattnError, match="expected no tangents"):
        torch.func.jvp(lambda q: dspattn.norm_rope(q, keys[0], eps=1e-5)[0], (queries[0],), (queries[0],))


def test_functional_transforms() -> None:
    (queries, keys), _ = problem()

    def normed(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return dspattn.norm_rope(q, k, eps=1e-5)[0]

    stock = torch.nn.functional.rms_norm(queries[0], (D,), None, 1e-5)
    mapped = torch.vmap(lambda q, k: normed(q[None], k[None])[0])(queries[0], keys[0])
    torch.testing.assert_close(mapped, stock)
    grad = torch.func.grad(lambda q: normed(q, keys[0]).sin().sum())(queries[0])
    leaf = queries[0].clone().requires_grad_()
    torch.testing.assert_close(grad, torch.autograd.grad(normed(leaf, keys[0]).sin().sum(), leaf)[0])
