"""Calls of q, k and v alone: which take the short way, and that they give what the general way does, bit for bit."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import dspattn
from dspattn import _ops, _qkv
from dspattn._schema import ProblemArguments

CASES: dict[str, dict[str, Any]] = {
    "defaults": {},
    "causal": {"is_causal": True, "scale": 0.3},
    "consecutive": {"pattern": "1:2", "grouping": "consecutive", "is_causal": True, "alignment": "bottom_right"},
    "window": {"pattern": "3:8", "window": (40, 3)},
    "half a window": {"window": (40, None), "is_causal": True, "allow_tf32": False},
    "dense": {"pattern": "dense"},
}
WITHOUT_GRADIENTS: dict[str, dict[str, Any]] = {"mean": {"rest": "mean"}, "shared": {"selection": "shared"}}


def tensors(requires_grad: bool = True) -> list[torch.Tensor]:
    torch.manual_seed(0)
    shapes = (2, 4, 9, 16), (2, 2, 300, 16), (2, 2, 300, 8)
    return [torch.randn(shape).requires_grad_(requires_grad) for shape in shapes]


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The short operators that were called."""
    seen: list[str] = []
    for name in ("attention_qkv", "attention_qkv_backward"):
        monkeypatch.setattr(_ops, name, _noted(name, getattr(_ops, name), seen))
    yield seen


def _noted(name: str, operator: Any, seen: list[str]) -> Any:
    def called(*arguments: Any) -> Any:
        seen.append(name)
        return operator(*arguments)

    return called


def both_ways(monkeypatch: pytest.MonkeyPatch, call: Any) -> tuple[Any, Any]:
    """What a call gives as it is, and without the short way."""
    first = call()
    with monkeypatch.context() as patch:
        patch.setattr(_qkv, "attention", lambda *_: None)
        return first, call()


@pytest.mark.parametrize("name", CASES)
def test_the_same_bits_forward_and_backward(name: str, short: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = tensors()
    gradient = torch.randn(2, 4, 9, 8)

    def call() -> list[torch.Tensor]:
        out = dspattn.attention(q, k, v, enable_gqa=True, **CASES[name])
        return [out, *torch.autograd.grad(out, (q, k, v), gradient)]

    ours, general = both_ways(monkeypatch, call)
    assert all(torch.equal(a, b) for a, b in zip(ours, general, strict=True))
    assert short == ["attention_qkv", "attention_qkv_backward"]  # the second call used none


@pytest.mark.parametrize("name", ["causal", *WITHOUT_GRADIENTS])
def test_without_gradients(name: str, short: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = tensors(requires_grad=False)
    options = (CASES | WITHOUT_GRADIENTS)[name]
    ours, general = both_ways(monkeypatch, lambda: dspattn.attention(q, k, v, enable_gqa=True, **options))
    assert torch.equal(ours, general) and short == ["attention_qkv"]


def test_options_as_a_number() -> None:
    """Every field at its ends, and back."""
    sides = (None, 0, 7, 2**22 - 2)
    for flags in itertools.product((False, True), repeat=3):
        causal, tf32, shared = flags
        for (left, right), last in itertools.product(itertools.product(sides, repeat=2), (False, True)):
            code = _qkv.code_of(
                "31:32", "consecutive", "drop", "shared" if shared else "own", "bottom_right", causal, tf32,
                (left, right), last,
            )  # fmt: skip
            assert code is not None and 0 <= code.number < 2**63
            assert _qkv.options_of(code.number) == {
                "keep": 31, "group": 32, "interleaved": False, "causal": causal, "top_left": False,
                "full_fp32": not tf32, "rest_mean": False, "shared_choice": shared,
                "window_left": left, "window_right": right, "heads_last": last,
            }  # fmt: skip
    assert set(_qkv.options_of(0)) - {"heads_last"} <= set(ProblemArguments._fields)
    for window in ((2**22 - 1, None), (None, -1)):  # the general way has room for them
        assert _qkv.code_of("2:4", "interleaved", "drop", "own", "top_left", True, True, window) is None


def test_windows_without_a_number_are_served(short: list[str]) -> None:
    q, k, v = tensors(requires_grad=False)
    for window in ((2**40, None), (5, 2**22 - 1), [40, 3]):
        assert dspattn.attention(q, k, v, enable_gqa=True, window=window).shape == (2, 4, 9, 8)
    assert not short


@pytest.mark.parametrize("given,reason", [
    ({"window": (5.0, None)}, r"window\[0\]: expected a 64-bit"),
    ({"window": (True, None)}, r"window\[0\]"), ({"kernel": None}, "kernel: expected a string"),
    ({"offset": 0.0}, "offset: expected an integer"), ({"pattern": ["2:4"]}, "pattern: expected"),
    ({"rest": "half"}, "rest: expected"), ({"window": (-1, None)}, r"window\[0\]: expected >= 0"),
], ids=str)  # fmt: skip
def test_what_equals_an_option_is_none(given: dict[str, Any], reason: str) -> None:
    """Also where the option that it equals was used before."""
    q, k, v = tensors(requires_grad=False)
    for options in ({"is_causal": True}, {"window": (5, None)}, {"window": (1, None)}):
        dspattn.attention(q, k, v, enable_gqa=True, **options)
    with pytest.raises(dspattn.DspattnError, match=reason):
        dspattn.attention(q, k, v, enable_gqa=True, **given)


class Watch(TorchDispatchMode):
    """Sees operators, as selective checkpointing and counters of operations do."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func.name())
        return func(*args, **(kwargs or {}))


def test_whoever_watches_sees_the_operators_by_their_names(short: list[str]) -> None:
    q, k, v = tensors()
    with Watch() as watch:
        dspattn.attention(q, k, v, enable_gqa=True).sum().backward()
    assert {"dspattn::attention", "dspattn::attention_backward"} <= set(watch.seen) and not short
    out = dspattn.attention(q, k, v, enable_gqa=True)  # watched in the backward pass alone
    with Watch() as watch:
        out.sum().backward()
    assert "dspattn::attention_backward" in watch.seen and short == ["attention_qkv"]


def test_what_is_not_plain_takes_the_general_way(short: list[str]) -> None:
    q, k, v = tensors()
    for given in (
        {"return_lse": True}, {"dropout_p": 0.1}, {"soft_cap": 5.0}, {"key_lengths": torch.tensor([5, 300])},
        {"attn_mask": torch.ones(9, 300, dtype=torch.bool)}, {"attn_bias": torch.zeros(300)}, {"offset": 128},
        {"sinks": torch.zeros(4)}, {"out_dtype": torch.float32}, {"scale": 1},
    ):  # fmt: skip
        dspattn.attention(q, k, v, enable_gqa=True, **given)
    dspattn.attention(q[0], k[0], v[0], enable_gqa=True)
    dspattn.attention(q, k[:, :1], v[:, :1])
    dspattn.attention(torch.nn.Parameter(q.detach()), k, v, enable_gqa=True)
    dspattn.attention(q, k.mT.contiguous().mT, v, enable_gqa=True)
    torch.vmap(lambda t: dspattn.attention(t, k, v, enable_gqa=True))(q[None])
    assert not short


def test_autocast_casts_and_gradients_have_the_types_of_the_inputs(
    short: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k, v = tensors()
    v = v.detach().bfloat16().requires_grad_()

    def call() -> list[torch.Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            out = dspattn.attention(q, k, v, enable_gqa=True)
        return [out, *torch.autograd.grad(out.sum(), (q, k, v))]

    ours, general = both_ways(monkeypatch, call)
    assert [t.dtype for t in ours] == [torch.bfloat16, torch.float32, torch.float32, torch.bfloat16]
    assert all(torch.equal(a, b) for a, b in zip(ours, general, strict=True)) and len(short) == 2


def test_only_wanted_gradients() -> None:
    q, k, v = tensors(requires_grad=False)
    dspattn.attention(q, k.requires_grad_(), v, enable_gqa=True).sum().backward()
    assert q.grad is None and v.grad is None and k.grad is not None


@pytest.mark.parametrize("more", [{}, {"return_lse": True}], ids=["short", "general"])
@pytest.mark.parametrize(
    "name,reason", [("mean", 'rest: expected "drop" for gradients'), ("shared", "takes each head's own")]
)
def test_options_without_gradients_say_so(name: str, reason: str, more: dict[str, Any]) -> None:
    q, k, v = tensors()
    out = dspattn.attention(q, k, v, enable_gqa=True, **WITHOUT_GRADIENTS[name], **more)
    with pytest.raises(dspattn.DspattnError, match=reason):
        (out[0] if more else out).sum().backward()


def test_recomputation_and_saved_tensor_hooks(short: list[str]) -> None:
    """Of either kind of checkpointing, and where only one of the passes is watched."""
    q, k, v = tensors()

    def call(*given: torch.Tensor) -> torch.Tensor:
        return dspattn.attention(*given, enable_gqa=True)

    wanted = torch.autograd.grad(call(q, k, v).sum(), (q, k, v))
    for reentrant in (False, True):
        out = torch.utils.checkpoint.checkpoint(call, q, k, v, use_reentrant=reentrant)
        found = torch.autograd.grad(out.sum(), (q, k, v)) if not reentrant else None
        if found is None:
            out.sum().backward()
            found = (q.grad, k.grad, v.grad)
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    with Watch():
        out = torch.utils.checkpoint.checkpoint(call, q, k, v, use_reentrant=False)
    found = torch.autograd.grad(out.sum(), (q, k, v))
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    packed: list[torch.Size] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t.shape) or t.clone(), lambda t: t):
        found = torch.autograd.grad(call(q, k, v).sum(), (q, k, v))
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True)) and len(packed) == 5
    assert "attention_qkv_backward" in short


def llama() -> Any:
    transformers = pytest.importorskip("transformers")
    sizes = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
             "intermediate_size")  # fmt: skip
    config = transformers.LlamaConfig(**dict(zip(sizes, (64, 32, 2, 4, 2, 32), strict=True)))
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config).train()


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("watched", [False, True])
def test_models_of_transformers_train_alike(
    autocast: bool, watched: bool, short: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where heads are joined without a step of their own, and the backward pass is watched or not."""
    model, tokens = llama(), torch.arange(300).view(2, 150) % 61
    model.set_attn_implementation("dspattn_2_4")

    def call() -> list[torch.Tensor]:
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model(tokens, labels=tokens, use_cache=False).loss
        with Watch() if watched else contextlib.nullcontext():
            loss.backward()
        return [loss.detach(), *(p.grad.clone() for p in model.parameters())]

    ours, general = both_ways(monkeypatch, call)
    assert all(torch.equal(a, b) for a, b in zip(ours, general, strict=True))
    assert short.count("attention_qkv") == 2 and short.count("attention_qkv_backward") == (0 if watched else 2)


def test_a_model_refuses_in_the_words_of_the_function() -> None:
    model = llama()
    model.set_attn_implementation("dspattn_2_4")
    with pytest.raises(dspattn.DspattnError, match=r"query\.dtype: expected"):
        model.double()(torch.arange(9)[None])


def test_layers_compiled_apart_in_full_graphs() -> None:
    """A model's layers are, and the model is not: what it collects is not the compiler's to see."""
    model, tokens = llama(), torch.arange(150)[None] % 61
    model.set_attn_implementation("dspattn_2_4")
    wanted = model(tokens, use_cache=False).logits
    torch._dynamo.reset()
    for layer in model.model.layers:
        layer.compile(backend="eager", fullgraph=True)
    torch.testing.assert_close(model(tokens, use_cache=False).logits, wanted)


def test_codes_are_not_kept_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_qkv, "MOST_CODES", 3)
    monkeypatch.setattr(_qkv, "_codes", {})
    q, k, v = tensors(requires_grad=False)
    for left in range(10):
        dspattn.attention(q, k, v, enable_gqa=True, window=(left, None))
    assert 0 < len(_qkv._codes) <= 3
