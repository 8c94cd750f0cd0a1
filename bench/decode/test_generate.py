"""Generation with a static cache: the same tokens as without one."""

import pytest
import torch

from bench.common import results
from bench.decode.generate import Generation, Model, Shape, compared, dense, dense_repeated, pruned, table

SHAPE = Shape(layers=2, heads=4, kv_heads=2, d=16, vocabulary=50)


@pytest.fixture
def model():
    torch.manual_seed(1)
    return Model(SHAPE).requires_grad_(False)


def without_cache(model, prompt, count, attend=dense):
    """Every token from the whole text so far."""
    text = prompt
    for _ in range(count):
        caches = [[torch.zeros(len(text), SHAPE.kv_heads, text.shape[1], SHAPE.d) for _ in "kv"] for _ in model.layers]
        logits = model(text, caches, torch.tensor([text.shape[1]]), attend)
        text = torch.cat([text, logits.argmax(-1, keepdim=True)], 1)
    return text[:, prompt.shape[1] :]


def test_a_cache_changes_no_token(model):
    prompt = torch.randint(SHAPE.vocabulary, (3, 7))
    found = Generation(model, dense, prompt, new_tokens=6).tokens(6)
    assert torch.equal(found, without_cache(model, prompt, 6))
    assert torch.equal(Generation(model, dense_repeated, prompt, new_tokens=6).tokens(6), found)


def test_a_cache_changes_no_token_of_pruned_attention(model):
    """A prompt's rows and a step's keep the same keys: lengths are counted from the cache's beginning."""
    pytest.importorskip("dspattn")
    prompt = torch.randint(SHAPE.vocabulary, (2, 150))
    attend = pruned("2:4", "own")
    found = Generation(model, attend, prompt, new_tokens=4).tokens(4)
    assert torch.equal(found, without_cache(model, prompt, 4, attend))
    together = Generation(model, pruned("2:4", "shared"), prompt, new_tokens=4).tokens(4)
    assert torch.equal(together[:, :1], found[:, :1])  # the prompt's rows choose by themselves


def test_ratios_are_to_the_faster_of_pytorchs():
    times = {"step_us": 1.0, "prompt_ms": 1.0}
    found = {"sdpa": {"skipped": "no kernel"}, "sdpa repeated": {"tokens_per_s": 50.0, **times}}
    found["2:4 own"] = {"tokens_per_s": 60.0, **times}
    rows = compared(SHAPE, 3, 7, found)
    assert [row.get("ratio") for row in rows] == [None, 1.0, 1.2] and rows[0]["skipped"] == "no kernel"


def test_a_second_run_starts_anew(model):
    generation = Generation(model, dense, torch.randint(SHAPE.vocabulary, (1, 5)), new_tokens=4)
    assert torch.equal(generation.tokens(4), generation.tokens(4))


def test_the_page_has_the_table():
    rows = results.read(results.FOLDER / "generate_h200.json")["rows"]
    assert table(rows) in (results.ROOT / "docs" / "log" / "decode.md").read_text("utf-8")
