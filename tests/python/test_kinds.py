"""Arguments of a kind that a function does not take: refused by name, never with an error of PyTorch's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import dspattn
from dspattn import block_masks, parallel, zoo

Q, K = torch.randn(2, 4, 6, 16), torch.randn(2, 4, 256, 16)
X = torch.randn(1, 5, 2, 8)
SUMS = dspattn.value_sums(K)
SEEN = torch.ones(1, 1, dtype=torch.bool)
MASK = block_masks.sliding_window(128)
X128 = torch.randn(1, 2, 128, 16)


def with_columns(columns: torch.Tensor) -> block_masks.BlockMask:
    return block_masks.BlockMask(128, 128, 64, MASK.counts, columns)


CASES: dict[str, tuple[Callable[[], Any], str]] = {
    "scale": (lambda: dspattn.attention(Q, K, K, scale=True), "scale: expected a number, got True"),
    "offset": (lambda: dspattn.attention(Q, K, K, offset=True), "offset: expected a number, got True"),
    "soft_cap": (lambda: dspattn.attention(Q, K, K, soft_cap=True), "soft_cap: expected a number, got True"),
    "packed scale": (
        lambda: dspattn.varlen_attention(
            *[Q[0].transpose(0, 1)] * 3, *[torch.tensor([0, 6])] * 2, scale=np.bool_(True)
        ),
        "scale: expected a number, got True",
    ),
    "rest": (lambda: dspattn.attention(Q, K, K, rest=np.array(["drop", "mean"])), "rest: expected"),
    "grouping": (lambda: dspattn.attention(Q, K, K, grouping=np.array(["interleaved"])), "grouping: expected"),
    "selection": (lambda: dspattn.attention(Q, K, K, selection=np.array(["own"])), "selection: expected"),
    "alignment": (lambda: dspattn.attention(Q, K, K, alignment=np.array(["top_left"])), "alignment: expected"),
    "complex sinks": (
        lambda: dspattn.attention(Q, K, K, sinks=torch.ones(4, dtype=torch.complex64)),
        "sinks.dtype: expected float32, float16 or bfloat16, got complex64",
    ),
    "integer sinks": (
        lambda: dspattn.attention(Q, K, K, sinks=torch.ones(4, dtype=torch.int64)),
        "sinks.dtype: expected float32, float16 or bfloat16, got int64",
    ),
    "weights of no keys": (lambda: dspattn.attention_weights(Q, K[:, :, :0], scale=-1.0), "scale: expected"),
    "cached query": (lambda: dspattn.attention_with_cache(None, K, K), "query: expected a tensor, got NoneType"),
    "cached array": (lambda: dspattn.attention_with_cache(Q.numpy(), K, K), "query: expected a tensor, got numpy"),
    "cached nested": (
        lambda: dspattn.attention_with_cache(torch.nested.nested_tensor([Q[0]]), K, K),
        "query: expected a strided tensor, got a nested one",
    ),
    "cached sparse": (lambda: dspattn.attention_with_cache(Q.to_sparse(), K, K), "query: expected a strided tensor"),
    "cached sums": (
        lambda: dspattn.attention_with_cache(Q, K, K, rest="mean", sums=[1]),
        "sums: expected a tensor, got list",
    ),
    "cached scale": (
        lambda: dspattn.attention_with_cache(Q, K, K, scale="a"),
        "scale: expected a number or None, got str",
    ),
    "cached kernel": (lambda: dspattn.attention_with_cache(Q, K, K, kernel=3), "kernel: expected a string, got 3"),
    "summed values": (lambda: dspattn.value_sums(None), "value: expected a tensor, got NoneType"),
    "new keys": (
        lambda: dspattn.update_value_sums(SUMS, K, "3"),
        "new_keys: expected a 64-bit integer, got '3'",
    ),
    "table": (
        lambda: dspattn.value_sums(K, block_table=torch.zeros(2, dtype=torch.int32)),
        r"block_table: expected \[batch, blocks\], got \[2\]",
    ),
    "eps": (lambda: dspattn.norm_rope(X, X, eps="1"), "eps: expected a number or None, got str"),
    "no parts": (lambda: dspattn.norm_rope([], X), "query: expected at least one part, got none"),
    "array of parts": (lambda: dspattn.norm_rope(X.numpy(), X), "query: expected a tensor or a list of tensors"),
    "parts of arrays": (lambda: dspattn.norm_rope([X.numpy()], X), "query: expected a tensor, got numpy.ndarray"),
    "block": (lambda: block_masks.sliding_window(64, block="64"), "block: expected a 64-bit integer, got '64'"),
    "length": (lambda: block_masks.sliding_window(True), "n: expected a 64-bit integer, got True"),
    "mapped length": (
        lambda: block_masks.from_block_map(SEEN, 64.0, 64),
        "n_q: expected a 64-bit integer, got 64.0",
    ),
    "number of a layer": (
        lambda: dspattn.apply(torch.nn.Linear(2, 2), example=X, skip=[True]),
        "skip: expected numbers or names, got True",
    ),
    "layers": (lambda: dspattn.apply(torch.nn.Linear(2, 2), example=X, layers=0), "layers: expected a list, got 0"),
    "head": (lambda: dspattn.apply(torch.nn.Linear(2, 2), example=X, heads=["0"]), "heads: expected numbers, got '0'"),
    "applied to": (lambda: dspattn.apply(None, example=X), "model: expected a torch.nn.Module, got NoneType"),
    "restored": (lambda: dspattn.restore(None), "model: expected a torch.nn.Module, got NoneType"),
    "share": (lambda: dspattn.propose(torch.nn.Linear(2, 2), example=X, share="x"), "share: expected a number"),
    "measure": (lambda: dspattn.propose(torch.nn.Linear(2, 2), example=X, measure=3), "measure: expected a function"),
    "lengths": (lambda: parallel.layout_of([1.7, 2], 2), r"lengths: expected integers, got \[1.7, 2\]"),
    "lengths in a word": (lambda: parallel.layout_of("12", 2), "lengths: expected integers, got '12'"),
    "starts": (
        lambda: parallel.shard(torch.arange(5), 0, cu_seqlens=[0, 2.5, 5]),
        "cu_seqlens: expected integers",
    ),
    "piece": (lambda: parallel.attention(None, K, K), "query: expected a tensor, got NoneType"),
    "scale of pieces": (lambda: parallel.attention(Q, Q, Q, scale="x"), "scale: expected a number or None, got str"),
    "mask of pieces": (lambda: parallel.attention(Q, Q, Q, [1]), "attn_mask: expected a tensor, got list"),
    "layout of pieces": (lambda: parallel.attention(Q, Q, Q, layout=3), "layout: expected one of layout_of()"),
    "pieces of a list": (lambda: parallel.shard([1, 2], 0), "x: expected a tensor, got list"),
    "dimension": (lambda: parallel.shard(torch.arange(5), 3), "dim: expected one of x's 1 dimensions, got 3"),
    "labels": (lambda: parallel.shard_labels([1, 2]), "labels: expected a tensor, got list"),
    "mechanism's arrays": (
        lambda: zoo.create("full", heads=4, head_dim=16, n=6)(Q.numpy(), Q, Q),
        "q: expected a tensor, got ndarray",
    ),
    "epsilon": (
        lambda: zoo.create("performer", heads=2, head_dim=8, n=6, epsilon=-1.0),
        "epsilon: expected a finite number >= 0, got -1.0",
    ),
    "columns": (
        lambda: dspattn.block_attention(X128, X128, X128, with_columns(MASK.columns[0]), pattern="1:2"),
        "blocks.columns",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_refused_by_name(name: str) -> None:
    call, words = CASES[name]
    with pytest.raises(dspattn.DspattnError, match=f"^{words}"):
        call()


def test_weights_of_no_keys_with_grouped_heads() -> None:
    assert dspattn.attention_weights(Q, K[:, :2, :0], enable_gqa=True).shape == (2, 4, 6, 0)


def test_gradients_of_merged_rows_without_keys_are_zero() -> None:
    outs = [torch.randn(3, 4, requires_grad=True) for _ in range(2)]
    lses = [torch.tensor([float("-inf"), 0.0, float("-inf")], requires_grad=True) for _ in range(2)]
    out, lse = dspattn.merge(outs, lses)
    assert lse.isneginf().tolist() == [True, False, True]
    out.sum().backward()
    for lse in lses:
        assert lse.grad is not None and lse.grad[[0, 2]].tolist() == [0.0, 0.0] and bool(lse.grad.isfinite().all())
