"""Caches of transformers keep sums of V for names with ``_mean``: a generation uses them, and nothing that happens to a
cache leaves old ones behind. On the CPU, where calls with and without sums round alike."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import dspattn
import tiny_models
from dspattn.integrations import _cache_sums

transformers = pytest.importorskip("transformers")

NAME = "dspattn_2_4_mean"


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Queries of every call that was given sums; each is compared with the same call without."""
    calls: list[int] = []
    by_sums = _cache_sums.attention_with_cache

    def compared(query: Any, key: Any, value: Any, lengths: Any = None, **options: Any) -> Any:
        found = by_sums(query, key, value, lengths, **options)
        options["sums"] = None
        torch.testing.assert_close(found, by_sums(query, key, value, lengths, **options), atol=1e-4, rtol=1e-4)
        calls.append(query.shape[2])
        return found

    monkeypatch.setattr(_cache_sums, "attention_with_cache", compared)
    yield calls


def decoder(name: str = NAME) -> Any:
    model = tiny_models.decoder()
    model.set_attn_implementation(name)
    return model


def prompt(words: int, batch: int = 2) -> torch.Tensor:
    torch.manual_seed(3)
    return torch.randint(2, 64, (batch, words))


def generated(model: Any, ids: torch.Tensor, count: int, **options: Any) -> Any:
    return model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, pad_token_id=0,
        eos_token_id=None, output_logits=True, return_dict_in_generate=True, **options,
    )  # fmt: skip


def expect_same(one: Any, other: Any) -> None:
    assert torch.equal(one.sequences, other.sequences)
    torch.testing.assert_close(torch.stack(one.logits), torch.stack(other.logits), atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", [NAME, "dspattn_1_2_consecutive_mean"])
def test_a_generation_uses_sums(used: list[int], cache: str, name: str) -> None:
    model = decoder(name)
    ids = prompt(250)  # a block becomes whole at 256
    with torch.no_grad():
        fresh = generated(model, ids, 9, use_cache=False)
        assert used == []
        expect_same(generated(model, ids, 9, cache_implementation=cache, disable_compile=True), fresh)
    assert used == [1] * (8 * len(model.model.layers))


def test_a_static_cache_serves_a_mask_of_the_keys_there_are(used: list[int]) -> None:
    """transformers before 5.23 hands such a mask on in every generation; later ones where a caller has a loop."""
    model = decoder()
    ids = prompt(250)
    cache = transformers.StaticCache(config=model.config, max_cache_len=270)
    with torch.no_grad():
        model(ids, attention_mask=torch.ones_like(ids), past_key_values=cache)
        for n in (251, 252):
            ids = torch.cat([ids, prompt(1)], 1)
            step = model(ids[:, -1:], attention_mask=torch.ones_like(ids), past_key_values=cache)
            assert ids.shape[1] == n
        torch.testing.assert_close(step.logits, model(ids).logits[:, -1:], atol=1e-3, rtol=1e-3)
    assert used == [1] * (2 * len(model.model.layers))


@pytest.mark.parametrize("columns", [130, 139, 140])
def test_columns_that_a_mask_lacks_are_hidden(columns: int) -> None:
    """As transformers has it: a mask that ends before the keys says the same as one with zeros there."""
    ids = prompt(140)
    model = decoder()
    steps = []
    for zeros in (0, 160 - columns):
        cache = transformers.StaticCache(config=model.config, max_cache_len=160)
        mask = torch.nn.functional.pad(torch.ones_like(ids[:, :columns]), (0, zeros))
        with torch.no_grad():
            model(ids[:, :-1], attention_mask=torch.ones_like(ids[:, :-1]), past_key_values=cache)
            steps.append(model(ids[:, -1:], attention_mask=mask, past_key_values=cache).logits)
    torch.testing.assert_close(steps[0], steps[1], atol=1e-4, rtol=1e-4)


def test_no_other_implementation_asks_for_sums(used: list[int]) -> None:
    model = decoder("dspattn_2_4")
    cache = transformers.DynamicCache(config=model.config)
    with torch.no_grad():
        generated(model, prompt(140), 3, past_key_values=cache)
    assert used == []
    assert all(getattr(layer, _cache_sums.ATTRIBUTE, _cache_sums.Kept()).sums is None for layer in cache.layers)


def sums_of(cache: Any) -> list[Any]:
    return [layer.__dict__[_cache_sums.ATTRIBUTE].sums for layer in cache.layers]


@pytest.mark.parametrize(
    "change",
    [
        lambda cache: cache.crop(-70),
        lambda cache: cache.reorder_cache(torch.tensor([1, 0])),
        lambda cache: cache.batch_select_indices(torch.tensor([1, 1])),
        lambda cache: [layer.values.mul_(2) for layer in cache.layers],
        lambda cache: [setattr(layer, "values", layer.values.flip(2)) for layer in cache.layers],
        lambda cache: [(layer.offload(), layer.prefetch()) for layer in cache.layers],
        lambda cache: cache.reset(),
    ],
    ids=["crop", "reorder", "select", "write", "replace", "offload", "reset"],
)
def test_a_growing_cache_that_is_changed_has_no_old_sums(used: list[int], change: Callable[[Any], Any]) -> None:
    model = decoder()
    cache = transformers.DynamicCache(config=model.config)
    with torch.no_grad():
        model(prompt(300), past_key_values=cache)
        model(prompt(1), past_key_values=cache)
        assert all(sums is not None for sums in sums_of(cache))
        change(cache)
        model(prompt(150), past_key_values=cache)
        for _ in range(2):
            model(prompt(1), past_key_values=cache)  # compared by `used`
    assert len(used) == 3 * len(cache.layers)


@pytest.mark.parametrize(
    "change",
    [
        lambda cache: cache.reorder_cache(torch.tensor([1, 0])),
        lambda cache: [(layer.offload(), layer.prefetch()) for layer in cache.layers],
        lambda cache: cache.reset(),
    ],
    ids=["reorder", "offload", "reset"],
)
def test_a_static_cache_that_is_changed_has_no_old_sums(used: list[int], change: Callable[[Any], Any]) -> None:
    model = decoder()
    cache = transformers.StaticCache(config=model.config, max_cache_len=420)
    with torch.no_grad():
        model(prompt(260), past_key_values=cache)
        model(prompt(1), past_key_values=cache)
        change(cache)
        model(prompt(135), past_key_values=cache)
        for _ in range(2):
            model(prompt(1), past_key_values=cache)
    assert len(used) == 3 * len(cache.layers)


def test_a_copied_cache_has_none(used: list[int]) -> None:
    model = decoder()
    cache = transformers.DynamicCache(config=model.config)
    with torch.no_grad():
        model(prompt(300), past_key_values=cache)
        model(prompt(1), past_key_values=cache)
        copies = [copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))]
        for each in (cache, *copies):
            model(prompt(130), past_key_values=each)
            model(prompt(1), past_key_values=each)
    assert len(used) == 4 * len(cache.layers)


def test_many_steps_of_a_growing_cache(used: list[int]) -> None:
    model = decoder()
    cache = transformers.DynamicCache(config=model.config)
    with torch.inference_mode():
        model(prompt(5), past_key_values=cache)
        for count in (1, 16, 1, 110, 1, 2, 120, 3, 1, 140, 1):
            model(prompt(count), past_key_values=cache)
    assert 3 in used and 16 in used and 110 not in used


@pytest.mark.parametrize("reorders", [False, True])
def test_a_compiled_step_keeps_sums_of_a_static_cache(reorders: bool) -> None:
    model = decoder()
    compiled = torch.compile(model, backend="eager", fullgraph=True)

    def logits(decode: Any) -> torch.Tensor:
        cache = transformers.StaticCache(config=model.config, max_cache_len=400)
        model(prompt(250), past_key_values=cache)
        found = []
        for step in range(10):
            if reorders and step == 8:
                cache.reorder_cache(torch.tensor([1, 0]))
            found.append(decode(prompt(1), past_key_values=cache).logits)
        for layer, sums in zip(cache.layers, sums_of(cache), strict=True):
            if sums is not None:
                whole = dspattn.value_sums(layer.values, torch.full((2,), 260))
                torch.testing.assert_close(sums[:, :, :4], whole[:, :, :4])
        if decode is compiled and not reorders:
            sums_of(cache)[0].fill_(1e3)
            assert (decode(prompt(1), past_key_values=cache).logits - found[-1]).abs().max() > 0.1, "sums are read"
        return torch.stack(found)

    with torch.no_grad():
        expected = logits(model)
        torch.testing.assert_close(logits(compiled), expected, atol=1e-5, rtol=1e-5)
    torch._dynamo.reset()


def test_compiled_generation() -> None:
    model = decoder()
    ids = prompt(250)
    with torch.no_grad():
        fresh = generated(model, ids, 9, use_cache=False)
        options = transformers.CompileConfig(backend="eager", mode=None, dynamic=False)
        expect_same(generated(model, ids, 9, cache_implementation="static", compile_config=options), fresh)
    torch._dynamo.reset()


def test_beams() -> None:
    model = decoder()
    ids = prompt(250, batch=1)
    with torch.no_grad():
        same = {"num_beams": 3, "max_new_tokens": 9, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
        fresh = model.generate(ids, **same, use_cache=False)
        assert torch.equal(model.generate(ids, **same), fresh)


def test_the_names_say_mean() -> None:
    assert dspattn.integrations.huggingface.implementation_name("2:4", rest="mean") == NAME
