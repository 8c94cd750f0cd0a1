"""Errors and fallbacks in code that torch.compile traces: the same as without it."""

from __future__ import annotations

import gc
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch.nn.functional import scaled_dot_product_attention as sdpa

import dspattn
from dspattn._probe import MAX_HEAD_DIM
from test_errors import CASES, KV2, K, Q, V

# Whatever can be known from sizes, types and options; what only elements tell is found when the code runs.
TRACED = (
    "dropout", "pattern words", "interleave", "grouping", "window", "zero scale", "float64", "mixed types", "head dim",
    "d of key", "n of value", "heads", "gqa heads", "one dim", "mask shape", "mask type", "bias type",
    "kernel",
)  # fmt: skip


def compiled(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    torch._dynamo.reset()
    return torch.compile(function, backend="eager", **{"fullgraph": True, **options})


@pytest.mark.parametrize("name", TRACED)
def test_errors_keep_type_and_names(name: str) -> None:
    call, words = CASES[name]
    with pytest.raises(dspattn.DspattnError) as plain:
        call()
    with pytest.raises(dspattn.DspattnError) as traced:
        compiled(call)()
    assert traced.value.reasons == plain.value.reasons and str(traced.value) == str(plain.value)
    assert all(word in str(traced.value) for word in words)


def test_error_outside_of_a_full_graph() -> None:
    def guarded(q: torch.Tensor) -> torch.Tensor:
        try:
            return dspattn.attention(q, K, V, pattern="5:4")
        except dspattn.DspattnError as error:
            return q + len(error.reasons)

    assert torch.equal(compiled(guarded, fullgraph=False)(Q), Q + 1)
    with pytest.raises(dspattn.DspattnError, match="5:4") as caught:
        compiled(lambda q: dspattn.attention(q.sin(), K, V, pattern="5:4").cos(), fullgraph=False)(Q)
    again = pickle.loads(pickle.dumps(caught.value))
    assert type(again) is dspattn.DspattnError and again.reasons == caught.value.reasons
    with pytest.raises(dspattn.DspattnError, match="5:4") as caught:
        compiled(guarded)(Q)
    again = pickle.loads(pickle.dumps(caught.value))
    assert type(again) is dspattn.DspattnError and again.reasons == caught.value.reasons


def test_error_while_exporting() -> None:
    class Model(torch.nn.Module):
        def forward(self, q: torch.Tensor) -> torch.Tensor:
            return dspattn.attention(q, K, V, pattern="5:4")

    for strict in (False, True):
        with pytest.raises(dspattn.DspattnError, match="5:4"):
            torch.export.export(Model(), (Q,), strict=strict)


LEFT: dict[str, tuple[Callable[[], torch.Tensor], str]] = {
    "type": (lambda: sdpa(Q.double(), K.double(), V.double()), "query.dtype: expected float32"),
    "size": (lambda: sdpa(*[torch.ones(1, 1, 2, 513)] * 3), r"query.shape\[3\]: expected a head dimension"),
}


@pytest.mark.parametrize("fullgraph", [True, False])
@pytest.mark.parametrize("name", LEFT)
def test_use_without_strict_falls_back(name: str, fullgraph: bool) -> None:
    call, reason = LEFT[name]
    function = compiled(lambda: (call() * 2, sdpa(Q, K, V)), fullgraph=fullgraph)
    with pytest.warns(UserWarning, match=f"1 x {reason}"), dspattn.use("1:2", strict=False) as switched:
        left, served = function()
    assert torch.equal(left, call() * 2)
    assert torch.equal(served, dspattn.attention(Q, K, V, pattern="1:2"))
    assert switched.served == 1 and sum(switched.left.values()) == 1


@pytest.mark.parametrize("fullgraph", [True, False])
@pytest.mark.parametrize("name", LEFT)
def test_use_with_strict_raises(name: str, fullgraph: bool) -> None:
    """Without a full graph the refusal breaks it, and the code behind takes sizes as they come."""
    call, reason = LEFT[name]
    with pytest.raises(dspattn.DspattnError, match=rf"{reason}[\s\S]*strict=False"), dspattn.use("1:2"):
        compiled(call, fullgraph=fullgraph)()


def recomputing(q: torch.Tensor) -> torch.Tensor:
    def attend(q: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(q, q, q).sin()

    out: torch.Tensor = torch.utils.checkpoint.checkpoint(attend, q, use_reentrant=False)
    return out


@pytest.mark.parametrize("fullgraph", [True, False])
def test_attention_under_checkpointing_in_compiled_code_is_not_passed_over(fullgraph: bool) -> None:
    """PyTorch traces what is checkpointed while no mode is on: outside of a full graph it runs as plain Python."""
    q = torch.randn(1, 2, 150, 16, requires_grad=True)
    with dspattn.use("1:2"):
        wanted = recomputing(q)
    torch._dynamo.reset()
    compiled_one = torch.compile(recomputing, backend="aot_eager", fullgraph=fullgraph)
    if fullgraph:
        reason = "tag_activation_checkpoint: expected attention outside"
        with pytest.raises(dspattn.DspattnError, match=reason), dspattn.use("1:2"):
            compiled_one(q)
        return
    with dspattn.use("1:2") as switched:
        torch.testing.assert_close(compiled_one(q), wanted)
    assert switched.served == 1
    compiled_one(q).sum().backward()


def test_checkpointing_without_attention_compiles_in_a_block() -> None:
    def call(q: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = torch.utils.checkpoint.checkpoint(torch.sin, q, use_reentrant=False)
        return dspattn.attention(out, out, out, pattern="1:2")

    q = torch.randn(1, 2, 150, 16, requires_grad=True)
    torch._dynamo.reset()
    with pytest.warns(UserWarning, match="no attention call arrived"), dspattn.use("2:4"):
        out = torch.compile(call, backend="aot_eager", fullgraph=True)(q)
    torch.testing.assert_close(out, call(q))


def test_sizes_that_are_not_fixed_are_refused() -> None:
    """Heads and d are as they come, too: code that serves some is not run on those that the library refuses."""
    count = CompileCounter()
    torch._dynamo.reset()

    def call(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return dspattn.attention(q, k, k, pattern="1:2", enable_gqa=True)

    function = torch.compile(call, backend=count, fullgraph=True, dynamic=True)
    for heads, kv_heads, d in ((4, 2, MAX_HEAD_DIM), (6, 3, 24), (9, 3, 8)):
        q, k = torch.randn(11, heads, 5, d), torch.randn(11, kv_heads, 7, d)
        assert torch.equal(function(q, k), call(q, k))
    assert count.frame_count == 1  # sizes that are equal in the first call would be taken for one
    for heads, kv_heads, d, reason in (
        (4, 2, MAX_HEAD_DIM + 1, r"query\.shape\[3\]: expected a head dimension"),
        (5, 3, 8, r"query\.shape\[1\]: expected"),
    ):
        with pytest.raises(dspattn.DspattnError, match=reason):
            function(torch.randn(11, heads, 5, d), torch.randn(11, kv_heads, 7, d))


def test_modules_in_a_full_graph() -> None:
    """PyTorch's own module is pruned, and code compiled in one block serves the next."""
    module = torch.nn.MultiheadAttention(32, 2, batch_first=True)
    x = torch.randn(2, 100, 32)

    def call(x: torch.Tensor) -> torch.Tensor:
        heads = x.unflatten(-1, (2, 16)).flatten(2)  # a method that a mode must not hand over by name
        return module(heads, heads, heads, need_weights=False)[0]

    count = CompileCounter()
    torch._dynamo.reset()
    function = torch.compile(call, backend=count, fullgraph=True)
    for pattern in ("1:2", "1:4", "1:2"):
        with dspattn.use(pattern) as plain:
            wanted = call(x)
        with dspattn.use(pattern) as switched:
            assert torch.equal(function(x), wanted)
        assert plain.served == switched.served == 1
    assert torch.equal(function(x), call(x)) and count.frame_count == 3
    with pytest.raises(dspattn.DspattnError, match=r"query\.dtype"), dspattn.use("1:2"):
        module.double()
        torch.compile(call, backend="eager", fullgraph=True)(x.double())


def test_counting_compiles_nothing_anew() -> None:
    """One piece of code for all blocks of a model, however many calls there were before."""
    count = CompileCounter()
    torch._dynamo.reset()
    function = torch.compile(lambda x: x + sdpa(x, x, x) + sdpa(x, x, x.sin()), backend=count, fullgraph=True)
    for frames, n in enumerate((60, 70)):
        x = torch.randn(1, 2, n, 8)
        with dspattn.use("1:2") as switched:
            for calls in range(1, 6):
                x = function(x)
                gc.collect()  # which counts them, and must not count them twice
                assert switched.served == 2 * calls
            for _ in range(5):
                x = function(x)
        assert count.frame_count == frames + 1
        assert (switched.served, switched.short) == (20, 20 if n == 60 else 0)
    assert not gc.callbacks


def test_fallback_has_gradients() -> None:
    leaf = Q.double().requires_grad_()
    function = torch.compile(lambda q: sdpa(q, K.double(), V.double()).sin(), backend="aot_eager", fullgraph=True)
    with pytest.warns(UserWarning, match="float64"), dspattn.use("1:2", strict=False):
        (got,) = torch.autograd.grad(function(leaf).sum(), leaf)
    (wanted,) = torch.autograd.grad(sdpa(leaf, K.double(), V.double()).sin().sum(), leaf)
    torch.testing.assert_close(got, wanted)


def test_sizes_that_are_not_fixed() -> None:
    """Asking the library while tracing neither fixes them nor refuses what it serves."""

    def call(q: torch.Tensor, k: torch.Tensor, mask: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        return dspattn.attention(q, k, k, mask, key_lengths=lengths, pattern="1:2", enable_gqa=True)

    count = CompileCounter()
    torch._dynamo.reset()
    function = torch.compile(call, backend=count, fullgraph=True)
    for batch, n_q, n_k in ((2, 6, 10), (3, 7, 12), (5, 8, 9)):
        q, k = torch.randn(batch, 4, n_q, 16), torch.randn(batch, 2, n_k, 16)
        given = (q, k, torch.rand(batch, 1, n_q, n_k) > 0.3, torch.full((batch,), n_k - 1, dtype=torch.int32))
        assert torch.equal(function(*given), call(*given))
    assert count.frame_count == 2, "the sizes that changed are not fixed any more"
    for dynamic in (None, True):  # True: heads and d are not fixed either
        with pytest.raises(dspattn.DspattnError, match=r"query\.dtype"):
            torch.compile(call, backend="eager", fullgraph=True, dynamic=dynamic)(q.double(), k.double(), *given[2:])


def test_packed_batches() -> None:
    cu = torch.tensor([0, 3, 6], dtype=torch.int32)

    def call(x: torch.Tensor) -> torch.Tensor:
        return dspattn.varlen_attention(x, x, x, cu, cu, 3, 3, pattern="1:2")

    packed = torch.randn(6, 2, 8)
    assert torch.equal(compiled(call)(packed), call(packed))
    with pytest.raises(dspattn.DspattnError, match=r"query\.dtype: expected float32"):
        compiled(call)(packed.double())


def test_grouped_heads_are_served() -> None:
    given = (Q, KV2, KV2)
    function = compiled(lambda *x: dspattn.attention(*x, enable_gqa=True, is_causal=True))
    assert torch.equal(function(*given), dspattn.attention(*given, enable_gqa=True, is_causal=True))
