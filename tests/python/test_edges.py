"""Calls at the ends of what an argument may hold, through PyTorch's operators on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import dspattn
from dspattn import _ops
from dspattn._schema import ProblemArguments

LOWEST = torch.finfo(torch.float32).min
INF = float("inf")


def packed(rows: int, end: int) -> tuple[list[torch.Tensor], torch.Tensor]:
    torch.manual_seed(1)
    tensors = [torch.randn(rows, heads, 16, requires_grad=True) for heads in (4, 2, 2)]
    # Every other entry of memory that holds other numbers between.
    lengths = torch.tensor([[0, -9], [end // 2, 10**6], [end, 3]], dtype=torch.int32)[:, 0]
    return tensors, lengths


def test_rows_past_the_last_sequence_are_rows_without_keys() -> None:
    poison = [torch.full((40, 4, 16), float("nan")) for _ in range(8)]  # what the allocator hands out next
    del poison
    tensors, lengths = packed(40, 25)
    out, lse = dspattn.varlen_attention(*tensors, lengths, lengths, return_lse=True)
    assert (out[25:] == 0).all()
    assert out[:25].isfinite().all()
    assert (lse == -INF).sum() == 4 * 15
    gradients = torch.autograd.grad(out.sum(), tensors)
    for gradient in gradients:
        assert (gradient[25:] == 0).all()
        assert gradient.isfinite().all()


@pytest.mark.parametrize("bound", [2**31, 2**62, 2**63 - 1])
def test_any_bound_of_the_lengths_serves(bound: int) -> None:
    tensors, lengths = packed(30, 30)
    expected = dspattn.varlen_attention(*tensors, lengths, lengths)
    out = dspattn.varlen_attention(*tensors, lengths, lengths, bound, bound)
    assert torch.equal(out, expected)
    wanted, given = (torch.autograd.grad(result.square().sum(), tensors) for result in (expected, out))
    assert all(torch.equal(a, b) for a, b in zip(wanted, given, strict=True))


@pytest.mark.parametrize(
    ("keep", "group"),
    [(2**32 + 2, 2**32 + 4), (2**32 + 2, 4), (2, 2**32 + 4), (0, 0), (1, 0), (-1, 4), (5, 4), (1, 33)],
)
def test_a_pattern_is_not_narrowed_nor_divided_by(keep: int, group: int) -> None:
    x = torch.randn(1, 1, 32, 16)
    options: tuple[Any, ...] = (keep, group, False, False, True, None)
    metadata = torch.zeros(1, 32, 8, dtype=torch.int16)
    calls = {
        "attention": lambda: _ops.attention(*ProblemArguments(x, x, x, keep=keep, group=group)),
        "sparse_scores": lambda: _ops.sparse_scores(x, x, None, None, *options),
        "sparse_product": lambda: _ops.sparse_product(x, metadata[None], x, 32, keep, group, False),
        "nm_prune": lambda: _ops.nm_prune(x[0], keep, group, False),
        "nm_encode": lambda: _ops.nm_encode(torch.zeros(1, 32, 8, dtype=torch.uint8), 16, keep, group, False, True),
        "nm_decode": lambda: _ops.nm_decode(metadata, 32, 64, keep, group, False, True),
    }
    for name, call in calls.items():
        with pytest.raises(RuntimeError, match=rf"pattern: expected N:M with .* got {keep}:{group}"):
            call()
            raise AssertionError(f"{name} took it")


def test_decoding_refuses_sizes_before_it_asks_for_memory() -> None:
    metadata = torch.zeros(1, 32, 8, dtype=torch.int16)
    with pytest.raises(RuntimeError, match="metadata: expected"):
        _ops.nm_decode(metadata, 2**31, 2**31, 1, 2, False, True)
    with pytest.raises(RuntimeError, match="rows: expected a count from 0"):
        _ops.nm_decode(metadata, -1, 64, 1, 2, False, True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_sddmm_a_finite_bias_does_not_mask(dtype: torch.dtype) -> None:
    q, k = torch.ones(1, 4, dtype=dtype), torch.ones(4, 4, dtype=dtype)
    bias = torch.tensor([[LOWEST, LOWEST, -LOWEST, 0.0]])
    nonzeros, _ = dspattn.sddmm(q, k, bias, pattern="1:2", scale=0.125)
    largest = torch.finfo(dtype).max
    assert nonzeros.tolist() == [[-largest, largest]]
    if dtype != torch.float32:  # 16-bit types compare in fp16, where these are ties
        return
    kept, _ = dspattn.sddmm(q, k, torch.tensor([[-1e38, -5e37, 5e37, 1e38]]), pattern="1:2", scale=0.125)
    torch.testing.assert_close(kept, torch.tensor([[-5e37, 1e38]]))


def test_sddmm_nothing_reaches_a_row_from_behind_a_mask() -> None:
    q, k = torch.ones(1, 4), torch.tensor([[float("nan")], [2.0], [float("nan")], [1.0]]).expand(4, 4)
    hidden = torch.tensor([[-INF, 0.0, -INF, 0.0]])
    for mask in (hidden, hidden == 0):
        nonzeros, _ = dspattn.sddmm(q, k, mask, scale=1.0)
        assert nonzeros.tolist() == [[8.0, 4.0]]


def test_sddmm_fp16_scores_beyond_fp16_stay_finite() -> None:
    q = torch.full((1, 64), 60.0, dtype=torch.float16)
    nonzeros, _ = dspattn.sddmm(q, torch.cat([q, -q, q / 4, q]), scale=1.0)
    assert nonzeros.isfinite().all()
    assert nonzeros.max() == 65504
    assert dspattn.softmax(nonzeros).isfinite().all()
    assert dspattn.sddmm(q, -q, scale=1.0)[0].tolist() == [[-65504.0, -INF]]


@pytest.mark.parametrize("scale", [0.0, -1.0, INF, float("nan"), 1e-39, 1e38])
def test_scales_that_are_not_served_are_refused(scale: float) -> None:
    x = torch.randn(4, 8)
    for call in (lambda: dspattn.sddmm(x, x, scale=scale), lambda: dspattn.attention(x, x, x, scale=scale)):
        with pytest.raises(dspattn.DspattnError, match=r"scale: expected a finite, positive number from 2\^-126"):
            call()


def test_nan_rows_have_nan_gradients() -> None:
    """What a gradient scaler looks at."""
    torch.manual_seed(2)
    q, k, v = (torch.randn(1, 2, 40, 16) for _ in range(3))
    k[0, 0, 7, 3] = INF
    q, k, v = (t.requires_grad_() for t in (q, k, v))
    out = dspattn.attention(q, k, v, is_causal=True)
    gradients = torch.autograd.grad(out.sum(), (q, k, v))
    rows = out.isnan().any(-1)
    assert 3 < rows.sum() < 40
    assert torch.equal(gradients[0].isnan().any(-1), rows)
    assert all(gradient[0, 0].isnan().any() for gradient in gradients)
    assert all(gradient[0, 1].isfinite().all() for gradient in gradients)


def test_flushing_subnormals_leaves_the_bits_alone() -> None:
    torch.manual_seed(3)
    q, k, v = torch.randn(1, 4, 64, 16), torch.randn(1, 4, 64, 16), torch.randn(1, 4, 64, 16) * 2.0**-130
    expected = dspattn.attention(q, k, v)
    threads = torch.get_num_threads()
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush subnormal numbers")
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            got = dspattn.attention(q, k, v)
            assert torch.equal(got.view(torch.int32), expected.view(torch.int32)), count
    finally:
        torch.set_num_threads(threads)
        torch.set_flush_denormal(False)
