"""How good a model still is: sentence vectors, next-token losses, rank correlation, bootstrap intervals.

The demo and the experiments measure with these functions, so that both mean the same thing by the same figure.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Array = NDArray[np.float64]


def embed(
    model: Any,
    tokenizer: Any,
    texts: Sequence[str],
    *,
    max_tokens: int = 512,
    batch_tokens: int = 4096,
    advance: Callable[[int], object] | None = None,
) -> Tensor:
    """Unit vectors of ``texts``, [len(texts), width]: the mean over tokens of the last layer, normalised.

    Texts are batched by length (at most ``batch_tokens`` padded tokens a batch), and ``advance(count)`` is called
    after each batch for a progress bar.
    """
    encoded = tokenizer(list(texts), truncation=True, max_length=max_tokens)["input_ids"]
    order = sorted(range(len(encoded)), key=lambda index: len(encoded[index]))
    vectors: list[Tensor | None] = [None] * len(encoded)
    start = 0
    while start < len(order):
        stop = start + 1
        while stop < len(order) and len(encoded[order[stop]]) * (stop - start + 1) <= batch_tokens:
            stop += 1
        chosen = order[start:stop]
        batch = tokenizer.pad({"input_ids": [encoded[index] for index in chosen]}, return_tensors="pt")
        with torch.inference_mode():
            hidden = model(**batch).last_hidden_state
        weight = batch["attention_mask"].unsqueeze(-1).to(hidden.dtype)
        means = (hidden * weight).sum(1) / weight.sum(1)
        for index, vector in zip(chosen, torch.nn.functional.normalize(means, dim=-1), strict=True):
            vectors[index] = vector
        if advance is not None:
            advance(len(chosen))
        start = stop
    return torch.stack([vector for vector in vectors if vector is not None])


def token_losses(model: Any, window: Tensor) -> tuple[Tensor, Tensor]:
    """Next-token losses and predictions of one window of token ids [tokens].

    Returns the negative log likelihood in nats of tokens 1, 2, ... given those before them, fp64 [tokens - 1], and
    the most likely token at each of these places, [tokens - 1].
    """
    with torch.inference_mode():
        logits = model(window.unsqueeze(0), use_cache=False).logits[0, :-1]
        losses = torch.nn.functional.cross_entropy(logits, window[1:], reduction="none")
    return losses.double(), logits.argmax(-1)


def perplexity(losses: Array) -> float:
    """exp of the mean loss."""
    return float(np.exp(losses.mean()))


def ranks(values: Array) -> Array:
    """Ranks from 0, equal values sharing the mean of their ranks."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    below = np.cumsum(counts) - counts
    shared: Array = below[inverse] + (counts[inverse] - 1) / 2.0
    return shared


def spearman(first: Array, second: Array) -> float:
    """Spearman's rank correlation."""
    return float(np.corrcoef(ranks(first), ranks(second))[0, 1])


def bootstrap(
    statistic: Callable[[NDArray[np.int64]], float],
    count: int,
    *,
    clusters: NDArray[np.int64] | None = None,
    draws: int = 1000,
    seed: int = 0,
) -> tuple[float, float]:
    """The 95 % percentile interval of ``statistic(indices)`` over resampled items 0 ... count - 1.

    With ``clusters`` [count], whole clusters are drawn instead of single items: questions about one passage, or
    neighbouring tokens, are not independent. Calls with the same count, clusters and seed draw the same items, which
    makes a difference between two of them a paired one.
    """
    generator = np.random.default_rng(seed)
    labels = np.arange(count) if clusters is None else clusters
    _, inverse = np.unique(labels, return_inverse=True)
    members = np.split(np.argsort(inverse, kind="stable"), np.cumsum(np.bincount(inverse))[:-1])
    found = np.empty(draws)
    for draw in range(draws):
        chosen = generator.integers(0, len(members), len(members))
        found[draw] = statistic(np.concatenate([members[index] for index in chosen]))
    low, high = np.percentile(found, [2.5, 97.5])
    return float(low), float(high)
