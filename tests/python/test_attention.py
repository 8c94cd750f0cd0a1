"""dspattn.attention against PyTorch's scaled_dot_product_attention and against the definition written out."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa

import dspattn
import layouts
import sdpa_cases

CASES = 600
# Rounding of one result, and room for sums of up to 150 terms of either sign.
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


@pytest.mark.parametrize("first", range(0, CASES, 50))
def test_dense_equals_sdpa_on_random_calls(first: int) -> None:
    for seed in range(first, first + 50):
        case = sdpa_cases.make(seed)
        ours = dspattn.attention(case.query, case.key, case.value, **case.options, pattern="dense")
        theirs = sdpa(case.query, case.key, case.value, **case.options)
        assert ours.shape == theirs.shape and ours.dtype == theirs.dtype, case.words
        torch.testing.assert_close(
            ours.double(),
            sdpa_cases.exact(case),
            atol=TOLERANCE[ours.dtype],
            rtol=2e-2,
            msg=lambda text, case=case: f"{case.words}\n{text}",
        )
        # PyTorch itself gives NaN for some queries that see no key; there the definition above decides.
        known = ~theirs.isnan()
        torch.testing.assert_close(
            ours[known],
            theirs[known],
            atol=2 * TOLERANCE[ours.dtype],
            rtol=2e-2,
            msg=lambda text, case=case: f"{case.words}\n{text}",
        )


def test_cases_cover_the_argument_space() -> None:
    words = [sdpa_cases.make(seed).words for seed in range(CASES)]
    for part in (
        "enable_gqa=True",
        "is_causal=True",
        "attn_mask=",
        "scale=",
        "bfloat16",
        "float16",
        "float32",
        *layouts.LAYOUTS,
        "q [0, ",
    ):
        assert sum(part in text for text in words) >= 5, part


def test_window_as_a_list() -> None:
    q, k, v = (torch.randn(1, 2, 9, 8) for _ in range(3))
    wanted = dspattn.attention(q, k, v, window=(1, 2))
    assert torch.equal(dspattn.attention(q, k, v, window=[1, 2]), wanted)
    assert torch.equal(dspattn.attention(q, k, v, window=list(torch.tensor([1, 2]))), wanted)
