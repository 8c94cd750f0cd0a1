"""Generation with a static cache: the same tokens as without one."""

import pytest
import torch

from bench.decode.generate import Generation, Model, Shape, dense

SHAPE = Shape(layers=2, heads=4, kv_heads=2, d=16, vocabulary=50)


@pytest.fixture
def model():
    torch.manual_seed(1)
    return Model(SHAPE).requires_grad_(False)


def without_cache(model, prompt, count):
    """Every token from the whole text so far."""
    text = prompt
    for _ in range(count):
        caches = [[torch.zeros(len(text), SHAPE.kv_heads, text.shape[1], SHAPE.d) for _ in "kv"] for _ in model.layers]
        logits = model(text, caches, torch.tensor([text.shape[1]]), dense)
        text = torch.cat([text, logits.argmax(-1, keepdim=True)], 1)
    return text[:, prompt.shape[1] :]


def test_a_cache_changes_no_token(model):
    prompt = torch.randint(SHAPE.vocabulary, (3, 7))
    found = Generation(model, dense, prompt, new_tokens=6).tokens(6)
    assert torch.equal(found, without_cache(model, prompt, 6))


def test_a_second_run_starts_anew(model):
    generation = Generation(model, dense, torch.randint(SHAPE.vocabulary, (1, 5)), new_tokens=4)
    assert torch.equal(generation.tokens(4), generation.tokens(4))
