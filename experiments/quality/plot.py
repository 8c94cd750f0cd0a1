"""Draws docs/images/quality.png from the committed results alone: what interleaving buys, at a glance.

python experiments/quality/plot.py
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
PATTERNS = ("4:8", "2:4", "1:2", "1:4")  # from the mildest to the harshest
CONSECUTIVE, INTERLEAVED, INK, SOFT = "#c2502e", "#1f66c1", "#1b1c1e", "#6b7076"

Row = dict[str, Any]
# Tasks of a panel with their labels, the metric, the heading, and what a row contributes: value, low, high.
PANELS = (
    (
        {
            "wikitext2_512": "WikiText-2, context 512",
            "wikitext2_1024": "WikiText-2, context 1024",
            "wikitext2_2048": "WikiText-2, context 2048",
            "imdb_2048": "IMDB, context 2048",
        },
        "perplexity",
        "SmolLM2-135M: perplexity above dense, % (even steps up to 1, then by factors)",
    ),
    (
        {"squad_retrieval": "SQuAD passages, mean 174 tokens"},
        "cosine_to_dense",
        "MiniLM: distance (1 - cosine) from the dense vector, %",
    ),
    ({"stsb": "STS-B, at most 46 tokens"}, "spearman_x100", "MiniLM: Spearman correlation below dense, points of 100"),
)


def cost(row: Row) -> tuple[float, float, float]:
    """What the pattern costs in this row, with its interval; more is worse."""
    if row["metric"] == "perplexity":
        return row["change"], row["change_low"], row["change_high"]
    factor = 100.0 if row["metric"] == "cosine_to_dense" else 1.0
    return -factor * row["change"], -factor * row["change_high"], -factor * row["change_low"]


def read_rows(results: Path) -> list[Row]:
    rows: list[Row] = []
    for path in sorted(results.glob("*.json")):
        rows += [row for row in json.loads(path.read_text())["rows"] if row.get("rest") != "mean"]
    return rows


def draw(rows: list[Row], paths: list[Path]) -> None:
    """One dumbbell a pattern and task: from the consecutive grouping to the interleaved one."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({"font.size": 9})
    found = {(row["task"], row["metric"], row["pattern"], row["grouping"]): cost(row) for row in rows}
    measured = {task for task, *_ in found}
    panels = [({task: tasks[task] for task in tasks if task in measured}, *rest) for tasks, *rest in PANELS]
    panels = [panel for panel in panels if panel[0]]
    lines = [len(tasks) * (len(PATTERNS) + 1) for tasks, _, _ in panels]
    figure, axes = plt.subplots(
        len(panels), 1, figsize=(7.6, 0.2 * sum(lines) + 2.6), gridspec_kw={"height_ratios": lines}, squeeze=False
    )
    for axis, (tasks, metric, heading) in zip(axes[:, 0], panels, strict=True):
        height = 0.0
        ticks: list[tuple[float, str]] = []
        for task, label in tasks.items():
            axis.text(
                1.0,
                height,
                label,
                transform=axis.get_yaxis_transform(),
                color=SOFT,
                ha="right",
                va="center",
                fontsize=8.5,
            )
            height -= 1
            for pattern in PATTERNS:
                ends = {name: found.get((task, metric, pattern, name)) for name in ("consecutive", "interleaved")}
                values = [end[0] for end in ends.values() if end]
                if len(values) == 2:
                    axis.plot(values, [height] * 2, color="#c9ccd1", linewidth=2.5, zorder=1, solid_capstyle="round")
                for name, colour in (("consecutive", CONSECUTIVE), ("interleaved", INTERLEAVED)):
                    end = ends[name]
                    if end:
                        axis.plot(end[1:], [height] * 2, color=colour, linewidth=0.9, alpha=0.6, zorder=2)
                        face = "white" if name == "consecutive" else colour
                        axis.plot(end[0], height, "o", color=colour, markerfacecolor=face, markersize=5.5, zorder=3)
                if values:
                    ticks.append((height, pattern))
                height -= 1
        axis.set_yticks([place for place, _ in ticks], [name for _, name in ticks])
        axis.set_ylim(height + 0.4, 0.6)
        if metric == "perplexity":  # from a fraction of a per cent to tens: even steps up to 1, then by factors
            axis.set_xscale("symlog", linthresh=1.0, linscale=1.5)
            ticks_at = [0.0, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 40.0]
            axis.set_xticks(ticks_at, [f"{tick:g}" for tick in ticks_at], minor=False)
            axis.minorticks_off()
        axis.set_xlim(left=-0.05 if metric == "perplexity" else min(-0.02, axis.get_xlim()[0]))
        axis.axvline(0.0, color=INK, linewidth=0.8)
        axis.set_title(heading, loc="left", fontsize=10, color=INK)
        axis.grid(axis="x", alpha=0.25)
        axis.tick_params(axis="y", length=0)
        for side in ("top", "right", "left"):
            axis.spines[side].set_visible(False)
    handles = [
        plt.Line2D([], [], marker="o", linestyle="", color=INTERLEAVED, label="interleaved groups (default)"),
        plt.Line2D(
            [],
            [],
            marker="o",
            linestyle="",
            color=CONSECUTIVE,
            markerfacecolor="white",
            label="consecutive groups (the paper's)",
        ),
    ]
    figure.legend(handles=handles, loc="upper left", ncols=2, frameon=False, bbox_to_anchor=(0.0, 0.982))
    figure.text(0.01, 0.99, "Cost of pruning, no fine-tuning", va="top", fontsize=11, fontweight="bold")
    figure.tight_layout(rect=(0, 0, 1, 0.95))
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=120)
    plt.close(figure)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=HERE / "results")
    parser.add_argument("--out", type=Path, default=HERE.parent.parent / "docs" / "images")
    options = parser.parse_args(arguments)
    rows = read_rows(options.results)
    if not rows:
        print(f"error: no results in {options.results}: run experiments/quality/run.py first", file=sys.stderr)
        return 1
    paths = [options.out / "quality.png"]
    draw(rows, paths)
    print(*paths, sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
