"""Blocked-ELL masks from Python, and the attention that takes one: the same as a mask tensor of the same content."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

import dspattn
from dspattn import DspattnError, block_masks


def inputs(n_q: int, n_k: int, dtype: torch.dtype, grad: bool = False) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, 4, n_q, 32), (2, 2, n_k, 32), (2, 2, n_k, 16)]
    return [torch.randn(shape, generator=generator).to(dtype).requires_grad_(grad) for shape in shapes]


def test_window_is_a_band() -> None:
    mask = block_masks.sliding_window(300, window=1)
    row, column = torch.arange(300).unsqueeze(1) // 64, torch.arange(300) // 64
    assert torch.equal(mask.to_dense(), (row - column).abs() <= 1)
    assert torch.equal(block_masks.sliding_window(300, window=1, causal=True).block_map(), mask.block_map().tril())


def test_longformer_adds_global_blocks() -> None:
    seen = block_masks.longformer(512, window=0, global_blocks=2).block_map()
    expected = torch.eye(8, dtype=torch.bool)
    expected[:2] = True
    expected[:, :2] = True
    assert torch.equal(seen, expected)


def test_bigbird_adds_random_blocks_by_its_seed() -> None:
    base = block_masks.longformer(1024, window=1, global_blocks=1).block_map()
    mask = block_masks.bigbird(1024, window=1, global_blocks=1, random=2, seed=3)
    more = mask.block_map() & ~base
    assert torch.equal(mask.block_map() & base, base)
    assert more.sum(1).tolist() == [0] + [2] * 15
    assert torch.equal(mask.columns, block_masks.bigbird(1024, random=2, seed=3).columns)
    assert not torch.equal(mask.columns, block_masks.bigbird(1024, random=2, seed=4).columns)
    assert mask.density == pytest.approx(float(mask.block_map().float().mean()))


def test_a_mask_is_made_on_the_cpu_whatever_the_default_device() -> None:
    with torch.device("meta"):
        mask = block_masks.sliding_window(128)
    assert mask.counts.tolist() == [2, 2]


def test_block_map_round_trip() -> None:
    seen = torch.rand(5, 7, generator=torch.Generator().manual_seed(1)) > 0.5
    seen[2] = False
    mask = block_masks.from_block_map(seen, 300, 400)
    assert torch.equal(mask.block_map(), seen)
    assert mask.counts.tolist() == seen.sum(1).tolist()


@pytest.mark.parametrize("n_k", [200, 0])
def test_a_mask_of_nothing_gives_zeros(n_k: int) -> None:
    q, k, v = inputs(200, n_k, torch.float32, grad=True)
    out = dspattn.block_attention(
        q, k, v, block_masks.from_block_map(torch.zeros(4, -(-n_k // 64), dtype=torch.bool), 200, n_k), pattern="1:2"
    )
    out.sum().backward()
    assert not out.any() and q.grad is not None and not q.grad.any()


CASES: dict[str, dict[str, Any]] = {
    "window": {},
    "causal": {"is_causal": True, "alignment": "bottom_right"},
    "lengths": {"key_lengths": torch.tensor([260, 3])},
    "scale": {"scale": 0.3},
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    ("dtype", "pattern", "grouping", "block"),
    [
        (torch.float32, "1:2", "consecutive", 64),
        (torch.float32, "1:2", "interleaved", 128),
        (torch.bfloat16, "2:4", "consecutive", 64),
        (torch.float16, "2:4", "interleaved", 128),
    ],
)
def test_equals_a_mask_tensor(case: str, dtype: torch.dtype, pattern: str, grouping: Any, block: int) -> None:
    q, k, v = inputs(200, 270, dtype)
    mask = block_masks.bigbird(200, 270, block=block, window=0, random=1)
    options = {"pattern": pattern, "grouping": grouping, **CASES[case]}
    out = dspattn.block_attention(q, k, v, mask, **options)
    expected = dspattn.attention(q, k, v, mask.to_dense(), enable_gqa=True, **options)
    tolerance = 1e-5 if dtype == torch.float32 else 0.02  # the pipeline stores its scores in the inputs' type
    torch.testing.assert_close(out, expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("boolean", [True, False])
def test_combines_with_a_mask_tensor(boolean: bool) -> None:
    q, k, v = inputs(200, 270, torch.float32)
    mask = block_masks.sliding_window(200, 270)
    generator = torch.Generator().manual_seed(2)
    if boolean:
        given = torch.rand(2, 1, 200, 270, generator=generator) > 0.3
        dense = given & mask.to_dense()
    else:
        given = torch.randn(1, 4, 200, 270, generator=generator)
        dense = given.masked_fill(~mask.to_dense(), float("-inf"))
    out = dspattn.block_attention(q, k, v, mask, given, pattern="1:2")
    expected = dspattn.attention(q, k, v, dense, enable_gqa=True, pattern="1:2", grouping="consecutive")
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-5)


def test_gradients_are_those_of_the_mask_tensor() -> None:
    mask = block_masks.bigbird(200, 270, window=0, random=1)
    options: dict[str, Any] = {"pattern": "1:2", "grouping": "consecutive"}
    found = []
    for blocks in (True, False):
        q, k, v = inputs(200, 270, torch.float32, grad=True)
        out = (
            dspattn.block_attention(q, k, v, mask, **options)
            if blocks
            else dspattn.attention(q, k, v, mask.to_dense(), enable_gqa=True, **options)
        )
        found.append(torch.autograd.grad(out.square().sum(), [q, k, v]))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_operator_is_sound() -> None:
    q, k, v = inputs(70, 130, torch.float32, grad=True)
    mask = block_masks.sliding_window(70, 130)
    arguments = (q, k, v, mask.counts, mask.columns, None, None, None, 64, 1, 2, False, False, True, None, False)
    torch.library.opcheck(torch.ops.dspattn.block_attention.default, arguments)


def test_errors_name_what_was_expected() -> None:
    q, k, v = inputs(200, 270, torch.float32)
    with pytest.raises(
        DspattnError, match="blocks: expected a mask of 200 queries and 270 keys, got one of 200 and 200"
    ):
        dspattn.block_attention(q, k, v, block_masks.sliding_window(200), pattern="1:2")
    with pytest.raises(DspattnError, match="128 for interleaved grouping"):
        dspattn.block_attention(q, k, v, block_masks.sliding_window(200, 270), pattern="1:2", grouping="interleaved")
    with pytest.raises(DspattnError, match="block: expected 64 or 128, got 32"):
        block_masks.bigbird(100, block=32)
    with pytest.raises(DspattnError, match="window: expected a count >= 0, got -1"):
        block_masks.sliding_window(100, window=-1)
    with pytest.raises(DspattnError, match=r"seen: expected a boolean tensor \[2, 2\], got torch.int64 \[2, 2\]"):
        block_masks.from_block_map(torch.eye(2).long(), 128, 128)
    blocks = block_masks.sliding_window(200, 270)
    for reason, wrong in {
        r"key_lengths\[0\]: expected at most 2147483647, got 4294967299": {
            "key_lengths": torch.tensor([2**32 + 3] * 2)
        },
        "key_lengths.dtype: expected int32 or int64, got float32": {"key_lengths": torch.tensor([3.9, 4.0])},
        "key_lengths: expected a tensor, got list": {"key_lengths": [3, 4]},
        "attn_mask: expected a plain tensor, got the subclass .*CausalBias": {
            "attn_mask": causal_lower_right(200, 270)
        },
        "key: expected a tensor on cpu as query is, got one on meta": {"key": k.to("meta")},
    }.items():
        with pytest.raises(DspattnError, match=reason):
            dspattn.block_attention(**{"query": q, "key": k, "value": v, "blocks": blocks, "pattern": "1:2", **wrong})
    with pytest.raises(DspattnError, match="window: expected a 64-bit integer, got 18446744073709551616"):
        block_masks.sliding_window(100, window=2**64)
    # A 64-bit number must not pass for the 32-bit one it ends in.
    with pytest.raises(DspattnError, match="block: expected a number of 32 bits, got 4294967360"):
        block_masks.bigbird(100, block=2**32 + 64)


def test_masks_are_compared_by_what_they_say() -> None:
    mask = dspattn.block_masks.bigbird(1024, 1000)
    twin = copy.deepcopy(mask)
    assert mask == twin and len({mask, twin}) == 1
    assert mask != dspattn.block_masks.bigbird(1024, 1000, seed=1)
    assert mask != dspattn.block_masks.bigbird(1024) and mask != "a mask"


def test_arguments_of_the_wrong_kind_are_refused_by_name() -> None:
    q = torch.randn(1, 2, 128, 16)
    mask = block_masks.bigbird(128)
    with pytest.raises(DspattnError, match="blocks: expected a BlockMask, got NoneType"):
        dspattn.block_attention(q, q, q, None)  # type: ignore[arg-type]
    with pytest.raises(DspattnError, match="scale: expected a number or None, got str"):
        dspattn.block_attention(q, q, q, mask, pattern="1:2", scale="1")  # type: ignore[arg-type]
    with pytest.raises(DspattnError, match="seen: expected a tensor, got NoneType"):
        block_masks.from_block_map(None, 64, 64)  # type: ignore[arg-type]
