"""A correlation function that can be simulated, fitted to the measured one."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

# Non-negative mixtures of decay^lag are positive definite for every length, which measured values need not be.
DECAYS = np.array([0.3, 0.5, 0.7, 0.8, 0.9, 0.95, 0.97, 0.98, 0.99])


def fit_mixture(lags: Sequence[int], correlation: Sequence[float]) -> list[tuple[float, float]]:
    """(weight, decay) pairs with non-negative weights of sum <= 1 nearest to the measured correlation.

    Accelerated projected gradient on the least squares. What the weights leave of 1 is the part of a score that no
    other key shares.

    Example:
        >>> [(round(w, 2), d) for w, d in fit_mixture(range(1, 60), [0.6 * 0.9**lag for lag in range(1, 60)])]
        [(0.6, 0.9)]
    """
    basis = DECAYS[None, :] ** np.asarray(lags, dtype=np.float64)[:, None]
    target = np.asarray(correlation, dtype=np.float64)
    step = 1.0 / float(np.linalg.norm(basis, 2)) ** 2
    weights = momentum = np.zeros(basis.shape[1])
    for iteration in range(20000):
        moved = _project(momentum - step * basis.T @ (basis @ momentum - target))
        momentum = moved + iteration / (iteration + 3) * (moved - weights)
        weights = moved
    return [(float(w), float(d)) for w, d in zip(weights, DECAYS, strict=True) if w > 1e-3]


def _project(point: Array) -> Array:
    """The nearest point with non-negative entries of sum at most 1."""
    clipped: Array = np.maximum(point, 0.0)
    if clipped.sum() <= 1.0:
        return clipped
    ordered = np.sort(point)[::-1]
    excess = (np.cumsum(ordered) - 1.0) / np.arange(1, len(point) + 1)
    shift = excess[np.flatnonzero(ordered > excess)[-1]]
    shifted: Array = np.maximum(point - shift, 0.0)
    return shifted


def as_option(mixture: Sequence[tuple[float, float]]) -> str:
    """The mixture as ``dspattn theory --correlation`` takes it.

    Example:
        >>> as_option([(0.25, 0.9), (0.5, 0.3)])
        '0.25:0.9,0.5:0.3'
    """
    return ",".join(f"{weight:.4g}:{decay:g}" for weight, decay in mixture) or "0:0"


def evaluate(mixture: Sequence[tuple[float, float]], lags: Array) -> Array:
    """The mixture at the given lags (> 0)."""
    total = np.zeros(lags.shape)
    for weight, decay in mixture:
        total += weight * decay**lags
    return total
