"""The paper's search for p: the power at which Q^p orders top-k and fixed patterns as the task does."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def isotonic(values: Array) -> Array:
    """The non-decreasing sequence nearest to ``values`` (least squares, pool adjacent violators).

    Example:
        >>> isotonic(np.array([1.0, 3.0, 2.0, 4.0])).tolist()
        [1.0, 2.5, 2.5, 4.0]
    """
    blocks: list[list[float]] = []  # mean, count
    for value in values.tolist():
        blocks.append([value, 1.0])
        while len(blocks) > 1 and blocks[-2][0] > blocks[-1][0]:
            mean, count = blocks.pop()
            total = blocks[-1][1] + count
            blocks[-1] = [(blocks[-1][0] * blocks[-1][1] + mean * count) / total, total]
    return np.concatenate([np.full(int(count), mean) for mean, count in blocks])


def disorder(quality: Array, goodness: Array) -> float:
    """Share of the variance of ``goodness`` that no increasing function of ``quality`` explains: 0 is a perfect line.

    Example:
        >>> disorder(np.array([0.1, 0.5, 0.9]), np.array([1.0, 2.0, 5.0]))
        0.0
    """
    ordered = goodness[np.argsort(quality, kind="stable")]
    spread = float(((ordered - ordered.mean()) ** 2).sum())
    return float(((ordered - isotonic(ordered)) ** 2).sum()) / spread if spread > 0 else 0.0


def inversions(quality: Array, goodness: Array) -> int:
    """Pairs that quality and goodness order differently."""
    first, second = np.triu_indices(len(quality), 1)
    return int(((quality[first] - quality[second]) * (goodness[first] - goodness[second]) < 0).sum())


@dataclass(frozen=True)
class Search:
    """Outcome of a search: ``curve`` is the disorder of the anchors at each power, ``best`` the power of least."""

    powers: Array
    curve: Array
    best: float
    anchors: float  # disorder of the anchors at the best power
    everything: float  # the same with the N:M points added
    pairs_wrong: int  # inversions among all points at the best power
    pairs: int


def search_power(powers: Array, quality: Array, goodness: Array, anchor: NDArray[np.bool_]) -> Search:
    """Finds p on the ``anchor`` points (top-k and fixed), then judges all points at it; quality [points, powers]."""
    curve = np.array([disorder(quality[anchor, i], goodness[anchor]) for i in range(len(powers))])
    # Of equally good powers the smallest: larger ones see less and less but each row's largest weight.
    best = int(np.flatnonzero(curve <= curve.min() + 1e-12)[0])
    count = len(goodness)
    return Search(
        powers=powers,
        curve=curve,
        best=float(powers[best]),
        anchors=float(curve[best]),
        everything=disorder(quality[:, best], goodness),
        pairs_wrong=inversions(quality[:, best], goodness),
        pairs=count * (count - 1) // 2,
    )
