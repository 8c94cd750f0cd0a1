"""Measured times to set beside the speed models: the project's bench results, where they exist."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from . import result_files


@dataclass
class Series:
    """Speedups over unfused dense attention at growing length."""

    label: str
    marker: str
    colour: str
    keys: list[int] = field(default_factory=list)
    speedups: list[float] = field(default_factory=list)


Measured = list[Series]

# File, what it is, marker. The three-kernel pipeline is what the traffic model describes; the fused kernel keeps its
# scores on the chip and is bound by arithmetic, so it should lie far above.
FILES = (
    ("pipeline_h200.json", "pipeline", "o"),
    ("forward_h200.json", "fused", "^"),
)
PIPELINE = FILES[0][0]
COLOURS = {"2:4": "#7a1f0f", "1:2": "#0b3c5d"}
# The pipeline's kernels and the stage of the traffic model that each is.
STAGES = {"qk_prune": "scores", "softmax": "softmax", "pv_sparse": "values"}


def _rows(path: Path) -> list[dict[str, Any]]:
    """Forward passes without mask that were timed beside unfused dense attention."""
    if not path.is_file():
        return []
    return [
        row
        for row in result_files.read(path)["rows"]
        if row.get("pattern") in COLOURS
        and row.get("pass", "forward") == "forward"
        and row.get("mask", "full") == "full"
        and row.get("grouping", "consecutive") == ("consecutive" if path.name == PIPELINE else row.get("grouping"))
        and row.get("median_us")
        and ((row.get("peers") or {}).get("unfused") or {}).get("median_us")
    ]


def _speedup(row: dict[str, Any]) -> float:
    return float(row["peers"]["unfused"]["median_us"]) / float(row["median_us"])


def read_measured(folder: Path) -> Measured:
    """One series per file, pattern, dtype and head size; nothing where a file is missing."""
    found: Measured = []
    for name, label, marker in FILES:
        series: dict[tuple[str, str, int], dict[int, float]] = {}
        for row in _rows(folder / name):
            if row.get("stage", "chain") == "chain":
                key = (row["pattern"], row.get("dtype", ""), int(row["d"]))
                series.setdefault(key, {})[int(row["n_k"])] = _speedup(row)
        for (pattern, dtype, dim), points in sorted(series.items()):
            keys = sorted(points)
            text = f"{label} {pattern} {dtype} measured, d = {dim}"
            found.append(Series(text, marker, COLOURS[pattern], keys, [points[n] for n in keys]))
    return found


Stages = dict[tuple[str, str, int, int], dict[str, float]]


def read_stages(folder: Path) -> Stages:
    """Speedup of each stage of the pipeline, by (pattern, dtype, keys, head size); stages as in the traffic model."""
    found: Stages = {}
    for row in _rows(folder / PIPELINE):
        if row.get("stage") in STAGES:
            key = (row["pattern"], row.get("dtype", ""), int(row["n_k"]), int(row["d"]))
            found.setdefault(key, {})[STAGES[row["stage"]]] = _speedup(row)
    return found
