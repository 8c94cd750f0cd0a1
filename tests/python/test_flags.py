"""Arguments that are true or false take a bool and nothing else that Python would take for one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import dspattn
from dspattn import block_masks, caching, parallel, pretrained, sparse, zoo
from dspattn.integrations import huggingface

Q = torch.randn(1, 2, 6, 8)
PACKED = torch.randn(6, 2, 8)
CU = torch.tensor([0, 2, 6])
X = torch.randn(5, 2, 16)
BLOCKS = block_masks.sliding_window(6)


class Model(torch.nn.Module):
    config = main_input_name = None

    def set_attn_implementation(self, name: str) -> None:
        raise AssertionError("the flag comes first")


def module(**flags: Any) -> Any:
    return dspattn.nn.MultiheadAttention(16, 2)(X, X, X, **flags)


def report(**flags: Any) -> Any:
    model = Model()
    model.config, model.main_input_name = object(), "input_ids"
    return dspattn.report(model, str.split, "text", **flags)


WRONG = [("x", "str"), (2, "2"), (0, "0"), (1.0, "float"), ([], "list"), (torch.tensor(True), "torch.Tensor")]

# Every function with flags, and their names.
CALLS: dict[str, tuple[Callable[..., Any], tuple[str, ...]]] = {
    "attention": (
        lambda **flags: dspattn.attention(Q, Q, Q, **flags),
        ("is_causal", "enable_gqa", "return_lse", "allow_tf32"),
    ),
    "varlen_attention": (
        lambda **flags: dspattn.varlen_attention(PACKED, PACKED, PACKED, CU, CU, **flags),
        ("is_causal", "return_lse", "allow_tf32"),
    ),
    "attention_with_cache": (
        lambda **flags: caching.attention_with_cache(Q, Q, Q, **flags),
        ("is_causal", "return_lse"),
    ),
    "attention_weights": (
        lambda **flags: dspattn.attention_weights(Q, Q, **flags),
        ("is_causal", "enable_gqa", "return_lse", "allow_tf32"),
    ),
    "block_attention": (
        lambda **flags: dspattn.block_attention(Q, Q, Q, BLOCKS, pattern="1:2", **flags),
        ("is_causal", "allow_tf32"),
    ),
    "sliding_window": (lambda **flags: block_masks.sliding_window(64, **flags), ("causal",)),
    "longformer": (lambda **flags: block_masks.longformer(64, **flags), ("causal",)),
    "bigbird": (lambda **flags: block_masks.bigbird(64, **flags), ("causal",)),
    "sddmm": (lambda **flags: sparse.sddmm(Q, Q, **flags), ("is_causal",)),
    "use": (lambda **flags: dspattn.use("2:4", **flags), ("strict",)),
    "MultiheadAttention": (module, ("need_weights", "average_attn_weights", "is_causal")),
    "register_pattern": (lambda **flags: huggingface.register_pattern("3:8", **flags), ("left_padding",)),
    "report": (report, ("progress",)),
    "load_minilm": (lambda **flags: pretrained.load_minilm(**flags), ("progress",)),
    "load_smollm2": (lambda **flags: pretrained.load_smollm2(**flags), ("progress",)),
    "parallel.attention": (
        lambda **flags: parallel.attention(Q, Q, Q, **flags),
        ("is_causal", "enable_gqa", "return_lse", "allow_tf32"),
    ),
    "parallel.varlen_attention": (
        lambda **flags: parallel.varlen_attention(PACKED, PACKED, PACKED, CU, **flags),
        ("is_causal", "return_lse", "allow_tf32"),
    ),
    "layout_of": (lambda **flags: parallel.layout_of(300, 2, **flags), ("balanced",)),
    "linformer": (lambda **flags: zoo.create("linformer", heads=2, head_dim=8, n=6, **flags), ("shared",)),
    "sparse_transformer": (
        lambda **flags: zoo.create("sparse_transformer", heads=2, head_dim=8, n=6, **flags),
        ("merged",),
    ),
    "performer": (lambda **flags: zoo.create("performer", heads=2, head_dim=8, n=6, **flags), ("orthogonal",)),
    "mechanism": (lambda **flags: zoo.create("full", heads=2, head_dim=8, n=6)(Q, Q, Q, **flags), ("is_causal",)),
}
FLAGS = [(name, flag) for name, (_, flags) in CALLS.items() for flag in flags]


@pytest.mark.parametrize(("name", "flag"), FLAGS)
def test_a_flag_is_a_bool(name: str, flag: str) -> None:
    if name == "register_pattern":
        pytest.importorskip("transformers")
    for given, words in WRONG:
        with pytest.raises(dspattn.DspattnError, match=f"^{flag}: expected a bool, got {words}$"):
            CALLS[name][0](**{flag: given})


def test_all_wrong_flags_at_once() -> None:
    with pytest.raises(dspattn.DspattnError) as caught:
        dspattn.attention(Q, Q, Q, is_causal="yes", enable_gqa=None, allow_tf32=0)
    assert caught.value.reasons == (
        "is_causal: expected a bool, got str",
        "enable_gqa: expected a bool, got NoneType",
        "allow_tf32: expected a bool, got 0",
    )


def test_flags_of_numpy_are_bools() -> None:
    yes, no = np.bool_(True), np.bool_(False)
    out, lse = dspattn.attention(Q, Q[:, :1], Q[:, :1], is_causal=yes, enable_gqa=yes, return_lse=yes, allow_tf32=no)
    expected = dspattn.attention(Q, Q[:, :1], Q[:, :1], is_causal=True, enable_gqa=True, return_lse=True)
    assert torch.equal(out, expected[0]) and torch.equal(lse, expected[1])
    assert block_masks.bigbird(256, causal=yes) == block_masks.bigbird(256, causal=True)


def test_flags_in_compiled_code() -> None:
    """Also one that a compiler works out from a shape; and no graph breaks."""

    def call(q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return dspattn.attention(q, q, q, is_causal=q.shape[2] > 1, enable_gqa=True, return_lse=True)

    compiled = torch.compile(call, fullgraph=True, backend="eager", dynamic=True)
    for n in (1, 6, 9):
        q = torch.randn(1, 2, n, 8)
        for ours, expected in zip(compiled(q), call(q), strict=True):
            assert torch.equal(ours, expected)


def test_flags_in_exported_code() -> None:
    class Exported(torch.nn.Module):
        def forward(self, q: torch.Tensor) -> torch.Tensor:
            return dspattn.attention(q, q, q, is_causal=q.shape[2] > 1)

    for strict in (False, True):
        program = torch.export.export(
            Exported(), (Q,), dynamic_shapes=({2: torch.export.Dim("n", min=2, max=64)},), strict=strict
        )
        q = torch.randn(1, 2, 9, 8)
        assert torch.equal(program.module()(q), dspattn.attention(q, q, q, is_causal=True))


def test_a_packed_context_asks_for_the_flag_of_grouped_heads() -> None:
    q, kv = torch.randn(1, 4, 6, 8), torch.randn(1, 2, 6, 8)
    with parallel.context(cu_seqlens=CU):
        out = dspattn.attention(q, kv, kv, enable_gqa=True)
        with pytest.raises(dspattn.DspattnError, match="enable_gqa: expected True for 4 heads"):
            dspattn.attention(q, kv, kv)
    assert out.shape == q.shape
