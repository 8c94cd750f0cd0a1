"""The three steps as operators: on the CPU against the steps written in Python, on a GPU against the CPU.

Inputs are whole numbers, so that scores are exact and both keep the same keys. Without a GPU its tests are skipped.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import contract
import dspattn
from dspattn import _ops, sparse

FORMATS = [(torch.float32, "1:2"), (torch.bfloat16, "2:4"), (torch.float16, "2:4"), (torch.bfloat16, "1:2")]
SHAPES = [(32, 64), (5, 37), (33, 130), (1, 1), (200, 515)]
TOLERANCE = {torch.float32: 2e-3, torch.bfloat16: 2e-2, torch.float16: 3e-3}
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU that PyTorch can use")


def inputs(n_q: int, n_k: int, dtype: torch.dtype, *lead: int, d: int = 64) -> list[torch.Tensor]:
    torch.manual_seed(n_q + n_k)
    return [contract.integers(2, 3, n, d, low=-2, high=2).to(dtype) for n in (n_q, n_k, n_k)]


def same_codes(ours: torch.Tensor, wanted: torch.Tensor, n_q: int, n_k: int, wide: bool, *layout: Any) -> bool:
    """Equal bytes; where rows or columns are padded, equal codes of all that is not padding."""
    if n_q % 32 == 0 and n_k % 64 == 0:
        return torch.equal(ours, wanted)
    decoded = [_ops.nm_decode(m.reshape(-1, *m.shape[-2:]), n_q, n_k, *layout, wide) for m in (ours, wanted)]
    return ours.shape == wanted.shape and torch.equal(*decoded)


@pytest.mark.parametrize("grouping", ["consecutive", "interleaved"])
@pytest.mark.parametrize("dtype,pattern", FORMATS, ids=str)
@pytest.mark.parametrize("n_q,n_k", SHAPES, ids=str)
def test_operators_are_the_python_steps(
    n_q: int, n_k: int, dtype: torch.dtype, pattern: str, grouping: dspattn.patterns.Grouping
) -> None:
    """The same bytes, and padding that PyTorch's sparse products can read."""
    q, k, v = inputs(n_q, n_k, dtype)
    keep, group = int(pattern[0]), int(pattern[2])
    interleaved = grouping == "interleaved"
    nonzeros, metadata = _ops.sparse_scores(q, k, None, None, keep, group, interleaved, False, False, 0.125)
    wanted, wanted_metadata = dspattn.sddmm(q, k, pattern=pattern, grouping=grouping, scale=0.125)
    assert torch.equal(nonzeros[..., :n_q, : wanted.shape[-1]], wanted)
    layout = (keep, group, interleaved)
    assert same_codes(metadata, wanted_metadata, n_q, n_k, dtype == torch.float32, *layout)
    assert (nonzeros[..., n_q:, :] == float("-inf")).all() and (
        nonzeros[..., wanted.shape[-1] :] == float("-inf")
    ).all()
    padded = sparse._padded(wanted, float("-inf"), copy=True)
    assert padded.shape == nonzeros.shape
    _ops.sparse_softmax_(padded)
    weights = dspattn.softmax(wanted)
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(padded[..., :n_q, : wanted.shape[-1]], weights, atol=tolerance, rtol=tolerance)
    out = _ops.sparse_product(padded, metadata, v, n_q, keep, group, interleaved)
    plain = dspattn.spmm(weights, metadata, v, pattern=pattern, grouping=grouping)
    torch.testing.assert_close(out, plain, atol=tolerance, rtol=tolerance)


def test_operators_refuse_another_layout() -> None:
    q, k, v = inputs(40, 70, torch.bfloat16)
    nonzeros, metadata = _ops.sparse_scores(q, k, None, None, 2, 4, False, False, False, None)
    for call, parts in (
        (lambda: _ops.sparse_softmax_(nonzeros[..., :-1]), ("nonzeros", "x 47", "strides")),
        (lambda: _ops.sparse_product(nonzeros[:, :, :32], metadata, v, 40, 2, 4, False), ("nonzeros", "2 x 3 x 64")),
        (lambda: _ops.sparse_product(nonzeros, metadata.to(torch.int32), v, 40, 2, 4, False), ("metadata", "int16")),
        (lambda: _ops.sparse_scores(q[0], k, None, None, 2, 4, False, False, False, None), ("q", "4 dimensions")),
    ):
        with pytest.raises(RuntimeError) as caught:
            call()
        for part in parts:
            assert part in str(caught.value)


@needs_gpu
@pytest.mark.parametrize("grouping", ["consecutive", "interleaved"])
@pytest.mark.parametrize("dtype,pattern", FORMATS, ids=str)
@pytest.mark.parametrize("n_q,n_k", SHAPES, ids=str)
def test_gpu_agrees_with_the_cpu(
    n_q: int, n_k: int, dtype: torch.dtype, pattern: str, grouping: dspattn.patterns.Grouping
) -> None:
    q, k, v = inputs(n_q, n_k, dtype)
    mask = torch.rand(2, 1, n_q, n_k) > 0.3
    bias = torch.randint(-8, 8, (n_q, n_k)).float()
    variants: tuple[dict[str, Any], ...] = ({}, {"is_causal": True}, {"attn_mask": mask}, {"attn_mask": bias})
    for options in variants:
        names: dict[str, Any] = {"pattern": pattern, "grouping": grouping}
        there = {name: x.cuda() if isinstance(x, torch.Tensor) else x for name, x in options.items()}
        nonzeros, metadata = dspattn.sddmm(q.cuda(), k.cuda(), scale=0.125, **there, **names)
        wanted, wanted_metadata = dspattn.sddmm(q, k, scale=0.125, **options, **names)
        assert nonzeros.is_cuda and metadata.is_cuda
        layout = (int(pattern[0]), int(pattern[2]), grouping == "interleaved")
        assert torch.equal(nonzeros.cpu(), wanted)
        assert same_codes(metadata.cpu(), wanted_metadata, n_q, n_k, dtype == torch.float32, *layout)
        weights = dspattn.softmax(nonzeros)
        out = dspattn.spmm(weights, metadata, v.cuda(), **names)
        tolerance = TOLERANCE[dtype]
        torch.testing.assert_close(weights.cpu(), dspattn.softmax(wanted), atol=tolerance, rtol=tolerance)
        plain = dspattn.spmm(dspattn.softmax(wanted), wanted_metadata, v, **names)
        torch.testing.assert_close(out.cpu(), plain, atol=tolerance, rtol=tolerance)
        dense = sparse.to_dense(weights, metadata, n_k, **names)
        assert torch.equal(dense.cpu(), sparse.to_dense(weights.cpu(), wanted_metadata, n_k, **names))


@needs_gpu
@pytest.mark.parametrize("lead", [(), (3,), (2, 3), (2, 1, 3)], ids=str)
def test_gpu_takes_any_leading_dimensions(lead: tuple[int, ...]) -> None:
    torch.manual_seed(1)
    q, k, v = (torch.randint(-2, 3, (*lead, n, 32)).to(torch.bfloat16) for n in (20, 48, 48))
    nonzeros, metadata = dspattn.sddmm(q.cuda(), k[..., :1, :, :].cuda() if len(lead) > 1 else k.cuda())
    wanted, wanted_metadata = dspattn.sddmm(q, k[..., :1, :, :] if len(lead) > 1 else k)
    assert torch.equal(nonzeros.cpu(), wanted)
    assert same_codes(metadata.cpu(), wanted_metadata, 20, 48, False, 2, 4, False)
    out = dspattn.spmm(dspattn.softmax(nonzeros), metadata, v.cuda())
    plain = dspattn.spmm(dspattn.softmax(wanted), wanted_metadata, v)
    torch.testing.assert_close(out.cpu(), plain, atol=2e-2, rtol=2e-2)


@needs_gpu
@pytest.mark.parametrize("dtype,pattern", FORMATS, ids=str)
def test_gpu_gradients_are_those_of_the_cpu(dtype: torch.dtype, pattern: str) -> None:
    there = [t.cuda().requires_grad_() for t in inputs(40, 70, dtype)]
    here = [t.detach().cpu().requires_grad_() for t in there]
    d_out = contract.integers(2, 3, 40, 64, low=-2, high=2).to(dtype)
    grads = []
    for tensors in (there, here):
        nonzeros, metadata = dspattn.sddmm(tensors[0], tensors[1], pattern=pattern, scale=0.125)
        out = dspattn.spmm(dspattn.softmax(nonzeros), metadata, tensors[2], pattern=pattern)
        grads.append(torch.autograd.grad(out, tensors, d_out.to(out.device)))
    for ours, wanted in zip(*grads, strict=True):
        torch.testing.assert_close(ours.cpu(), wanted, atol=5e-2, rtol=5e-2)


@needs_gpu
def test_gpu_errors_name_what_is_wrong() -> None:
    q, k, v = (t.cuda() for t in inputs(32, 64, torch.bfloat16))
    nonzeros, metadata = dspattn.sddmm(q, k)
    for call, parts in (
        (lambda: dspattn.sddmm(q, k.cpu()), ("key", "cpu")),
        (lambda: dspattn.sddmm(q, k, pattern="4:8"), ("4:8",)),
        (lambda: dspattn.sddmm(q, k[:1].expand(3, -1, -1, -1)), ("key", "broadcast")),
        (lambda: dspattn.spmm(nonzeros, metadata, v[:, :, :60]), ("nonzeros", "32")),
        (lambda: dspattn.spmm(nonzeros, metadata[:1], v), ("metadata",)),
    ):
        with pytest.raises(dspattn.DspattnError) as caught:
            call()
        for part in parts:
            assert part in str(caught.value)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("hidden_by", ["mask", "causality"])
def test_gradients_of_queries_that_do_not_see_a_bad_key(hidden_by: str, bad: float) -> None:
    torch.manual_seed(0)
    n, row = 40, 25  # queries before this row do not see the key there
    mask = torch.ones(n, n, dtype=torch.bool)
    mask[:, row] = torch.arange(n) >= (n if hidden_by == "mask" else row)
    options = {"attn_mask": mask} if hidden_by == "mask" else {"is_causal": True}
    q, clean, v = (torch.randn(2, n, 16) for _ in range(3))
    broken = clean.clone()
    broken[0, row] = bad

    def gradients(k: torch.Tensor) -> list[torch.Tensor]:
        leaves = [q.clone().requires_grad_(), k.clone().requires_grad_()]
        nonzeros, metadata = dspattn.sddmm(*leaves, **options)
        out = dspattn.spmm(dspattn.softmax(nonzeros), metadata, v)
        return list(torch.autograd.grad(out.sin().sum(), leaves))

    for got, wanted in zip(gradients(broken), gradients(clean), strict=True):
        assert torch.equal(got[1], wanted[1])
        if hidden_by == "mask":
            assert torch.equal(got[0], wanted[0])
        else:
            assert got[0].isnan().any(), "a query that sees the key has no gradient to hide"
    seen_by = n if hidden_by == "mask" else row
    assert torch.equal(gradients(broken)[0][0, :seen_by], gradients(clean)[0][0, :seen_by])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_autocast_rounds_nothing_on_the_way(dtype: torch.dtype) -> None:
    """The steps take the types that they are given, as their kernels do on a GPU."""

    def run() -> tuple[torch.Tensor, ...]:
        torch.manual_seed(3)
        q, k, v = (torch.randn(2, n, 16).to(dtype).requires_grad_() for n in (6, 70, 70))
        nonzeros, metadata = dspattn.sddmm(q, k)
        out = dspattn.spmm(dspattn.softmax(nonzeros), metadata, v)
        return nonzeros, out, *torch.autograd.grad(out.float().square().sum(), (q, k))

    expected = run()
    with torch.autocast("cpu", torch.float16 if dtype == torch.bfloat16 else torch.bfloat16):
        ours = run()
    for one, other in zip(ours[:2], expected[:2], strict=True):
        assert one.dtype == dtype and torch.equal(one, other)
    for one, other in zip(ours[2:], expected[2:], strict=True):
        torch.testing.assert_close(one, other, rtol=0.02, atol=0.02)
