"""Attention against a cache: sums of the values that the caller keeps, pages, and what is refused; where there is a
GPU, on it too, in a graph whose lengths grow."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import dspattn

DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")),
]


def cache(device: str, heads: int = 2, n: int = 400, d: int = 64) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    shapes = ((2, 4, 1, d), (2, heads, n, d), (2, heads, n, d))
    q, k, v = (torch.randn(shape, device=device).to(dtype) for shape in shapes)
    return q, k, v


def reference(value: Tensor, lengths: list[int]) -> Tensor:
    """The sums of whole blocks; NaN elsewhere."""
    batch, heads, n, d = value.shape
    sums = torch.full((batch, heads, 2 * (n // 128), d + 1), float("nan"), dtype=torch.float64, device=value.device)
    ones = torch.cat((value.double(), torch.ones_like(value[..., :1]).double()), -1)
    for s, length in enumerate(lengths):
        for block in range(length // 128):
            sums[s, :, 2 * block] = ones[s, :, 128 * block : 128 * block + 128].sum(1)
            sums[s, :, 2 * block + 1] = ones[s, :, : 128 * block + 128].sum(1)
    return sums


def expect_sums(sums: Tensor, value: Tensor, lengths: list[int]) -> None:
    expected = reference(value, lengths)
    known = ~expected.isnan()
    torch.testing.assert_close(sums.double()[known], expected[known], rtol=0, atol=1e-3)


@pytest.mark.parametrize("device", DEVICES)
def test_sums_follow_a_cache_that_grows(device: str) -> None:
    _, _, v = cache(device)
    lengths = torch.tensor([100, 300], device=device)
    sums = dspattn.value_sums(v, lengths)
    assert sums.shape == (2, 2, 6, 65)
    expect_sums(sums, v, [100, 300])
    for step in ([127, 383], [128, 384], [129, 385]):
        dspattn.update_value_sums(sums, v, 83, torch.tensor(step, device=device))
        expect_sums(sums, v, step)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("selection", ["own", "shared"])
def test_sums_change_nothing_but_what_is_read(device: str, selection: dspattn.patterns.Selection) -> None:
    q, k, v = cache(device)
    lengths = torch.tensor([390, 400], device=device, dtype=torch.int32)
    sums = dspattn.value_sums(v, lengths)
    results = [
        dspattn.attention_with_cache(
            q, k, v, lengths, rest="mean", sums=given, selection=selection, return_lse=True,
            kernel="decode_bf16_d64" if device == "cuda" and given is not None else "",
        )
        for given in (sums, None)
    ]  # fmt: skip
    precision = 1e-5 if device == "cpu" else 1e-2
    for with_sums, without in zip(*results, strict=True):
        torch.testing.assert_close(with_sums, without, rtol=precision, atol=precision)
    plain = dspattn.attention(q, k, v, key_lengths=lengths, rest="mean", selection=selection, enable_gqa=True)
    torch.testing.assert_close(results[1][0], plain, rtol=0, atol=0)
    dense = dspattn.attention(q, k, v, key_lengths=lengths, pattern="dense", enable_gqa=True, return_lse=True)[1]
    torch.testing.assert_close(results[0][1], dense, rtol=precision, atol=precision)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="pages are for GPUs")
def test_pages() -> None:
    q, k, v = cache("cuda", n=384)
    table = torch.randperm(12, device="cuda").view(2, 6)
    pages = []
    for tensor in (k, v):
        split = tensor.view(2, 2, 6, 64, 64).transpose(1, 2).reshape(12, 2, 64, 64)
        pages.append(torch.empty_like(split))
        pages[-1][table.flatten()] = split
    lengths = torch.tensor([200, 384], device="cuda")
    rests: tuple[dspattn.patterns.Rest, ...] = ("drop", "mean")
    for rest in rests:
        sums = dspattn.value_sums(pages[1], lengths, block_table=table) if rest == "mean" else None
        paged = dspattn.attention_with_cache(q, pages[0], pages[1], lengths, block_table=table, sums=sums, rest=rest)
        whole = dspattn.attention_with_cache(q, k, v, lengths, rest=rest)
        torch.testing.assert_close(paged, whole, rtol=1e-2, atol=1e-2)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_graph_updates_sums_while_lengths_grow() -> None:
    q, k, v = cache("cuda")
    lengths = torch.tensor([120, 250], device="cuda", dtype=torch.int32)
    sums = dspattn.value_sums(v, lengths)

    def step() -> Tensor:
        lengths.add_(1)
        dspattn.update_value_sums(sums, v, 1, lengths)
        return dspattn.attention_with_cache(q, k, v, lengths, rest="mean", sums=sums, kernel="decode_bf16_d64")

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for _ in range(20):
        graph.replay()
        expected = dspattn.attention_with_cache(q, k, v, lengths, rest="mean")
        torch.testing.assert_close(out, expected, rtol=1e-2, atol=1e-2)
    assert lengths.tolist() == [141, 271]


def test_wrong_calls_are_named() -> None:
    q, k, v = cache("cpu")
    sums = dspattn.value_sums(v)
    with pytest.raises(dspattn.DspattnError, match=r"sums: expected none with rest = drop, got some"):
        dspattn.attention_with_cache(q, k, v, sums=sums)
    with pytest.raises(dspattn.DspattnError, match=r"sums.shape\[2\]: expected an even number from .* = 6 on, got 4"):
        dspattn.attention_with_cache(q, k, v, sums=sums[:, :, :4], rest="mean")
    with pytest.raises(dspattn.DspattnError, match=r"new_keys: expected a 64-bit integer, got 9223372036854775808"):
        dspattn.update_value_sums(torch.zeros(1, 1, 2, 9), torch.zeros(1, 1, 128, 8), 2**63)
    with pytest.raises(dspattn.DspattnError, match=r"new_keys: expected >= 0, got -1"):
        dspattn.update_value_sums(sums, v, -1)
    with pytest.raises(dspattn.DspattnError, match=r"value: expected 4 dimensions"):
        dspattn.value_sums(v[0])
    with pytest.raises(dspattn.DspattnError, match=r"sums.dtype: expected float32, got bfloat16"):
        dspattn.update_value_sums(sums.bfloat16(), v, 1)


class Subclass(torch.Tensor):
    """Of which nobody knows what its elements mean."""


WRONG_SUMS = {
    "batch": (lambda s: s[:1], r"sums.shape\[0\]: expected batch = 2, got 1"),
    "heads": (lambda s: s.repeat(1, 2, 1, 1), r"sums.shape\[1\]: expected value's kv_heads = 2, got 4"),
    "blocks": (lambda s: s[:, :, :2], r"sums.shape\[2\]: expected an even number from .* = 4 on, got 2"),
    "odd": (lambda s: torch.cat([s, s[:, :, :1]], 2), r"sums.shape\[2\]: expected an even number from .* got 5"),
    "width": (lambda s: s[..., 1:], r"sums.shape\[3\]: expected value's d_v \+ 1 = 17, got 16"),
    "dimensions": (lambda s: s[0], r"sums: expected rank 4"),
    "strides": (lambda s: s.transpose(2, 3).contiguous().transpose(2, 3), r"sums.stride\[3\]: expected 1"),
    "float64": (lambda s: s.double(), r"sums.dtype: expected float32, got float64"),
    "bfloat16": (lambda s: s.bfloat16(), r"sums.dtype: expected float32, got bfloat16"),
    "int32": (lambda s: s.int(), r"sums.dtype: expected float32, got int32"),
    "meta": (lambda s: s.to("meta"), r"sums: expected a tensor on .* got one on meta"),
    "sparse": (lambda s: s.to_sparse(), r"sums: expected a strided tensor"),
    "list": (lambda s: s.tolist(), r"sums: expected a tensor, got list"),
    "subclass": (lambda s: s.as_subclass(Subclass), r"sums: expected a plain tensor, got the subclass"),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("wrong", WRONG_SUMS)
def test_sums_that_are_none_are_refused(device: str, wrong: str) -> None:
    """Also where no kernel reads them, as on the CPU, and where nothing is pruned or computed."""
    change, reason = WRONG_SUMS[wrong]
    q, k, v = (torch.randn(2, h, n, d, device=device) for h, n, d in ((4, 1, 32), (2, 300, 32), (2, 300, 16)))
    sums = change(dspattn.value_sums(v))
    for options in ({}, {"pattern": "dense"}):
        with pytest.raises(dspattn.DspattnError, match=reason):
            dspattn.attention_with_cache(q, k, v, rest="mean", sums=sums, **options)
    with pytest.raises(dspattn.DspattnError, match=reason):
        dspattn.attention_with_cache(q[:, :, :0], k, v, rest="mean", sums=sums)
    with pytest.raises(dspattn.DspattnError, match=reason.replace(" query ", " value ")):
        dspattn.update_value_sums(sums, v, 1)


def test_vmap_over_steps_of_one_cache_and_over_caches() -> None:
    q, k, v = torch.randn(2, 1, 4, 1, 16), torch.randn(1, 2, 300, 16), torch.randn(2, 1, 2, 300, 16)
    sums = torch.vmap(dspattn.value_sums)(v)
    assert torch.equal(sums, torch.stack([dspattn.value_sums(each) for each in v]))

    def step(q: torch.Tensor, v: torch.Tensor, sums: torch.Tensor) -> torch.Tensor:
        return dspattn.attention_with_cache(q, k, v, rest="mean", sums=sums)

    alone = torch.stack([step(each, v[0], sums[0]) for each in q])
    assert torch.equal(torch.vmap(lambda q: step(q, v[0], sums[0]))(q), alone)
    with pytest.raises(dspattn.DspattnError, match="sums: expected some for each sample"):
        torch.vmap(lambda v: dspattn.update_value_sums(sums[0], v, 1))(v)
