"""dspattn.apply: which layers it changes, how it knows, what it refuses, and that restore leaves no trace."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch

import dspattn

SDPA = torch.nn.functional.scaled_dot_product_attention


class SelfAttention(torch.nn.Module):
    """As many libraries write it."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = torch.nn.Linear(32, 96)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.unflatten(-1, (2, 16)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        return SDPA(q, k, v).transpose(1, 2).flatten(2)


class OwnAttention(SelfAttention):
    """Attention that nothing can redirect."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        return torch.softmax(q @ k.transpose(1, 2), -1) @ v


class EitherAttention(SelfAttention):
    """Could compute attention itself, and calls PyTorch's through another object, as diffusers does."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.process(x)

    def process(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.unflatten(-1, (2, 16)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        return call(q, k, v).transpose(1, 2).flatten(2)

    def weights(self, scores: torch.Tensor) -> torch.Tensor:
        return torch.softmax(scores, -1)


def call(*tensors: torch.Tensor) -> torch.Tensor:
    return SDPA(*tensors)


class Mixed(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = SelfAttention()
        self.second = torch.nn.MultiheadAttention(32, 2, batch_first=True)
        self.third = OwnAttention()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        x, _ = self.second(x, x, x, need_weights=False)
        return self.third(x)


X = torch.randn(2, 150, 32)


def test_layers_of_three_kinds_and_back() -> None:
    torch.manual_seed(0)
    model = Mixed().eval()
    plain = model(X)
    applied = dspattn.apply(model, "1:2", example=X)
    assert [layer.name for layer in applied.changed] == ["first", "second"]
    assert [(layer.name, layer.reason) for layer in applied.left] == [("third", "computes attention in its own code")]
    assert "2 of 3 attention layers changed" in str(applied)
    pruned = model(X)
    assert (pruned - plain).abs().max() > 1e-3
    dspattn.restore(model)
    assert torch.equal(model(X), plain)
    assert type(model.second) is torch.nn.MultiheadAttention and "forward" not in vars(model.first)
    with pytest.raises(dspattn.DspattnError, match="has switched"):
        dspattn.restore(model)


def test_dense_gives_what_was_there() -> None:
    model = Mixed().eval()
    plain = model(X)
    dspattn.apply(model, "dense", example=X)
    torch.testing.assert_close(model(X), plain, atol=1e-5, rtol=1e-4)


def test_patterns_by_layer_and_skip() -> None:
    model = torch.nn.Sequential(*(SelfAttention() for _ in range(4)))
    model = torch.nn.Sequential(*[torch.nn.Sequential(part, torch.nn.Linear(32, 32)) for part in model]).eval()
    applied = dspattn.apply(model, example=X, layers={0: "1:2", "2.*": "1:4"})
    assert [layer.plan and layer.plan.pattern for layer in applied.layers] == ["1:2", None, "1:4", None]
    dspattn.restore(model)
    applied = dspattn.apply(model, example=X, skip=["1.0", 3])
    assert [layer.changed for layer in applied.layers] == [True, False, True, False]
    assert applied.left[0].reason == "in skip"


def test_what_cannot_be_done_raises_and_changes_nothing() -> None:
    model = Mixed().eval()
    plain = model(X)
    cases: list[tuple[Any, str]] = [
        (dict(layers=["frist"]), "layers: expected numbers below 3 or names among first, second, third, got 'frist'"),
        (dict(skip=[7]), "skip: expected numbers below 3"),
        (dict(layers=["third"]), "nothing would change"),
        (dict(rest="median"), 'rest: expected "drop" or "mean"'),
        (dict(pattern="5:4"), "pattern: expected"),
        (dict(grouping="odd"), "grouping: expected"),
        (dict(example=None), "example: expected what the model is called with"),
        (dict(example=3), "example: expected a dict, a tuple or a tensor, got int"),
        (dict(heads=[0]), "heads: expected None for"),
    ]
    for change, reason in cases:
        with pytest.raises(dspattn.DspattnError, match=reason):
            dspattn.apply(model, **({"example": X} | change))
        assert torch.equal(model(X), plain)
    with pytest.raises(dspattn.DspattnError, match="expected attention layers"):
        dspattn.apply(torch.nn.Linear(32, 32), example=X)
    dspattn.apply(model, example=X)
    with pytest.raises(dspattn.DspattnError, match="has not switched yet"):
        dspattn.apply(model, example=X)


def pickled(model: Any) -> Any:
    return pickle.loads(pickle.dumps(model))


@pytest.mark.parametrize("copied", [copy.deepcopy, pickled])
def test_a_copy_stands_on_its_own(copied: Any) -> None:
    model = Mixed().eval()
    plain = model(X)
    dspattn.apply(model, "1:2", example=X)
    pruned = model(X)
    other = copied(model)
    assert torch.equal(other(X), pruned) and list(other.state_dict()) == list(model.state_dict())
    with torch.no_grad():
        other.first.qkv.weight.zero_()
        other.first.qkv.bias.zero_()
    assert not other.first(X).any(), "attention with the weights of the original"
    dspattn.restore(other)
    other.load_state_dict(model.state_dict())
    assert torch.equal(other(X), plain) and torch.equal(model(X), pruned)


def test_a_part_that_is_switched_already() -> None:
    model = torch.nn.Sequential(Mixed(), Mixed()).eval()
    plain = model(X)
    dspattn.apply(model[1], "1:2", example=X)
    with pytest.raises(dspattn.DspattnError, match="has not switched yet, but its module 1 was"):
        dspattn.apply(model, "1:2", example=X)
    dspattn.restore(model)
    assert torch.equal(model(X), plain)


def test_a_forward_that_another_package_put_there_stays() -> None:
    model = SelfAttention().eval()
    calls = []
    inner = model.forward

    def hooked(x: torch.Tensor) -> torch.Tensor:
        calls.append(x)
        return inner(x)

    model.forward = hooked  # type: ignore[method-assign]
    dspattn.apply(model, example=X)
    calls.clear()
    model(X)
    dspattn.restore(model)
    model(X)
    assert len(calls) == 2


def test_a_forward_that_another_package_put_around_it_survives_restore() -> None:
    """As hooks of accelerate do, which then still call what apply had put there."""
    model = SelfAttention().eval()
    plain = model(X)
    dspattn.apply(model, "1:2", example=X)
    inner = model.forward
    model.forward = lambda x: inner(x)  # type: ignore[method-assign]
    assert not torch.equal(model(X), plain)
    dspattn.restore(model)
    assert torch.equal(model(X), plain)
    dspattn.apply(model, "1:2", example=X)
    assert not torch.equal(model(X), plain)


def test_compiled_before_and_after() -> None:
    model = Mixed().eval()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    plain = compiled(X)
    dspattn.apply(compiled, "1:2", example=X)
    pruned = model(X)
    assert (pruned - plain).abs().max() > 1e-3
    torch.testing.assert_close(compiled(X), pruned)
    dspattn.restore(compiled)
    torch.testing.assert_close(compiled(X), plain)


def test_a_layer_that_does_not_change_is_found() -> None:
    class Fickle(SelfAttention):
        """Goes its own way from the second call on."""

        calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return super().forward(x) if self.calls == 1 else x

    with pytest.raises(dspattn.DspattnError, match="0: expected pruned attention calls, saw none"):
        dspattn.apply(torch.nn.Sequential(Fickle()), example=X)


def test_what_a_module_calls_counts_more_than_how_it_looks() -> None:
    applied = dspattn.apply(torch.nn.Sequential(EitherAttention()), example=X)
    assert [layer.kind for layer in applied.changed] == ["scaled_dot_product_attention"]


def test_short_inputs_are_pointed_out() -> None:
    applied = dspattn.apply(torch.nn.Sequential(SelfAttention()), "2:4", example=X[:, :64])
    assert "64 keys in the traced call, too few for anything to be pruned" in str(applied)


def test_a_model_that_writes_into_its_inputs() -> None:
    """As sentence-transformers' modules do; every call of the check gets what the user gave."""

    class Writing(SelfAttention):
        def forward(self, features: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:  # type: ignore[override]
            assert set(features) == {"x"}
            features["out"] = super().forward(features["x"])
            return features

    for example in (({"x": torch.randn(1, 100, 32)},), {"features": {"x": torch.randn(1, 100, 32)}}):
        model = Writing().eval()
        assert len(dspattn.apply(model, "1:2", example=example).changed) == 1
        (given,) = example if isinstance(example, tuple) else example.values()
        assert set(given) == {"x"}


def test_the_mode_of_training_stays() -> None:
    model = Mixed()
    model.first.eval()
    dspattn.apply(model, example=X)
    assert model.training and model.second.training and not model.first.training


@pytest.fixture
def llama() -> Any:
    pytest.importorskip("transformers", minversion="5.0")
    import tiny_models

    return tiny_models.decoder(layers=3)


def logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(ids).logits


def test_a_hugging_face_model(llama: Any) -> None:
    ids = torch.randint(2, 60, (2, 150))
    plain = logits(llama, ids)
    llama.set_attn_implementation("dspattn_1_2_consecutive")
    by_name = logits(llama, ids)
    llama.set_attn_implementation("sdpa")
    applied = dspattn.apply(llama, "1:2", grouping="consecutive", example={"input_ids": ids})
    assert [layer.name for layer in applied.changed] == [f"model.layers.{i}.self_attn" for i in range(3)]
    assert torch.equal(logits(llama, ids), by_name)
    dspattn.restore(llama)
    assert llama.config._attn_implementation == "sdpa" and torch.equal(logits(llama, ids), plain)
    dspattn.apply(llama)  # without an example: the ids that transformers has for such checks
    dspattn.restore(llama)
    dspattn.apply(llama, "1:2", example={"input_ids": ids}, layers=["*.1.*"])
    assert not torch.equal(logits(llama, ids), plain) and not torch.equal(logits(llama, ids), by_name)


def test_a_copy_of_a_hugging_face_model(llama: Any) -> None:
    from transformers import AttentionInterface

    ids = torch.randint(2, 60, (2, 150))
    plain = logits(llama, ids)
    dspattn.apply(llama, "1:2", example={"input_ids": ids})
    pruned = logits(llama, ids)
    content = pickle.dumps(llama)
    del AttentionInterface._global_mapping["dspattn_applied"]  # as in a process that has switched nothing
    other = pickle.loads(content)
    assert torch.equal(logits(other, ids), pruned)
    dspattn.restore(other)
    assert torch.equal(logits(other, ids), plain) and torch.equal(logits(llama, ids), pruned)


def test_heads_of_a_hugging_face_model(llama: Any) -> None:
    ids = torch.randint(2, 60, (2, 150))
    results = {}
    for heads in (None, [0, 1, 2, 3], [2], {1: [2]}, []):
        dspattn.apply(llama, "1:2", example={"input_ids": ids}, heads=heads)
        results[str(heads)] = logits(llama, ids)
        dspattn.restore(llama)
    plain = logits(llama, ids)
    torch.testing.assert_close(results["None"], results["[0, 1, 2, 3]"])
    torch.testing.assert_close(results["[]"], plain, atol=1e-4, rtol=1e-4)
    assert (results["[2]"] - plain).abs().max() > 1e-3
    with pytest.raises(dspattn.DspattnError, match="heads: expected numbers below 4, got \\[4\\]"):
        dspattn.apply(llama, "1:2", example={"input_ids": ids}, heads=[4])
    assert torch.equal(logits(llama, ids), plain)


def test_a_model_that_computes_attention_itself_is_refused() -> None:
    transformers = pytest.importorskip("transformers", minversion="5.0")
    model = transformers.BloomModel(transformers.BloomConfig(vocab_size=64, hidden_size=32, n_layer=2, n_head=2))
    with pytest.raises(dspattn.DspattnError, match="computes attention in its own code"):
        dspattn.apply(model)


def test_propose_finds_the_layer_that_suffers() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(SelfAttention() for _ in range(3))).eval()
    model = torch.nn.Sequential(*[torch.nn.Sequential(part, torch.nn.Linear(32, 32)) for part in model]).eval()
    with torch.no_grad():
        for index, part in enumerate(model):
            part[0].qkv.weight[:64] *= 0.0 if index == 1 else 3.0  # equal scores: half of the weight is pruned
    plain = model(X)
    proposal = dspattn.propose(model, "1:2", example=X)
    assert list(proposal.losses) == ["0.0", "1.0", "2.0"] and all(loss > 0 for loss in proposal.losses.values())
    worst = max(proposal.losses, key=proposal.losses.__getitem__)
    assert worst in proposal.skip and len(proposal.skip) < 3 and worst in str(proposal)
    assert dspattn.propose(model, "1:2", example=X, share=0.0).skip == ()
    assert len(dspattn.propose(model, "1:2", example=X, share=1.0, measure=lambda out: float(out.std())).losses) == 3
    assert torch.equal(model(X), plain)
    with pytest.raises(dspattn.DspattnError, match="share: expected a number between 0 and 1, got 2"):
        dspattn.propose(model, example=X, share=2)
    with pytest.raises(
        dspattn.DspattnError, match=r"measure: expected a number for the outputs with .* pruned, got nan"
    ):
        dspattn.propose(model, "1:2", example=X, measure=lambda _: float("nan"))
