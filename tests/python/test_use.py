"""dspattn.use: which calls it redirects, what it does with those it cannot serve, and what it reports."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention as imported_by_name

import dspattn

Q, K, V = (torch.randn(2, 4, 150, 16) for _ in range(3))


def test_every_way_to_name_the_function() -> None:
    pruned = dspattn.attention(Q, K, V, pattern="1:2")
    plain = imported_by_name(Q, K, V)
    with dspattn.use("1:2") as switched:
        for call in (
            imported_by_name,
            torch.nn.functional.scaled_dot_product_attention,
            torch._C._nn.scaled_dot_product_attention,
        ):
            assert torch.equal(call(Q, K, V), pruned)
        assert torch.equal(imported_by_name(query=Q, key=K, value=V, attn_mask=None, is_causal=False), pruned)
    assert switched.served == 4 and not switched.left
    assert torch.equal(imported_by_name(Q, K, V), plain), "nothing is redirected after the block"


def test_arguments_are_passed_on() -> None:
    mask = torch.rand(150, 150) > 0.4
    with dspattn.use("2:4", "consecutive"):
        out = imported_by_name(Q, K[:, :2], V[:, :2], mask, scale=0.5, enable_gqa=True)
    wanted = dspattn.attention(
        Q, K[:, :2], V[:, :2], mask, scale=0.5, enable_gqa=True, pattern="2:4", grouping="consecutive"
    )
    assert torch.equal(out, wanted)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_a_module_that_has_a_block_can_be_copied(copied: Callable[[Any], Any]) -> None:
    module = torch.nn.Linear(1, 1)
    module.block = dspattn.use("1:2", "consecutive", strict=False)  # type: ignore[assignment]
    with module.block:
        imported_by_name(Q, K, V)
        block = copied(module).block if copied is not copy.copy else copied(module.block)
    assert module.block.served == 1 and block.served == 0
    with block:
        out = imported_by_name(Q, K, V)
    assert block.served == 1 and block.strict is False
    assert torch.equal(out, dspattn.attention(Q, K, V, pattern="1:2", grouping="consecutive"))


def test_nested_blocks_and_decorator() -> None:
    @dspattn.use("1:4")
    def inner() -> torch.Tensor:
        return imported_by_name(Q, K, V)

    with dspattn.use("2:4"):
        first = inner()
        second = imported_by_name(Q, K, V)
        with dspattn.use("dense"):
            third = imported_by_name(Q, K, V)
    for out, pattern in ((first, "1:4"), (second, "2:4"), (third, "dense"), (inner(), "1:4")):
        assert torch.equal(out, dspattn.attention(Q, K, V, pattern=pattern))
    assert inner.__name__ == "inner"


def test_strict_raises_with_the_reason() -> None:
    with (
        pytest.raises(dspattn.DspattnError, match=r"dropout_p: expected .*below 1, got 1[\s\S]*strict=False"),
        dspattn.use(),
    ):
        imported_by_name(Q, K, V, dropout_p=1.0)
    with pytest.raises(dspattn.DspattnError, match="float64"), dspattn.use():
        imported_by_name(Q.double(), K.double(), V.double())
    assert torch.backends.mha.get_fastpath_enabled(), "an exception leaves nothing switched"


def test_not_strict_leaves_and_counts() -> None:
    with pytest.warns(UserWarning, match="2 attention calls ran with 2:4 interleaved; 3 attention calls left"):  # noqa: SIM117
        with dspattn.use("2:4", strict=False) as switched:
            for _ in range(2):
                imported_by_name(Q, K, V)
                double = imported_by_name(Q.double(), K.double(), V.double())
            imported_by_name(Q, K, V, dropout_p=1.0)
    torch.testing.assert_close(double, imported_by_name(Q.double(), K.double(), V.double()))
    assert switched.served == 2 and sorted(switched.left.values()) == [1, 2]
    assert (
        "2 x query.dtype: expected float32, float16 or bfloat16" in switched.report()
        and "1 x dropout_p" in switched.report()
    )


def test_no_warning_when_all_is_served() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with dspattn.use("2:4", strict=False):
            imported_by_name(Q, K, V)


def test_pytorch_encoder_layer_with_its_fast_path() -> None:
    torch.manual_seed(0)
    encoder = torch.nn.TransformerEncoder(
        torch.nn.TransformerEncoderLayer(64, 4, 96, batch_first=True, dropout=0.0), 2, enable_nested_tensor=False
    ).eval()
    x = torch.randn(2, 150, 64)
    with torch.no_grad():
        plain = encoder(x)
        with dspattn.use("dense") as switched:
            torch.testing.assert_close(encoder(x), plain, atol=1e-5, rtol=1e-4)
        assert switched.served == 2
        with dspattn.use("1:2"):
            assert (encoder(x) - plain).abs().max() > 1e-3


def test_gradients_flow() -> None:
    leaves = [t.clone().requires_grad_() for t in (Q, K, V)]
    with dspattn.use("dense"):
        ours = torch.autograd.grad(imported_by_name(*leaves).sin().sum(), leaves)
    theirs = torch.autograd.grad(imported_by_name(*leaves).sin().sum(), leaves)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


def test_compiled_model_inside_the_block() -> None:
    compiled = torch.compile(lambda q, k, v: imported_by_name(q, k, v) * 2, backend="aot_eager", fullgraph=True)
    with torch.no_grad(), dspattn.use("1:2"):
        out = compiled(Q, K, V)
    torch.testing.assert_close(out, dspattn.attention(Q, K, V, pattern="1:2") * 2)


@pytest.mark.parametrize("wrong", [{"pattern": "5:4"}, {"grouping": "odd"}])
def test_wrong_names_raise_at_once(wrong: dict[str, str]) -> None:
    with pytest.raises(dspattn.DspattnError):
        dspattn.use(**wrong)


def test_silence_is_not_success() -> None:
    module = torch.nn.MultiheadAttention(16, 2, batch_first=True).eval()
    x = torch.randn(1, 100, 16)
    with pytest.warns(UserWarning, match="no attention call arrived: .*need_weights=True"), dspattn.use("2:4"):
        module(x, x, x)
    with pytest.raises(ZeroDivisionError), warnings.catch_warnings():
        warnings.simplefilter("error")
        with dspattn.use("2:4"):
            raise ZeroDivisionError


def test_calls_too_short_to_prune_are_counted_apart() -> None:
    with dspattn.use("2:4") as switched:
        for n_k in (20, 64, 65, 150):
            imported_by_name(Q, K[:, :, :n_k], value=V[:, :, :n_k])
    assert (switched.served, switched.short) == (4, 2)
    assert "4 attention calls ran with 2:4 interleaved, 2 of them with too few keys to prune any" in switched.report()
    with dspattn.use("dense") as switched:
        imported_by_name(Q, K, V)
    assert switched.short == 0
