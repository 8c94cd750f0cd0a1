"""Calls that cannot be served: one DspattnError each, naming the argument, what was expected and what was given."""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Callable

import pytest
import torch

import dspattn
import dspattn.parallel
from dspattn._schema import ProblemArguments

Q, K, V = torch.randn(2, 4, 6, 16), torch.randn(2, 4, 10, 16), torch.randn(2, 4, 10, 16)
KV2 = torch.randn(2, 2, 10, 16)
CU = torch.tensor([0, 3, 6])
PACKED = torch.randn(6, 2, 8)

CASES: dict[str, tuple[Callable[[], object], tuple[str, ...]]] = {
    "dropout": (lambda: dspattn.attention(Q, K, V, dropout_p=1.5), ("dropout_p", "below 1", "1.5")),
    "pattern order": (lambda: dspattn.attention(Q, K, V, pattern="3:2"), ("pattern", "3:2")),
    "pattern words": (lambda: dspattn.attention(Q, K, V, pattern="half"), ("pattern", "half")),
    "pattern list": (lambda: dspattn.attention(Q, K, V, pattern=["2:4"]), ("pattern", "N:M", "['2:4']")),
    "pattern digits": (lambda: dspattn.attention(Q, K, V, pattern="2:" + "9" * 5000), ("pattern", "N:M")),
    "pattern digits of another script": (
        lambda: dspattn.attention(Q, K, V, pattern="\uff12:\uff14"),
        ("pattern: expected", "N:M", "\uff12:\uff14"),
    ),
    "pattern group": (lambda: dspattn.attention(Q, K, V, pattern="2:64"), ("pattern", "32", "2:64")),
    "interleave": (lambda: dspattn.attention(Q, K, V, pattern="2:6"), ("pattern", "divides 128", "2:6")),
    "grouping": (lambda: dspattn.attention(Q, K, V, grouping="random"), ("grouping", "random")),
    "alignment": (lambda: dspattn.attention(Q, K, V, alignment="left"), ("alignment", "left")),
    "window": (lambda: dspattn.attention(Q, K, V, window=(-2, 0)), ("window", ">= 0", "-2")),
    "scale": (lambda: dspattn.attention(Q, K, V, scale=float("nan")), ("scale", "nan")),
    "zero scale": (lambda: dspattn.attention(Q, K, V, scale=0.0), ("scale", "positive", "0")),
    "float64": (
        lambda: dspattn.attention(Q.double(), K.double(), V.double()),
        ("query.dtype: expected float32, float16 or bfloat16, got float64",),
    ),
    "float8": (
        lambda: dspattn.attention(*(t.to(torch.float8_e4m3fn) for t in (Q, K, V))),
        ("query.dtype: expected float32, float16 or bfloat16, got float8_e4m3fn",),
    ),
    "mixed types": (lambda: dspattn.attention(Q, K.half(), V), ("key.dtype", "query's type fp32", "fp16")),
    "head dim": (lambda: dspattn.attention(*[torch.randn(1, 1, 2, 513)] * 3), ("query", "512", "513")),
    "d of key": (lambda: dspattn.attention(Q, K[..., :8], V), ("key", "16", "8")),
    "n of value": (lambda: dspattn.attention(Q, K, V[:, :, :7]), ("value", "10", "7")),
    "heads": (
        lambda: dspattn.attention(Q, KV2, KV2),
        ("broadcast", "[2, 4, 6, 16]", "[2, 2, 10, 16]", "enable_gqa=True"),
    ),
    "gqa heads": (lambda: dspattn.attention(Q[:, :3], KV2, KV2, enable_gqa=True), ("query", "multiple", "3")),
    "one dim": (lambda: dspattn.attention(Q[0, 0, 0], K, V), ("query", "at least 2", "[16]")),
    "mask shape": (lambda: dspattn.attention(Q, K, V, torch.ones(6, 9, dtype=torch.bool)), ("attn_mask", "10", "9")),
    "mask type": (
        lambda: dspattn.attention(Q, K, V, torch.ones(6, 10, dtype=torch.int32)),
        ("attn_mask.dtype: expected bool", "int32"),
    ),
    "sddmm d": (lambda: dspattn.sddmm(Q, K[..., :8]), ("key: expected query's d = 16", "8")),
    "sddmm types": (lambda: dspattn.sddmm(Q, K.half()), ("key.dtype", "float32", "float16")),
    "sddmm heads": (lambda: dspattn.sddmm(Q, K[:, :3]), ("key", "broadcast", "[2, 3, 10, 16]")),
    "sddmm one dim": (lambda: dspattn.sddmm(Q[0, 0, 0], K), ("query", "two dimensions", "[16]")),
    "sddmm mask": (lambda: dspattn.sddmm(Q, K, torch.ones(6, 9)), ("attn_mask", "[2, 4, 6, 10]", "[6, 9]")),
    "sddmm mask type": (lambda: dspattn.sddmm(Q, K, torch.ones(6, 10).long()), ("attn_mask.dtype", "int64")),
    "spmm value": (lambda: dspattn.spmm(*dspattn.sddmm(Q, K), V[:, :3]), ("value", "[2, 4]", "[2, 3, 10, 16]")),
    "spmm keys": (lambda: dspattn.spmm(*dspattn.sddmm(Q, K), V[:, :, :4]), ("nonzeros", "4 columns")),
    "bias type": (lambda: dspattn.attention(Q, K, V, torch.ones(6, 10, dtype=torch.half)), ("attn_mask", "fp16")),
    "boolean bias": (
        lambda: dspattn.attention(Q, K, V, attn_bias=torch.ones(6, 10, dtype=torch.bool)),
        ("attn_bias", "bool"),
    ),
    "bias beside a mask, shape": (
        lambda: dspattn.attention(Q, K, V, torch.ones(6, 10, dtype=torch.bool), attn_bias=torch.zeros(3, 10)),
        ("attn_bias.shape[2]: expected 1 or n_q = 6, got 3",),
    ),
    "bias beside a mask, type": (
        lambda: dspattn.attention(Q, K, V, attn_bias=torch.zeros(6, 10, dtype=torch.half)),
        ("attn_bias.dtype: expected float32 or query's type float32, got float16",),
    ),
    "bias of integers": (
        lambda: dspattn.attention(Q, K, V, attn_bias=torch.zeros(6, 10, dtype=torch.int32)),
        ("attn_bias.dtype: expected float32, float16 or bfloat16, got int32",),
    ),
    "two biases": (
        lambda: dspattn.attention(Q, K, V, torch.zeros(6, 9), attn_bias=torch.zeros(5, 10)),
        ("attn_mask.shape[3]: expected 1 or n_k = 10, got 9", "attn_bias.shape[2]: expected 1 or n_q = 6, got 5"),
    ),
    "bias of more dimensions": (
        lambda: dspattn.attention(Q[None], K[None], V[None], attn_bias=torch.zeros(3, 1, 1, 6, 10)),
        ("attn_bias: expected a shape that broadcasts to [1, 2, 4, 6, 10], got [3, 1, 1, 6, 10]",),
    ),
    "type of results": (
        lambda: dspattn.attention(Q, K, V, out_dtype="float32"),
        ("out_dtype: expected a torch.dtype or None, got 'float32'",),
    ),
    "key lengths": (
        lambda: dspattn.attention(Q, K, V, key_lengths=torch.tensor([3, 11])),
        ("key_lengths[1]", "10", "11"),
    ),
    "kernel": (lambda: dspattn.attention(Q, K, V, kernel="fastest"), ("kernel", "cpu_reference", "fastest")),
    "key lengths beyond 32 bits": (
        lambda: dspattn.attention(Q, K, V, key_lengths=torch.tensor([3, 2**32 + 3])),
        ("key_lengths[1]", "2147483647", "4294967299"),
    ),
    "key lengths with fractions": (
        lambda: dspattn.attention(Q, K, V, key_lengths=torch.tensor([3.9, 1.0])),
        ("key_lengths.dtype", "int32", "float32"),
    ),
    "key lengths in a list": (
        lambda: dspattn.attention(Q, K, V, key_lengths=[1, 2]),
        ("key_lengths", "tensor", "list"),
    ),
    "packed beyond 32 bits": (
        lambda: dspattn.varlen_attention(PACKED, PACKED, PACKED, torch.tensor([0, 3, 2**32 + 6]), CU),
        ("cu_seqlens_q[2]", "2147483647", "4294967302"),
    ),
    "packed with fractions": (
        lambda: dspattn.varlen_attention(PACKED, PACKED, PACKED, CU, CU.float()),
        ("cu_seqlens_k.dtype", "int32", "float32"),
    ),
    "packed list": (lambda: dspattn.varlen_attention(PACKED, PACKED, PACKED, [0, 6], CU), ("cu_seqlens_q", "list")),
    "packed longest word": (
        lambda: dspattn.varlen_attention(PACKED, PACKED, PACKED, CU, CU, "3", 3),
        ("max_seqlen_q", "integer", "str"),
    ),
    "packed longest huge": (
        lambda: dspattn.varlen_attention(PACKED, PACKED, PACKED, CU, CU, 3, 2**64),
        ("max_seqlen_k", "integer", "18446744073709551616"),
    ),
    "window of fractions": (lambda: dspattn.attention(Q, K, V, window=[1, 2.5]), ("window[1]", "integer", "2.5")),
    "window of three": (lambda: dspattn.attention(Q, K, V, window=[1, 2, 3]), ("window", "(left, right)", "[1, 2, 3]")),
    "window too wide": (
        lambda: dspattn.attention(Q, K, V, window=2**64),
        ("window[0]", "64-bit", "18446744073709551616"),
    ),
    "key on meta": (lambda: dspattn.attention(Q, K.to("meta"), V), ("key", "on cpu as query is", "meta")),
    "value on meta": (lambda: dspattn.attention(Q, K, V.to("meta")), ("value", "on cpu as query is", "meta")),
    "query on meta": (lambda: dspattn.attention(Q.to("meta"), K, V), ("key", "on meta as query is", "cpu")),
    "mask on meta": (
        lambda: dspattn.attention(Q, K, V, torch.ones(6, 10, device="meta")),
        ("attn_mask", "cpu", "meta"),
    ),
    "array": (lambda: dspattn.attention(Q.numpy(), K, V), ("query: expected a tensor", "numpy.ndarray")),
    "mask in a list": (lambda: dspattn.attention(Q, K, V, [[True]]), ("attn_mask: expected a tensor", "list")),
    "scale word": (lambda: dspattn.attention(Q, K, V, scale="a"), ("scale: expected a number", "str")),
    "no kernel": (lambda: dspattn.attention(Q, K, V, kernel=None), ("kernel: expected a string", "None")),
    "nested": (
        lambda: dspattn.attention(*[torch.nested.nested_tensor([Q[0], Q[0, :, :3]])] * 3),
        ("query: expected a strided tensor, got a nested one", "varlen_attention"),
    ),
    "nested, jagged": (
        lambda: dspattn.attention(*[torch.nested.nested_tensor([PACKED, PACKED[:3]], layout=torch.jagged)] * 3),
        ("query: expected a strided tensor, got a nested one", "varlen_attention"),
    ),
    "sparse": (lambda: dspattn.attention(Q.to_sparse(), K, V), ("query: expected a strided tensor", "sparse_coo")),
    "quantized": (
        lambda: dspattn.attention(Q, K, torch.quantize_per_tensor(V, 1.0, 0, torch.qint8)),
        ("value: expected a plain tensor, got a quantized one",),
    ),
    "packed lengths on meta": (
        lambda: dspattn.varlen_attention(PACKED, PACKED, PACKED, CU.to("meta"), CU.to("meta")),
        ("cu_seqlens_q: expected a tensor on cpu as query is, got one on meta",),
    ),
    "packed lengths on meta, in parallel": (
        lambda: dspattn.parallel.varlen_attention(PACKED, PACKED, PACKED, CU.to("meta")),
        ("cu_seqlens: expected lengths that can be read, got a tensor on meta",),
    ),
    "block map on meta": (
        lambda: dspattn.block_masks.from_block_map(torch.ones(1, 1, dtype=torch.bool, device="meta"), 6, 6),
        ("seen: expected a tensor that can be read, got one on meta",),
    ),
    "decreasing": (
        lambda: dspattn.varlen_attention(PACKED, PACKED, PACKED, torch.tensor([0, 5, 3]), CU),
        ("cu_seqlens_q[2]", "5", "3"),
    ),
    "packed dims": (lambda: dspattn.varlen_attention(Q, K, V, CU, CU), ("query", "3 dimensions")),
    "packed extents": (
        lambda: dspattn.varlen_attention(PACKED, PACKED, PACKED, CU, CU[:2]),
        ("cu_seqlens_k", "cu_seqlens_q's extent 3", "2"),
    ),
    "packed longest": (
        lambda: dspattn.varlen_attention(PACKED, PACKED, PACKED, CU, CU, 2, 3),
        ("max_seqlen_q", "3", "2"),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_wrong_call_names_argument_expectation_and_value(name: str) -> None:
    call, parts = CASES[name]
    with pytest.raises(dspattn.DspattnError) as caught:
        call()
    for part in parts:
        assert part in str(caught.value)
    # The names of the C++ library's arguments do not show.
    assert not re.search(r"\b(q|k|v|cu_q|cu_k)('s |[.:\[])|\b(mask|packed)\.", str(caught.value))
    assert isinstance(caught.value, ValueError) and isinstance(caught.value, RuntimeError)


def test_all_reasons_at_once() -> None:
    with pytest.raises(dspattn.DspattnError) as caught:
        dspattn.attention(Q, K[..., :8], V[:, :, :7], scale=-1.0, window=(-1, -1))
    assert len(caught.value.reasons) >= 5


@pytest.mark.parametrize("again", [lambda e: pickle.loads(pickle.dumps(e)), copy.copy, copy.deepcopy])
def test_survives_pickle_and_copy(again: Callable[[Exception], Exception]) -> None:
    error = dspattn.DspattnError(["a: expected 1, got 2", "b: expected 3, got 4"])
    error.add_note("note") if hasattr(error, "add_note") else None
    other = again(error)
    assert type(other) is dspattn.DspattnError and other.reasons == error.reasons and str(other) == str(error)
    assert getattr(other, "__notes__", None) == getattr(error, "__notes__", None)


class Broken(torch.utils.data.Dataset[int]):
    def __len__(self) -> int:
        return 1

    def __getitem__(self, i: int) -> int:
        raise dspattn.DspattnError(["scale: expected 1, got 2", "window: expected 3, got 4"])


def test_survives_a_dataloader_worker() -> None:
    with pytest.raises(dspattn.DspattnError, match=r"scale: expected 1, got 2\nwindow: expected 3, got 4"):
        next(iter(torch.utils.data.DataLoader(Broken(), num_workers=1)))


@pytest.mark.parametrize("keep,group", [(2**32 + 2, 4), (2, 2**32 + 4), (1, 0), (0, 4), (1, -2)])
def test_operators_check_patterns_before_they_narrow_or_divide(keep: int, group: int) -> None:
    ops, problem = torch.ops.dspattn, ProblemArguments(Q, K, V, keep=keep, group=group)
    metadata, nonzeros = torch.zeros(1, 32, 2, dtype=torch.int16), torch.zeros(1, 1, 32, 16)
    calls = {
        "attention": lambda: ops.attention(*problem),
        "nm_prune": lambda: ops.nm_prune(Q[0], keep, group, False),
        "nm_encode": lambda: ops.nm_encode(torch.zeros(1, 4, 4, dtype=torch.uint8), 8, keep, group, False, True),
        "nm_decode": lambda: ops.nm_decode(metadata, 4, 8, keep, group, False, True),
        "sparse_scores": lambda: ops.sparse_scores(Q, K, None, None, keep, group, False, False, True, None),
        "sparse_product": lambda: ops.sparse_product(nonzeros, metadata[None], V[:1, :1], 4, keep, group, False),
        "nm_prune on meta": lambda: ops.nm_prune(Q[0].to("meta"), keep, group, False),
    }
    for call in calls.values():
        with pytest.raises(RuntimeError, match=f"pattern: expected N:M .*got {keep}:{group}$"):
            call()


def test_operators_check_extents() -> None:
    metadata = torch.zeros(1, 32, 2, dtype=torch.int16)
    for rows, columns in ((-4, 8), (4, -8), (4, 2**62)):
        with pytest.raises(RuntimeError, match=r"(rows|columns): expected a count from 0"):
            torch.ops.dspattn.nm_decode(metadata, rows, columns, 1, 2, False, True)


def test_packed_batches_without_memory_have_the_shapes_of_results() -> None:
    packed, cumulative = PACKED.to("meta"), CU.to("meta")
    for longest in ((), (4, 4)):
        out, lse = dspattn.varlen_attention(packed, packed, packed, cumulative, cumulative, *longest, return_lse=True)
        assert out.shape == packed.shape and lse.shape == (2, 6) and out.is_meta
