"""What a plain fp32 emulation of pruned attention measured on the same subsets, and how close a run must come."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Expectation:
    """A value for one cell, and the tolerance either side of it."""

    task: str
    metric: str
    pattern: str
    grouping: str
    value: float
    tolerance: float


def _cells(task: str, metric: str, tolerance: float, *, relative: bool = False, **values: float) -> list[Expectation]:
    cells = []
    for key, value in values.items():
        pattern, _, grouping = key.lstrip("_").partition("__")
        allowed = tolerance * value if relative else tolerance
        cells.append(Expectation(task, metric, pattern.replace("_", ":"), grouping or "none", value, allowed))
    return cells


EXPECTATIONS: list[Expectation] = [
    *_cells(
        "stsb",
        "spearman_x100",
        0.05,
        dense=82.03,
        _1_2__consecutive=81.62,
        _2_4__consecutive=81.67,
        _1_4__consecutive=80.83,
        _4_8__consecutive=81.82,
        _2_4__interleaved=82.03,
        _1_2__interleaved=82.03,
    ),
    *_cells(
        "squad_retrieval",
        "recall_at_1",
        0.3,
        dense=64.37,
        _2_4__consecutive=64.04,
        _1_2__consecutive=64.09,
        _2_4__interleaved=64.19,
        _1_2__interleaved=63.91,
    ),
    *_cells(
        "squad_retrieval",
        "mrr_x100",
        0.3,
        dense=74.93,
        _2_4__consecutive=74.78,
        _1_2__consecutive=74.75,
        _2_4__interleaved=74.81,
        _1_2__interleaved=74.64,
    ),
    *_cells(
        "squad_retrieval",
        "cosine_to_dense",
        0.001,
        dense=1.0,
        _2_4__consecutive=0.9884,
        _1_2__consecutive=0.9838,
        _2_4__interleaved=0.9950,
        _1_2__interleaved=0.9936,
    ),
    *_cells(
        "wikitext2_1024",
        "perplexity",
        0.003,
        relative=True,
        dense=27.04,
        _2_4__consecutive=27.85,
        _1_2__consecutive=28.83,
        _2_4__interleaved=27.14,
        _1_2__interleaved=27.14,
        _1_4__interleaved=27.78,
    ),
    *_cells(
        "wikitext2_512",
        "perplexity",
        0.003,
        relative=True,
        dense=32.32,
        _2_4__consecutive=33.31,
        _1_2__consecutive=34.59,
        _1_4__consecutive=42.48,
        _4_8__consecutive=32.74,
    ),
    *_cells(
        "imdb_2048",
        "perplexity",
        0.003,
        relative=True,
        dense=37.82,
        _2_4__consecutive=39.46,
        _1_2__consecutive=41.09,
        _2_4__interleaved=38.07,
        _1_2__interleaved=38.16,
    ),
]
