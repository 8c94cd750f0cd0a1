"""The measures of the demo and the experiments, against values worked out another way."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dspattn import evaluate

pytest.importorskip("transformers")
import tiny_models


def test_ranks_share_ties() -> None:
    assert evaluate.ranks(np.array([3.0, 1.0, 3.0, 2.0, 3.0])).tolist() == [3.0, 0.0, 3.0, 1.0, 3.0]


def test_spearman_by_its_definition() -> None:
    generator = np.random.default_rng(3)
    first, second = generator.permutation(40).astype(float), generator.permutation(40).astype(float)
    squares = float(((first - second) ** 2).sum())  # without ties: 1 - 6 sum d^2 / (n (n^2 - 1))
    assert evaluate.spearman(first, second) == pytest.approx(1 - 6 * squares / (40 * (40**2 - 1)))
    assert evaluate.spearman(first, np.exp(first / 10)) == pytest.approx(1.0)
    assert evaluate.spearman(first, -first) == pytest.approx(-1.0)


@pytest.mark.long
def test_bootstrap_interval_covers_the_mean_as_often_as_it_says() -> None:
    generator = np.random.default_rng(5)
    trials = 200
    covered = 0
    for _ in range(trials):
        values = generator.normal(1.0, 2.0, 100)
        low, high = evaluate.bootstrap(lambda chosen, values=values: float(values[chosen].mean()), 100, draws=200)
        covered += low <= 1.0 <= high
    # 95 % of 200, five standard deviations of a binomial either side (3.1 each).
    assert 174 <= covered <= 200


def test_bootstrap_draws_whole_clusters() -> None:
    clusters = np.repeat(np.arange(10), 5)
    sizes = set()

    def statistic(chosen: np.ndarray) -> float:
        counts = np.bincount(chosen, minlength=50).reshape(10, 5)
        assert (counts == counts[:, :1]).all()
        sizes.add(len(chosen))
        return 0.0

    evaluate.bootstrap(statistic, 50, clusters=clusters, draws=20)
    assert sizes == {50}


def test_clusters_widen_the_interval_of_correlated_items() -> None:
    generator = np.random.default_rng(7)
    values = np.repeat(generator.normal(size=40), 25)
    mean = lambda chosen: float(values[chosen].mean())  # noqa: E731
    single = evaluate.bootstrap(mean, 1000)
    grouped = evaluate.bootstrap(mean, 1000, clusters=np.repeat(np.arange(40), 25))
    assert grouped[1] - grouped[0] > 3 * (single[1] - single[0])


def test_embed_does_not_depend_on_the_batch() -> None:
    model, tokenizer = tiny_models.encoder(), tiny_models.tokenizer()
    texts = [tiny_models.text(words) for words in (30, 3, 70, 12, 3)]
    together = evaluate.embed(model, tokenizer, texts, batch_tokens=400)
    alone = torch.cat([evaluate.embed(model, tokenizer, [text]) for text in texts])
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(together.norm(dim=-1), torch.ones(5))


def test_token_losses_by_hand() -> None:
    model = tiny_models.decoder()
    window = torch.tensor([5, 9, 3, 7])
    losses, predicted = evaluate.token_losses(model, window)
    with torch.inference_mode():
        probabilities = model(window[None]).logits[0].double().softmax(-1)
    expected = -torch.stack([probabilities[0, 9], probabilities[1, 3], probabilities[2, 7]]).log()
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-6)
    assert predicted.tolist() == probabilities[:3].argmax(-1).tolist()
    assert evaluate.perplexity(losses.numpy()) == pytest.approx(float(expected.mean().exp()), rel=1e-5)
