"""Measured times to set beside the speed models: the project's bench results, where they exist."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from . import results


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
COLOURS = {64: "#7a1f0f", 128: "#e07a5f"}


def _speedup(row: dict[str, Any]) -> float | None:
    """Unfused dense attention's time over ours, in a full forward pass of 2:4; None where the row is none."""
    if row.get("pattern") != "2:4" or row.get("pass", "forward") != "forward" or row.get("mask", "full") != "full":
        return None
    if row.get("stage", "total") not in ("total", "all", "pipeline"):
        return None
    peer = (row.get("peers") or {}).get("unfused")
    if not peer or not row.get("median_us"):
        return None
    return float(peer["median_us"]) / float(row["median_us"])


def read_measured(folder: Path) -> Measured:
    """One series per file and head size; nothing where a file is missing."""
    found: Measured = []
    for name, label, marker in FILES:
        path = folder / name
        if not path.is_file():
            continue
        by_dim: dict[int, dict[int, float]] = {}
        for row in results.read(path)["rows"]:
            speedup = _speedup(row)
            if speedup is not None and row.get("n_k") and row.get("d") in COLOURS:
                by_dim.setdefault(int(row["d"]), {})[int(row["n_k"])] = speedup
        for dim, points in sorted(by_dim.items()):
            series = Series(f"{label} measured, d = {dim}", marker, COLOURS[dim])
            series.keys = sorted(points)
            series.speedups = [points[keys] for keys in series.keys]
            found.append(series)
    return found
