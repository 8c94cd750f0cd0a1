"""What rules keep of real attention: Q^p per layer and head, and the statistics the theory takes as input.

Scores of a row are compared only within the row, so the row's mean is removed. The first key is left out of the
statistics: pretrained models park weight on it whatever it is, so it belongs to no distribution of the others (the
share it holds is reported as ``sink``). The variogram, half the mean squared difference of scores ``lag`` keys apart,
gives the correlation: rho(lag) = 1 - variogram(lag) / sigma^2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .rules import Rule, kept_keys

Array = NDArray[np.float64]

# Lags inside the groups of 2, 4 and 8 keys, consecutive and interleaved, and a few between.
LAGS = (1, 2, 3, 4, 5, 6, 7, 10, 16, 24, 32, 48, 64, 80, 96, 112)


@dataclass
class HeadSums:
    """Running sums over the observed rows of one layer, per head."""

    rows: int = 0
    quality: dict[str, Array] = field(default_factory=dict)  # rule -> [heads, powers]
    frobenius: dict[str, Array] = field(default_factory=dict)  # rule -> [heads]: |kept| / |all| of each row
    density: dict[str, float] = field(default_factory=dict)  # rule -> kept share of each row's keys
    variance: Array | float = 0.0
    variogram: Array | float = 0.0  # [heads, lags]
    sink: Array | float = 0.0
    keys: float = 0.0


class MapObserver:
    """Observer of ``attention.using``: measures the rules on dense attention, at ``rows_per_map`` rows of each map.

    Padding is handled by the masks: -inf scores are not keys. Only rows with at least ``least_keys`` keys, a multiple
    of ``keys_multiple_of``, are measured: 128 leaves no group of either grouping unfilled.
    """

    def __init__(
        self,
        rules: Sequence[Rule],
        powers: Sequence[float],
        *,
        rows_per_map: int,
        least_keys: int,
        keys_multiple_of: int = 1,
        statistics: bool = True,
        seed: int = 0,
    ) -> None:
        self.rules = list(rules)
        self.powers = torch.tensor(list(powers), dtype=torch.float32)
        self.rows_per_map = rows_per_map
        self.least_keys = least_keys
        self.keys_multiple_of = keys_multiple_of
        self.statistics = statistics
        self.generator = torch.Generator().manual_seed(seed)
        self.layers: dict[int, HeadSums] = {}

    def __call__(self, layer: int, scores: Tensor, weights: Tensor) -> None:
        del weights  # a softmax of the scores; Q^p is computed from the scores in log space instead
        keys = (scores[:, 0] > float("-inf")).sum(-1)  # [batch, n]
        sums = self.layers.setdefault(layer, HeadSums())
        for index in range(scores.shape[0]):
            wanted = (keys[index] >= self.least_keys) & (keys[index] % self.keys_multiple_of == 0)
            eligible = wanted.nonzero().flatten()
            # A padded batch also computes rows of padding queries; the unmasked length says which are real.
            eligible = eligible[eligible < keys[index].max()]
            if not len(eligible):
                continue
            pick = torch.randperm(len(eligible), generator=self.generator)[: self.rows_per_map]
            chosen = eligible[pick.to(eligible.device)].sort().values
            full = scores[index].index_select(1, chosen)  # [heads, rows, keys]
            self._qualities(sums, full, chosen, int(keys[index].max()))
            if self.statistics:
                self._statistics(sums, full)
            sums.rows += len(chosen)

    def _qualities(self, sums: HeadSums, rows: Tensor, places: Tensor, longest: int) -> None:
        shifted = rows - rows.amax(-1, keepdim=True)
        powers = torch.stack([(shifted * p).exp() for p in self.powers.tolist()])  # [powers, heads, rows, keys]
        totals = powers.sum(-1)
        squares = (2 * shifted).exp()
        for rule in self.rules:
            kept = kept_keys(rows, rule, places, longest)
            held = (powers * kept).sum(-1)
            share = (held / totals).sum(-1).T.double().cpu().numpy()  # [heads, powers]
            norm = ((squares * kept).sum(-1) / squares.sum(-1)).sqrt().sum(-1).double().cpu().numpy()
            sums.quality[rule.name] = sums.quality.get(rule.name, 0.0) + share
            sums.frobenius[rule.name] = sums.frobenius.get(rule.name, 0.0) + norm
            share_kept = kept[0].sum(-1) / (rows[0] > float("-inf")).sum(-1)
            sums.density[rule.name] = sums.density.get(rule.name, 0.0) + float(share_kept.sum())

    def _statistics(self, sums: HeadSums, rows: Tensor) -> None:
        weights = rows.softmax(-1)
        sums.sink = sums.sink + weights[..., 0].sum(-1).double().numpy()
        sums.keys += float((rows[0] > float("-inf")).sum())
        rest = rows[..., 1:].double()
        valid = rest > float("-inf")
        rest = rest.masked_fill(~valid, 0.0)
        count = valid.sum(-1)
        mean = rest.sum(-1, keepdim=True) / count.unsqueeze(-1)
        centred = (rest - mean) * valid
        sums.variance = sums.variance + (centred.square().sum(-1) / count).sum(-1).numpy()
        halves = np.zeros((rows.shape[0], len(LAGS)))
        for index, lag in enumerate(LAGS):
            both = valid[..., lag:] & valid[..., :-lag]
            squared = ((centred[..., lag:] - centred[..., :-lag]).square() * both).sum(-1)
            halves[:, index] = 0.5 * (squared / both.sum(-1)).sum(-1).numpy()
        sums.variogram = sums.variogram + halves

    def head_rows(self, model: str, digits: int = 5) -> list[dict[str, Any]]:
        """One record per layer and head."""
        records = []
        for layer, sums in sorted(self.layers.items()):
            heads = next(iter(sums.quality.values())).shape[0]
            for head in range(heads):
                record: dict[str, Any] = {"model": model, "layer": layer, "head": head, "rows": sums.rows}
                if self.statistics:
                    variance = np.asarray(sums.variance)[head] / sums.rows
                    correlation = 1 - np.asarray(sums.variogram)[head] / sums.rows / variance
                    record["keys"] = round(sums.keys / sums.rows, 1)
                    record["sigma"] = round(float(np.sqrt(variance)), digits)
                    record["sink"] = round(float(np.asarray(sums.sink)[head] / sums.rows), digits)
                    record["rho"] = {
                        str(lag): round(float(rho), digits) for lag, rho in zip(LAGS, correlation, strict=True)
                    }
                record["quality"] = {
                    name: [round(float(value), digits) for value in values[head] / sums.rows]
                    for name, values in sums.quality.items()
                }
                records.append(record)
        return records

    def mean_correlation(self) -> list[float]:
        """Correlation at LAGS from the variograms of all heads, each scaled by its variance."""
        curves = []
        for sums in self.layers.values():
            variance = np.asarray(sums.variance) / sums.rows
            curves.append(1 - np.asarray(sums.variogram) / sums.rows / variance[:, None])
        return [round(float(value), 5) for value in np.concatenate(curves).mean(0)]

    def mean_quality(self) -> dict[str, list[float]]:
        """Q^p of each rule over all layers, heads and rows: one number per power."""
        return {
            rule.name: [
                round(float(value), 6)
                for value in np.mean([s.quality[rule.name].mean(0) / s.rows for s in self.layers.values()], axis=0)
            ]
            for rule in self.rules
        }

    def mean_density(self) -> dict[str, float]:
        """Share of its unmasked keys that a row keeps: above the rule's own density where groups are not full."""
        return {
            rule.name: round(float(np.mean([s.density[rule.name] / s.rows for s in self.layers.values()])), 5)
            for rule in self.rules
        }

    def mean_frobenius(self) -> dict[str, float]:
        """Share of each row's Euclidean norm that a rule keeps, over all layers, heads and rows."""
        return {
            rule.name: round(
                float(np.mean([(s.frobenius[rule.name] / s.rows).mean() for s in self.layers.values()])), 6
            )
            for rule in self.rules
        }
