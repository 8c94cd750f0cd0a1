"""Pruned attention against the contract written out: what is kept, outputs, LSE, gradients."""

from __future__ import annotations

import pytest
import torch

import contract
import dspattn
from contract import integers

PATTERNS = ["1:2", "2:4", "1:4", "4:8", "3:8", "dense"]
GROUPINGS = ["interleaved", "consecutive"]
SCALE = 0.25  # a power of two: bias / scale stays exact
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}


def masks(n_q: int, n_k: int) -> dict[str, tuple[dict, dict]]:
    """Name: (arguments of dspattn.attention, arguments of contract.attention)."""
    boolean = torch.rand(2, 1, n_q, n_k) > 0.4
    boolean[0, 0, 0] = False  # one query that sees no key
    bias = torch.randint(-8, 9, (1, 4, n_q, n_k)) * SCALE
    lengths = torch.tensor([n_k, n_k // 3])
    by_length = (torch.arange(n_k) < lengths[:, None])[:, None, None, :]
    diagonal = contract.visible(n_q, n_k, causal=True)
    corner = contract.visible(n_q, n_k, causal=True, bottom_right=True)
    band = contract.visible(n_q, n_k, window=(5, 9), bottom_right=True)
    return {
        "none": ({}, {}),
        "causal": ({"is_causal": True}, {"mask": diagonal}),
        "causal bottom right": ({"is_causal": True, "alignment": "bottom_right"}, {"mask": corner}),
        "window": ({"window": (5, 9), "alignment": "bottom_right"}, {"mask": band}),
        "boolean": ({"attn_mask": boolean}, {"mask": boolean}),
        "bias": ({"attn_mask": bias}, {"bias": bias}),
        "boolean and bias": ({"attn_mask": boolean, "attn_bias": bias}, {"mask": boolean, "bias": bias}),
        "key lengths": ({"key_lengths": lengths}, {"mask": by_length}),
        "all": (
            {"attn_mask": boolean, "attn_bias": bias, "key_lengths": lengths, "is_causal": True},
            {"mask": boolean & by_length & diagonal, "bias": bias},
        ),
    }


@pytest.mark.parametrize("grouping", GROUPINGS)
@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_outputs_follow_the_contract(dtype: torch.dtype, pattern: str, grouping: str) -> None:
    torch.manual_seed(7)
    for n_q, n_k in ((1, 1), (5, 37), (9, 150), (3, 300)):
        q, k, v = integers(2, 4, n_q, 16), integers(2, 2, n_k, 16), integers(2, 2, n_k, 24)
        q, k, v = (t.to(dtype) for t in (q, k, v))
        for name, (ours, theirs) in masks(n_q, n_k).items():
            out, lse = dspattn.attention(
                q, k, v, **ours, scale=SCALE, enable_gqa=True, pattern=pattern, grouping=grouping, return_lse=True
            )
            wanted_out, wanted_lse = contract.attention(q, k, v, pattern, grouping, scale=SCALE, **theirs)
            where = f"{name} mask, n_q {n_q}, n_k {n_k}"
            tolerance = TOLERANCE[dtype]
            assert out.dtype == dtype and lse.dtype == torch.float32
            torch.testing.assert_close(
                out.double(), wanted_out, atol=tolerance, rtol=tolerance, msg=lambda m, w=where: w + m
            )
            torch.testing.assert_close(lse.double(), wanted_lse, atol=1e-5, rtol=1e-5, msg=lambda m, w=where: w + m)


@pytest.mark.parametrize("grouping", GROUPINGS)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_gradients_follow_the_contract(pattern: str, grouping: str) -> None:
    torch.manual_seed(8)
    n_q, n_k = 9, 150
    for name, (ours, theirs) in masks(n_q, n_k).items():
        inputs = [integers(2, 4, n_q, 16), integers(2, 2, n_k, 16), integers(2, 2, n_k, 24)]
        inputs = [t.requires_grad_() for t in inputs]
        d_out, d_lse = torch.randn(2, 4, n_q, 24), torch.randn(2, 4, n_q)
        out, lse = dspattn.attention(
            *inputs, **ours, scale=SCALE, enable_gqa=True, pattern=pattern, grouping=grouping, return_lse=True
        )
        wanted = contract.attention(*inputs, pattern, grouping, scale=SCALE, **theirs)
        visible_lse = lse > float("-inf")

        def loss(out: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
            return (out * d_out).sum() + (lse.masked_fill(~visible_lse, 0) * d_lse).sum()  # noqa: B023

        for with_lse in (False, True):
            pairs = (loss(out, lse), loss(*wanted)) if with_lse else ((out * d_out).sum(), (wanted[0] * d_out).sum())
            got = torch.autograd.grad(pairs[0], inputs, retain_graph=True)
            expected = torch.autograd.grad(pairs[1], inputs, retain_graph=True)
            for which, a, b in zip("qkv", got, expected, strict=True):
                torch.testing.assert_close(
                    a, b.float(), atol=1e-4, rtol=1e-4, msg=lambda m, w=f"{name} d{which} ": w + m
                )


def test_ties_keep_the_lower_key() -> None:
    q, k = torch.ones(1, 1, 1, 4), torch.ones(1, 1, 8, 4)
    consecutive = dspattn.attention_weights(q, k, pattern="2:4", grouping="consecutive")
    assert consecutive.squeeze().tolist() == [0.25, 0.25, 0, 0, 0.25, 0.25, 0, 0]
    k = torch.ones(1, 1, 128, 4)
    interleaved = dspattn.attention_weights(q, k, pattern="1:2", grouping="interleaved")
    assert (interleaved.squeeze() > 0).tolist() == [True] * 64 + [False] * 64


def test_short_interleaved_rows_are_not_pruned() -> None:
    """Up to 128 / M keys every group has one key, so nothing is pruned."""
    q, k, v = (torch.randn(1, 2, 64, 16) for _ in range(3))
    dense = dspattn.attention(q, k, v, pattern="dense")
    torch.testing.assert_close(dspattn.attention(q, k, v, pattern="1:2"), dense)
    assert not torch.allclose(dspattn.attention(q, k, v, pattern="1:4"), dense, atol=1e-3)


def test_nan_stays_in_its_row() -> None:
    q, k, v = (torch.randn(1, 1, 20, 8) for _ in range(3))
    q[0, 0, 3, 2] = float("nan")
    out = dspattn.attention(q, k, v)
    assert out[0, 0, 3].isnan().all() and out.isnan().any(-1).sum() == 1


def test_gradcheck_by_finite_differences() -> None:
    """The reference kernel sums in float64, so that float32 inputs allow a tight tolerance."""
    torch.manual_seed(5)
    q, k, v = (torch.randn(1, 2, 6, 4, requires_grad=True) for _ in range(3))

    def dense(*inputs: torch.Tensor) -> torch.Tensor:
        return dspattn.attention(*inputs, pattern="dense", is_causal=True, kernel="cpu_reference")

    assert torch.autograd.gradcheck(dense, (q, k, v), eps=1e-2, atol=2e-4, rtol=1e-3, check_undefined_grad=False)

    # Scores far apart, so that no step of the differences changes what is kept.
    separate = torch.tensor([0.0, 9.0, 3.0, 6.0]).repeat(2)[:, None].expand(8, 4) / 4
    k = (separate + 0.1 * torch.randn(8, 4))[None, None].requires_grad_()
    q = (torch.ones(1, 1, 5, 4) + 0.1 * torch.randn(1, 1, 5, 4)).requires_grad_()
    v = torch.randn(1, 1, 8, 4, requires_grad=True)

    def pruned(*inputs: torch.Tensor) -> torch.Tensor:
        return dspattn.attention(*inputs, pattern="2:4", grouping="consecutive", kernel="cpu_reference")

    assert torch.autograd.gradcheck(pruned, (q, k, v), eps=1e-2, atol=2e-4, rtol=1e-3, check_undefined_grad=False)


def test_packed_sequences_equal_separate_calls() -> None:
    torch.manual_seed(9)
    lengths_q, lengths_k = [3, 0, 40, 1], [150, 7, 33, 0]
    cu_q, cu_k = (torch.tensor([0, *torch.tensor(n).cumsum(0).tolist()]) for n in (lengths_q, lengths_k))
    q, k, v = torch.randn(44, 4, 16), torch.randn(190, 2, 16), torch.randn(190, 2, 8)
    for options in ({}, {"is_causal": True}, {"window": (4, 2)}, {"grouping": "consecutive", "pattern": "1:2"}):
        leaves = [t.clone().requires_grad_() for t in (q, k, v)]
        out, lse = dspattn.varlen_attention(*leaves, cu_q, cu_k, return_lse=True, **options)
        assert out.shape == (44, 4, 8) and lse.shape == (4, 44)
        pieces = [t.clone().requires_grad_() for t in (q, k, v)]
        wanted = []
        for s in range(4):
            rows, keys = slice(cu_q[s], cu_q[s + 1]), slice(cu_k[s], cu_k[s + 1])
            one = [t[part].transpose(0, 1)[None] for t, part in zip(pieces, (rows, keys, keys), strict=True)]
            wanted.append(dspattn.attention(*one, enable_gqa=True, alignment="bottom_right", **options)[0])
        expected = torch.cat(wanted, 1).transpose(0, 1)
        torch.testing.assert_close(out, expected)
        got = torch.autograd.grad(out.sin().sum(), leaves)
        for a, b in zip(got, torch.autograd.grad(expected.sin().sum(), pieces), strict=True):
            torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


def test_weights_are_those_of_the_attention() -> None:
    torch.manual_seed(3)
    q, k, v = torch.randn(2, 4, 20, 16), torch.randn(2, 2, 600, 16), torch.randn(2, 2, 600, 16)
    options = {"pattern": "2:4", "enable_gqa": True, "window": (None, 500)}
    weights = dspattn.attention_weights(q, k, **options)
    assert weights.shape == (2, 4, 20, 600)
    out = weights @ v.repeat_interleave(2, 1)
    torch.testing.assert_close(out, dspattn.attention(q, k, v, **options), atol=1e-5, rtol=1e-4)
    groups = weights.unflatten(-1, (150, 4))
    consecutive = dspattn.attention_weights(q, k, pattern="2:4", grouping="consecutive", enable_gqa=True)
    assert (groups > 0).sum(-1).max() > 2, "interleaved groups are not runs of four keys"
    assert ((consecutive.unflatten(-1, (150, 4)) > 0).sum(-1) == 2).all()


@pytest.mark.parametrize(
    "pattern",
    ["02:4", "2:04", "0:4", "00:4", "+2:4", " 2:4", "2:4 ", "2 :4", "2:", ":4", ":", "", "2:4:8", "5:4", "1:33"],
)
def test_patterns_are_plain_decimals(pattern):
    """As the C++ library and the command line take them."""
    expected = r'pattern: expected "dense" or "N:M" with 1 <= N <= M <= 32, got '
    with pytest.raises(dspattn.DspattnError, match=expected):
        dspattn.patterns.parse_pattern(pattern)
    with pytest.raises(dspattn.DspattnError, match=expected):
        dspattn.attention(*[torch.zeros(1, 1, 4, 4)] * 3, pattern=pattern)
