"""Draws the figures of docs/comparison.md from the JSON files alone: docs/images/comparison/<figure>_<machine>.png.

python experiments/comparison/plot.py
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from contenders import label_of
from matplotlib.figure import Figure

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
PICTURES = ROOT / "docs" / "images" / "comparison"
THEORY = ROOT / "experiments" / "theory" / "results" / "theory.json"
COLOURS = {"dense": "black", "ours": "#c0392b", "zoo": "#2471a3", "combined": "#1e8449"}
STAGES = {"scores": "#7fb3d5", "softmax": "#f5b041", "product": "#82e0aa", "overhead": "#bdbdbd"}

LONGEST_OF_STAGES = 4096  # as far as the paper goes; beyond, linear mechanisms are too small to be seen

Rows = list[dict[str, Any]]


def of(rows: Rows, **wanted: Any) -> Rows:
    return [row for row in rows if all(row.get(key) == value for key, value in wanted.items())]


def _lines(axis: Any, rows: Rows, value: str) -> None:
    """A line for each contender, the zoo's pale and named where they end."""
    names = list(dict.fromkeys(row["kernel"] for row in rows))
    ends = []
    for name in names:
        points = sorted((row["n_k"], row[value]) for row in of(rows, kernel=name) if row.get(value))
        if not points:
            continue
        kind = of(rows, kernel=name)[0]["kind"]
        strong = kind in ("dense", "ours")
        axis.plot(*zip(*points, strict=True), marker="o" if strong else "", color=COLOURS[kind], ms=4,
                  lw=2 if strong else 0.9, ls="--" if name in ("sdpa", "cudnn") else "-",
                  alpha=1 if strong else 0.7)  # fmt: skip
        ends.append((points[-1][1], points[-1][0], name, COLOURS[kind]))
    axis.set(xscale="log", yscale="log", xlabel="sequence length n")
    axis.set_xticks(sorted({row["n_k"] for row in rows}), [str(n) for n in sorted({row["n_k"] for row in rows})])
    axis.minorticks_off()
    # Labels right of the plot, spread so that none covers another.
    low, high = axis.get_ylim()
    place = low
    for y, x, name, colour in sorted(ends):
        place = max(y, place * (high / low) ** 0.036)
        axis.annotate(name, (x, y), (axis.get_xlim()[1] * 1.05, place), fontsize=7, color=colour, va="center",
                      arrowprops={"arrowstyle": "-", "lw": 0.3, "color": colour}, annotation_clip=False)  # fmt: skip


def latency(rows: Rows) -> Figure:
    dtypes = list(dict.fromkeys(row["dtype"] for row in rows))
    figure, axes = plt.subplots(
        2, len(dtypes), figsize=(9 * len(dtypes), 12), squeeze=False, gridspec_kw={"hspace": 0.35}
    )
    for column, dtype in enumerate(dtypes):
        mine = of(rows, dtype=dtype)
        per_token = [
            {**row, "time": row["median_us"] / (row["batch"] * row["n_k"]) if row["median_us"] else None}
            for row in mine
        ]
        _lines(axes[0][column], per_token, "time")
        axes[0][column].set(ylabel="µs per token", title=f"{dtype}, 4 heads, d = 64")
        lengths = [
            row["n_k"] for row in of(mine, kernel="full") if row["median_us"] and row["n_k"] <= LONGEST_OF_STAGES
        ]
        longest = max(lengths, default=None)
        if longest is None:
            continue  # nothing to compare with
        shown = [row for row in of(mine, n_k=longest) if row.get("stages")]
        base = of(mine, n_k=longest, kernel="full")[0]["median_us"]
        axis = axes[1][column]
        for place, row in enumerate(shown):
            left = 0.0
            total = sum(row["stages"].values()) or 1.0
            for stage, colour in STAGES.items():
                width = row["stages"][stage] / total * row["median_us"] / base
                axis.barh(place, width, left=left, color=colour, label=stage if place == 0 else None)
                left += width
        for name in ("pipeline", "fused", "sdpa", "cudnn"):
            for row in of(mine, n_k=longest, kernel=name):
                if row["median_us"]:
                    axis.axvline(row["median_us"] / base, color=COLOURS[row["kind"]], lw=1, ls=":")
                    axis.text(row["median_us"] / base, len(shown) - 0.4, label_of(name, row["dtype"]), fontsize=7,
                              rotation=90, va="bottom")  # fmt: skip
        axis.set_yticks(range(len(shown)), [row["kernel"] for row in shown], fontsize=8)
        axis.set(xlabel="time over unfused full attention (cut off at 2, as in the paper)", xlim=(0, 2))
        axis.set_title(f"stages at n = {longest}", pad=40)
        axis.legend(fontsize=8)
    return figure


def memory(rows: Rows) -> Figure:
    figure, axis = plt.subplots(figsize=(9, 6))
    _lines(axis, [{**row, "MiB": row["peak_bytes"] / 2**20 if row.get("peak_bytes") else None} for row in rows], "MiB")
    axis.set(ylabel="MiB beyond the inputs", title=f"{rows[0]['dtype']}, batch {rows[0]['batch']}, 4 heads, d = 64")
    return figure


def overhead(rows: Rows) -> Figure:
    dtypes = list(dict.fromkeys(row["dtype"] for row in rows))
    figure, axes = plt.subplots(1, len(dtypes), figsize=(6 * len(dtypes), 4), squeeze=False)
    for axis, dtype in zip(axes[0], dtypes, strict=True):
        mine = of(rows, dtype=dtype)
        for name in dict.fromkeys(row["kernel"] for row in mine):
            points = [
                (row["n_k"], row["median_us"] / of(mine, kernel="product", n_k=row["n_k"])[0]["median_us"])
                for row in of(mine, kernel=name)
                if row["median_us"] and of(mine, kernel="product", n_k=row["n_k"])[0]["median_us"]
            ]
            if points:
                axis.plot(*zip(*points, strict=True), "o-", label=name)
        axis.set(xscale="log", xlabel="sequence length n", ylabel="time over the product alone", title=dtype, ylim=0)
        axis.legend(fontsize=8)
    return figure


def density(rows: Rows) -> Figure:
    dtypes = list(dict.fromkeys(row["dtype"] for row in rows))
    theory = of(json.loads(THEORY.read_text())["rows"], set="density")
    figure, axes = plt.subplots(1, len(dtypes), figsize=(6.5 * len(dtypes), 4.5), squeeze=False)
    for axis, dtype in zip(axes[0], dtypes, strict=True):
        mine = of(rows, dtype=dtype)
        for name, rule, colour in (("fixed", "fixed", "#2471a3"), ("top_k", "top-k", "#7d3c98")):
            measured = [row for row in of(mine, kernel=name) if row["ratio"].get("unfused")]
            points = [(row["density"], row["ratio"]["unfused"]) for row in measured]
            if points:
                axis.plot(*zip(*sorted(points), strict=True), "o-", color=colour, label=f"{name}, measured")
            model = [(row["density"], row["speedup"]) for row in of(theory, rule=rule) if row.get("speedup")]
            if model:
                axis.plot(*zip(*sorted(model), strict=True), "--", color=colour, lw=1, label=f"{name}, model")
        for name in ("pipeline", "fused", "sdpa", "cudnn"):
            for row in of(mine, kernel=name):
                if row.get("ratio", {}).get("unfused"):
                    axis.axhline(row["ratio"]["unfused"], lw=1, ls=":", color="black")
                    axis.text(0.011, row["ratio"]["unfused"], label_of(name, dtype), fontsize=8, va="bottom")
        axis.axhline(1, color="black", lw=0.8)
        axis.set(xscale="log", yscale="log", xlabel="density s", ylabel="speed over unfused full attention",
                 title=f"{dtype}, n = {mine[0]['n_k']}")  # fmt: skip
        axis.legend(fontsize=8)
    return figure


def model(rows: Rows) -> Figure:
    cases = list(dict.fromkeys((row["dtype"], row["heads"], row["feed_forward"]) for row in rows))
    figure, axes = plt.subplots(len(cases), 2, figsize=(14, 5 * len(cases)), squeeze=False)
    for (time, peak), (dtype, heads, width) in zip(axes, cases, strict=True):
        mine = of(rows, dtype=dtype, heads=heads, feed_forward=width)
        relative = []
        for row in mine:
            base = of(mine, kernel="full", n_k=row["n_k"])[0]
            if row["median_us"] and base["median_us"]:
                relative.append({**row, "speed": base["median_us"] / row["median_us"],
                                 "memory": row["peak_bytes"] / base["peak_bytes"]})  # fmt: skip
        _lines(time, relative, "speed")
        _lines(peak, relative, "memory")
        time.set(ylabel="speed over the unfused model", title=f"{dtype}, {heads} heads, feed-forward {width}")
        peak.set(ylabel="peak memory over the unfused model's")
    return figure


def training(rows: Rows) -> Figure:
    dtypes = list(dict.fromkeys(row["dtype"] for row in rows))
    figure, axes = plt.subplots(1, 2 * len(dtypes), figsize=(10 * len(dtypes), 6), squeeze=False)
    for column, dtype in enumerate(dtypes):
        mine = [row for row in of(rows, dtype=dtype) if row["median_us"]]
        for axis, value, label in zip(
            axes[0][2 * column :],
            (lambda row: row["median_us"] / 1e3, lambda row: row["peak_bytes"] / 2**20),
            ("ms, forward and backward", "MiB beyond inputs and parameters"),
            strict=False,
        ):
            axis.barh(range(len(mine)), [value(row) for row in mine], color=[COLOURS[row["kind"]] for row in mine])
            axis.set_yticks(range(len(mine)), [row["kernel"] for row in mine], fontsize=8)
            axis.set(xscale="log", xlabel=label, title=f"{dtype}, n = {mine[0]['n_k']}" if mine else dtype)
    figure.tight_layout()
    return figure


DRAWINGS = {
    "latency": latency, "overhead": overhead, "density": density, "model": model, "memory": memory,
    "training": training,
}  # fmt: skip


def main() -> int:
    PICTURES.mkdir(parents=True, exist_ok=True)
    for path in sorted((HERE / "results").glob("*.json")):
        name = path.stem.split("_", 1)[0]
        figure = DRAWINGS[name](json.loads(path.read_text())["rows"])
        figure.savefig(PICTURES / f"{path.stem}.png", dpi=90, bbox_inches="tight")
        plt.close(figure)
        print(PICTURES / f"{path.stem}.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
