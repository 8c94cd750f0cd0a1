"""What training asks for: dropout, soft caps, sinks, and the gradients of biases, of sinks and through the LSE."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from torch.func import grad, vmap
from torch.utils.checkpoint import checkpoint

import contract
import dspattn
import tiny_models

Q, K, V = (torch.randn(2, 4, n, 16, generator=torch.Generator().manual_seed(n)) for n in (40, 50, 50))
P = 0.3


def leaves(*tensors: Tensor) -> list[Tensor]:
    return [t.clone().requires_grad_() for t in tensors]


def seeded(function: Callable[[], Any], seed: int = 5) -> Any:
    torch.manual_seed(seed)
    return function()


@pytest.mark.parametrize("shape", [(2, 4, 40, 50), (1, 4, 40, 50), (40, 50), (4, 1, 50), (2, 1, 40, 1)])
def test_gradients_of_biases(shape: tuple[int, ...]) -> None:
    q, k, v = (contract.integers(*t.shape).requires_grad_() for t in (Q, K, V))
    bias = (0.25 * contract.integers(*shape)).requires_grad_()
    weight = torch.randn(2, 4, 40, 16)
    out, lse = dspattn.attention(q, k, v, bias, pattern="2:4", return_lse=True)
    wanted, wanted_lse = contract.attention(q, k, v, "2:4", "interleaved", bias=bias)
    got = torch.autograd.grad((out * weight).sum() + lse.square().sum(), (q, k, v, bias))
    expected = torch.autograd.grad((wanted * weight).sum() + wanted_lse.square().sum(), (q, k, v, bias))
    for ours, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(ours, theirs.to(ours.dtype), atol=2e-4, rtol=1e-4)


def test_the_lse_alone_has_gradients() -> None:
    q, k, v = leaves(Q, K, V)
    _, lse = dspattn.attention(q, k, v, pattern="dense", return_lse=True)
    got = torch.autograd.grad(lse.sum(), (q, k, v), materialize_grads=True)
    expected = torch.autograd.grad((q @ k.mT / 4).logsumexp(-1).sum(), (q, k, v), materialize_grads=True)
    for ours, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)


def plain(q: Tensor, k: Tensor, v: Tensor, soft_cap: float, sinks: Tensor) -> tuple[Tensor, Tensor]:
    scores = soft_cap * torch.tanh(q @ k.mT / q.shape[-1] ** 0.5 / soft_cap)
    scores = torch.cat((scores, sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)), -1)
    return scores.softmax(-1)[..., :-1] @ v, scores.logsumexp(-1)


@pytest.mark.parametrize("packed", [False, True])
def test_soft_caps_and_sinks(packed: bool) -> None:
    q, k, v, sinks = leaves(Q, K, V, torch.randn(4))
    given: dict[str, Any] = {"pattern": "dense", "soft_cap": 1.5, "sinks": sinks, "return_lse": True}
    if packed:
        rows = [t.transpose(1, 2).flatten(0, 1) for t in (q, k, v)]
        cu_q, cu_k = torch.tensor([0, 40, 80]), torch.tensor([0, 50, 100])
        out, lse = dspattn.varlen_attention(*rows, cu_q, cu_k, **given)
        out, lse = out.unflatten(0, (2, 40)).transpose(1, 2), lse.unflatten(1, (2, 40)).transpose(0, 1)
    else:
        out, lse = dspattn.attention(q, k, v, **given)
    wanted, wanted_lse = plain(q, k, v, 1.5, sinks)
    torch.testing.assert_close(out, wanted)
    torch.testing.assert_close(lse, wanted_lse)
    got = torch.autograd.grad(out.square().sum() + lse.sum(), (q, k, v, sinks))
    expected = torch.autograd.grad(wanted.square().sum() + wanted_lse.sum(), (q, k, v, sinks))
    for ours, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


def test_soft_caps_do_not_choose() -> None:
    kept = [dspattn.attention_weights(Q, K, soft_cap=cap) > 0 for cap in (None, 0.5)]
    assert torch.equal(*kept)


def test_dropout_drops_its_share_and_scales_the_others() -> None:
    whole = dspattn.attention_weights(Q, K, pattern="dense")
    dropped = seeded(lambda: dspattn.attention_weights(Q, K, pattern="dense", dropout_p=P))
    gone = dropped == 0
    count = gone.numel()
    assert abs(gone.sum().item() - P * count) < 5 * (count * P * (1 - P)) ** 0.5
    torch.testing.assert_close(dropped[~gone], whole[~gone] / (1 - P))
    for dim in range(4):  # of every batch entry, head, query and key
        share = gone.float().mean([other for other in range(4) if other != dim])
        each = count / gone.shape[dim]
        assert ((share - P).abs() < 5 * (P * (1 - P) / each) ** 0.5).all()
    pruned = seeded(lambda: dspattn.attention_weights(Q, K, dropout_p=P))
    assert torch.equal((pruned > 0), (dspattn.attention_weights(Q, K) > 0) & ~gone)  # after pruning, the same places


def test_dropout_follows_the_generator() -> None:
    def call() -> Tensor:
        out: Tensor = dspattn.attention(Q, K, V, dropout_p=P)
        return out

    first = seeded(call)
    second = call()
    assert not torch.equal(first, second)
    assert torch.equal(first, seeded(call)) and not torch.equal(first, seeded(call, 6))
    _, lse = dspattn.attention(Q, K, V, dropout_p=P, return_lse=True)
    assert torch.equal(lse, dspattn.attention(Q, K, V, return_lse=True)[1])
    state = torch.get_rng_state()
    dspattn.attention(Q, K, V)
    assert torch.equal(state, torch.get_rng_state())  # without dropout nothing is drawn


def test_gradients_with_dropout_are_those_of_the_weights_that_stayed() -> None:
    q, k, v = leaves(Q, K, V)
    mask = seeded(lambda: dspattn.attention_weights(Q, K, pattern="dense", dropout_p=P)) > 0
    out = seeded(lambda: dspattn.attention(q, k, v, pattern="dense", dropout_p=P))
    wanted = ((q @ k.mT / 4).softmax(-1) * mask / (1 - P)) @ v
    torch.testing.assert_close(out, wanted)
    got, expected = (torch.autograd.grad(o.square().sum(), (q, k, v)) for o in (out, wanted))
    for ours, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


def dropping(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out: Tensor = dspattn.attention(q, k, v, dropout_p=P)
    return out


@pytest.mark.parametrize("how", ["reentrant", "not reentrant", "compiled"])
def test_run_again_or_compiled_the_same_weights_are_dropped(how: str) -> None:
    q, k, v = leaves(Q, K, V)
    functions: dict[str, Callable[..., Tensor]] = {
        "reentrant": functools.partial(checkpoint, dropping, use_reentrant=True),
        "not reentrant": functools.partial(checkpoint, dropping, use_reentrant=False),
        "compiled": lambda *given: torch.compile(dropping, backend="aot_eager", fullgraph=True)(*given),
    }
    wanted = seeded(lambda: torch.autograd.grad(dropping(q, k, v).square().sum(), (q, k, v)))
    got = leaves(q.detach(), k.detach(), v.detach())
    seeded(lambda: functions[how](*got).square().sum().backward())
    for tensor, expected in zip(got, wanted, strict=True):
        assert tensor.grad is not None and torch.equal(tensor.grad, expected)


def test_gradients_of_each_sample() -> None:
    """What vmap cannot join into one call runs one by one."""
    sinks, bias = torch.randn(4), torch.randn(4, 1, 50)

    def loss(q: Tensor, sinks: Tensor, bias: Tensor) -> Tensor:
        out: Tensor = dspattn.attention(q, K[0], V[0], bias, sinks=sinks, soft_cap=3.0)
        return out.square().sum()

    got = vmap(grad(loss, (0, 1, 2)), (0, None, None))(Q, sinks, bias)
    alone = [grad(loss, (0, 1, 2))(q, sinks, bias) for q in Q]
    for ours, samples in zip(got, zip(*alone, strict=True), strict=True):
        torch.testing.assert_close(ours, torch.stack(samples))


@pytest.mark.parametrize("given,reason", [
    ({"dropout_p": 1.0}, "dropout_p"), ({"dropout_p": -0.1}, "dropout_p"), ({"dropout_p": "much"}, "dropout_p"),
    ({"soft_cap": 0.0}, "soft_cap"), ({"sinks": torch.zeros(3)}, "sinks"), ({"sinks": 1.0}, "sinks"),
    ({"dropout_p": 0.1, "rest": "mean"}, "dropout_p"),
])  # fmt: skip
def test_what_makes_no_sense_is_refused_by_name(given: dict[str, Any], reason: str) -> None:
    with pytest.raises(dspattn.DspattnError, match=rf"(?m)^{reason}\b"):
        dspattn.attention(Q, K, V, **given)


def test_autocast_leaves_sinks_as_they_are() -> None:
    q, sinks = Q.clone().requires_grad_(), torch.randn(4, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        out = dspattn.attention(q, K, V, sinks=sinks, dropout_p=P)
    out.float().sum().backward()
    assert out.dtype == torch.bfloat16 and sinks.grad is not None and sinks.grad.dtype == torch.float32


def test_modules_with_dropout() -> None:
    torch.manual_seed(0)
    module = dspattn.nn.MultiheadAttention(32, 4, dropout=0.2, batch_first=True)
    x = torch.randn(2, 20, 32)
    out, weights = seeded(lambda: module(x, x, x, average_attn_weights=False))
    # The weights that are returned are the dropped ones, and the output is made of them.
    value = module._heads(module._project(x, x, x)[2])
    torch.testing.assert_close(module.out_proj((weights @ value).transpose(1, 2).flatten(2)), out)
    assert not torch.equal(*(module(x, x, x, need_weights=False)[0] for _ in range(2)))
    module.eval()
    assert torch.equal(*(module(x, x, x, need_weights=False)[0] for _ in range(2)))
    encoder = torch.nn.TransformerEncoderLayer(32, 4, 48, batch_first=True)  # dropout 0.1, as it comes
    with dspattn.use("2:4") as switched:
        encoder(x).square().sum().backward()
    assert switched.served == 1 and all(p.grad is not None for p in encoder.parameters())


VOCABULARY = 60
TINY: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
}  # fmt: skip


def gemma2() -> Any:
    config = transformers.Gemma2Config(**TINY, attn_logit_softcapping=0.5, sliding_window=8)
    return transformers.Gemma2ForCausalLM(config)


def gpt_oss() -> Any:
    config = transformers.GptOssConfig(**TINY, num_local_experts=2, num_experts_per_tok=1, sliding_window=8)
    return transformers.GptOssForCausalLM(config)


def bert() -> Any:
    config = transformers.BertConfig(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        hidden_dropout_prob=0.0,
    )  # fmt: skip
    return transformers.BertForMaskedLM(config)  # attention dropout 0.1, as it comes


def t5() -> Any:
    tiny_models.skip_if_not_looked_up("T5")
    config = transformers.T5Config(
        vocab_size=VOCABULARY, d_model=64, d_kv=16, d_ff=32, num_layers=2, num_heads=4, dropout_rate=0.0,
        decoder_start_token_id=0,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config)


@pytest.mark.parametrize("make", [gemma2, gpt_oss, t5])
def test_hugging_face_models_train_as_with_their_own_attention(make: Callable[[], Any]) -> None:
    torch.manual_seed(1)
    model = make().train()
    tokens = torch.randint(1, VOCABULARY, (2, 20))
    found = []
    for name in ("eager", "dspattn_dense"):
        model.zero_grad()
        model.set_attn_implementation(name)
        loss = model(tokens, labels=tokens).loss
        loss.backward()
        grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        found.append((loss.detach(), grads))
    (loss, grads), (ours, our_grads) = found
    torch.testing.assert_close(ours, loss)
    assert grads.keys() == our_grads.keys()
    for parameter, grad_ in grads.items():
        torch.testing.assert_close(our_grads[parameter], grad_, atol=1e-5, rtol=2e-3, msg=parameter)
    model.set_attn_implementation("dspattn_2_4")
    model(tokens, labels=tokens).loss.backward()


def test_hugging_face_models_with_dropout_train() -> None:
    torch.manual_seed(1)
    model = bert().train()
    model.set_attn_implementation("dspattn_2_4")
    tokens = torch.randint(1, VOCABULARY, (2, 20))
    losses = [seeded(lambda: model(tokens, labels=tokens).loss, seed) for seed in (1, 1, 2)]
    assert torch.equal(losses[0], losses[1]) and not torch.equal(losses[0], losses[2])
    losses[0].backward()
