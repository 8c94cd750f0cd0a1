"""The three steps: against the fused attention, and interchangeable with PyTorch's semi-structured tensors."""

from __future__ import annotations

import pytest
import torch
from torch.sparse import SparseSemiStructuredTensorCUTLASS
from torch.sparse._semi_structured_conversions import (
    sparse_semi_structured_from_dense_cutlass,
    sparse_semi_structured_to_dense_cutlass,
)

import contract
import dspattn
from dspattn import sparse

FORMATS = [(torch.float32, "1:2"), (torch.bfloat16, "2:4"), (torch.float16, "2:4"), (torch.bfloat16, "1:2")]


@pytest.mark.parametrize("grouping", ["consecutive", "interleaved"])
@pytest.mark.parametrize("dtype,pattern", FORMATS, ids=str)
@pytest.mark.parametrize("n_q,n_k", [(32, 64), (5, 37), (33, 130), (1, 1)], ids=str)
def test_three_steps_are_the_attention(
    n_q: int, n_k: int, dtype: torch.dtype, pattern: str, grouping: dspattn.patterns.Grouping
) -> None:
    torch.manual_seed(n_q)
    q, k, v = (contract.integers(2, 3, n, 16).to(dtype) for n in (n_q, n_k, n_k))
    mask = torch.rand(2, 1, n_q, n_k) > 0.3
    for options in ({}, {"is_causal": True}, {"attn_mask": mask}):
        names = {"pattern": pattern, "grouping": grouping}
        nonzeros, metadata = dspattn.sddmm(q, k, scale=0.25, **options, **names)
        weights = dspattn.softmax(nonzeros)
        out = dspattn.spmm(weights, metadata, v, **names)
        fused = dspattn.attention(q, k, v, scale=0.25, **options, **names)
        tolerance = 1e-5 if dtype == torch.float32 else 3e-2
        torch.testing.assert_close(out, fused, atol=tolerance, rtol=tolerance)
        places = dspattn.attention_weights(q, k, scale=0.25, **options, **names) > 0
        assert torch.equal(sparse.to_dense(weights, metadata, n_k, **names) > 0, places)


@pytest.mark.parametrize("dtype,pattern", FORMATS[:3], ids=str)
@pytest.mark.parametrize("n_q,n_k", [(32, 64), (64, 128), (96, 320)], ids=str)
def test_pytorch_reads_what_we_write(n_q: int, n_k: int, dtype: torch.dtype, pattern: str) -> None:
    torch.manual_seed(n_k)
    q, k = torch.randn(n_q, 16).to(dtype), torch.randn(n_k, 16).to(dtype)
    nonzeros, metadata = dspattn.sddmm(q, k)
    dense = sparse.to_dense(nonzeros, metadata, n_k)
    packed, meta = sparse_semi_structured_from_dense_cutlass(dense)
    assert torch.equal(packed, nonzeros) and torch.equal(meta, metadata)
    # PyTorch moves the halves of a float32 as float16, which changes a last bit where a half looks like a NaN.
    exact = dtype != torch.float32
    back = sparse_semi_structured_to_dense_cutlass(nonzeros, metadata)
    torch.testing.assert_close(back, dense, atol=0, rtol=0 if exact else 0.01)
    theirs = sparse.to_semi_structured(nonzeros, metadata, n_k)
    assert isinstance(theirs, SparseSemiStructuredTensorCUTLASS)
    torch.testing.assert_close(theirs.to_dense(), dense, atol=0, rtol=0 if exact else 0.01)
    group = int(pattern[-1])
    assert ((dense != 0).unflatten(1, (-1, group)).sum(-1) == group // 2).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_we_read_what_pytorch_writes(dtype: torch.dtype) -> None:
    torch.manual_seed(2)
    keep, group = (1, 2) if dtype == torch.float32 else (2, 4)
    dense = torch.randn(64, 128)
    dense = dense.masked_fill(~contract.kept(dense, keep, group, "consecutive"), 0).to(dtype)
    packed, meta = sparse_semi_structured_from_dense_cutlass(dense)
    made = SparseSemiStructuredTensorCUTLASS(dense.shape, packed, meta, None, None, None)
    nonzeros, metadata = sparse.from_semi_structured(made)
    assert torch.equal(sparse.to_dense(nonzeros, metadata, 128), dense)
    value = torch.randn(128, 8).to(dtype)
    torch.testing.assert_close(dspattn.spmm(nonzeros, metadata, value), dense @ value, atol=3e-2, rtol=3e-2)


def test_steps_are_differentiable() -> None:
    torch.manual_seed(4)
    inputs = [contract.integers(2, 1, n, 16).requires_grad_() for n in (6, 40, 40)]
    nonzeros, metadata = dspattn.sddmm(inputs[0], inputs[1], scale=0.25)
    out = dspattn.spmm(dspattn.softmax(nonzeros), metadata, inputs[2])
    fused = dspattn.attention(*inputs, scale=0.25, pattern="1:2", grouping="consecutive")
    d_out = torch.randn_like(out)
    for a, b in zip(torch.autograd.grad(out, inputs, d_out), torch.autograd.grad(fused, inputs, d_out), strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)


def test_rows_without_a_key_give_zero() -> None:
    q, k, v = (torch.randn(4, 8) for _ in range(3))
    nonzeros, metadata = dspattn.sddmm(q, k, torch.zeros(4, 4, dtype=torch.bool))
    assert (nonzeros == float("-inf")).all()
    assert (dspattn.spmm(dspattn.softmax(nonzeros), metadata, v) == 0).all()


@pytest.mark.parametrize("lead,n_q,n_k", [((), 0, 64), ((2,), 0, 64), ((2,), 5, 0), ((0,), 5, 64)])
def test_empty_steps_are_the_attention(lead: tuple[int, ...], n_q: int, n_k: int) -> None:
    q, k, v = (torch.randn(*lead, n, 16) for n in (n_q, n_k, n_k))
    nonzeros, metadata = dspattn.sddmm(q, k)
    out = dspattn.spmm(dspattn.softmax(nonzeros), metadata, v)
    assert out.shape == (*lead, n_q, 16) and not out.any()


@pytest.mark.parametrize(
    "call,parts",
    [
        (lambda q, k: dspattn.sddmm(q, k, pattern="4:8"), ("4:8",)),
        (lambda q, k: dspattn.sddmm(q, k, pattern="2:4"), ("2:4",)),
        (lambda q, k: dspattn.sddmm(q, k, scale=-1.0), ("scale", "-1")),
        (lambda q, k: dspattn.sddmm(q[:, :0], k[:, :0]), ("query", "head dimension", "[32, 0]")),
        (lambda q, k: dspattn.sddmm(q.to("meta"), k.to("meta")), ("query", "cpu", "meta")),
        (lambda q, k: dspattn.sddmm(q.double(), k.double()), ("query.dtype", "float64")),
        (lambda q, k: dspattn.sddmm(q, k, scale="1"), ("scale", "expected a finite")),
        (lambda q, k: dspattn.sddmm(q, k, torch.zeros(32, 64).half()), ("attn_mask.dtype", "float32", "float16")),
        (lambda q, k: dspattn.sddmm(q, k, torch.zeros(32, 64, device="meta")), ("attn_mask", "on cpu", "on meta")),
        (lambda q, k: dspattn.softmax(q.double()), ("nonzeros.dtype", "float64")),
        (lambda q, k: dspattn.softmax(q.int()), ("nonzeros.dtype", "int32")),
        (lambda q, k: dspattn.spmm(*dspattn.sddmm(q, k), k.half()), ("value.dtype", "nonzeros' float32", "float16")),
        (lambda q, k: dspattn.spmm(*dspattn.sddmm(q, k), k.to(torch.complex64)), ("value.dtype", "complex64")),
        (lambda q, k: dspattn.spmm(*dspattn.sddmm(q, k), k.to("meta")), ("value", "on cpu", "on meta")),
        (lambda q, k: dspattn.spmm(q, k, k), ("metadata.dtype", "int16", "float32")),
        (lambda q, k: sparse.to_dense(*dspattn.sddmm(q, k), 64.0), ("columns", "integer", "64.0")),
        (lambda q, k: sparse.to_dense(q, k, 64), ("metadata.dtype", "int16", "float32")),
        (lambda q, k: sparse.to_semi_structured(q.double(), k, 32), ("nonzeros.dtype", "metadata.dtype")),
        (lambda q, k: dspattn.spmm(*dspattn.sddmm(q, k), torch.randn(32, 4)), ("metadata", "32 x 4", "256")),
        (lambda q, k: sparse.to_semi_structured(*dspattn.sddmm(q[:31], k), 64), ("multiple of 32", "31")),
        (lambda q, k: sparse.from_semi_structured(q), ("SparseSemiStructuredTensorCUTLASS", "Tensor")),
    ],
)
def test_errors_name_what_is_wrong(call, parts) -> None:
    with pytest.raises(dspattn.DspattnError) as caught:
        call(torch.randn(32, 16), torch.randn(64, 16))
    for part in parts:
        assert part in str(caught.value)
