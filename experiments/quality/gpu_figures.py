"""Loss against context length and against speed: the pictures and the tables of docs/quality.md, from the results of
gpu_perplexity.py alone.

python experiments/quality/gpu_figures.py            # docs/images/quality_context.png and quality_speed.png
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results" / "gpu" / "perplexity.json"
SHARED = RESULTS.with_name("shared.json")  # heads that choose together beside heads that do not
TEXTS = {"wikitext2": "WikiText-2", "imdb": "IMDB reviews"}
COLOURS = {"2:4": "#1f66c1", "1:2": "#c2502e"}
MINUS = "\N{MINUS SIGN}"

Row = dict[str, Any]
Key = tuple[str, str, str, str]  # pattern, grouping, rest, selection


def read_rows(path: Path = RESULTS) -> list[Row]:
    """What was measured; what was skipped is not among it."""
    if not path.is_file():
        return []
    return [row for row in json.loads(path.read_text())["rows"] if "skipped" not in row]


def key_of(row: Row) -> Key:
    return row["pattern"], row["grouping"], row["rest"], row.get("selection", "own")


def label_of(key: Key) -> str:
    pattern, grouping, rest, selection = key
    if pattern == "dense":
        return "dense (perplexity)"
    text = f"{pattern} {grouping}, rest {'to the mean' if rest == 'mean' else 'dropped'}"
    return text + ", heads choose together" * (selection == "shared")


def modes_of(rows: list[Row]) -> list[Key]:
    """In the order they were measured, dense first."""
    return list(dict.fromkeys(key_of(row) for row in rows))


def change_text(row: Row) -> str:
    text = f"{row['change_percent']:+.2f}"
    if row["two_se_percent"] is not None:
        text += f" ± {row['two_se_percent']:.2f}"
    return text.replace("-", MINUS)


def losses_table(rows: list[Row]) -> str:
    """Change of perplexity against dense, per cent, by text and length."""
    rows = [row for row in rows if row["part"] == "perplexity"]
    if not rows:
        return "Not measured yet: `gpu_perplexity.py measure` on a GPU, then `gpu_figures.py` and `tables.py`."
    lengths = sorted({row["n"] for row in rows})
    lines = []
    for text, title in TEXTS.items():
        here = {(key_of(row), row["n"]): row for row in rows if row["text"] == text}
        if not here:
            continue
        lines += [f"| {title}, windows of | " + " | ".join(map(str, lengths)) + " |", "|---|" + "---|" * len(lengths)]
        for key in modes_of(rows):
            found = [here.get((key, length)) for length in lengths]
            if not any(found):
                continue
            cells = [
                "" if row is None else f"{row['perplexity']:.2f}" if key[0] == "dense" else change_text(row)
                for row in found
            ]
            lines.append(f"| {label_of(key)} | " + " | ".join(cells) + " |")
        lines.append("")
    return "\n".join(lines).rstrip("\n")


def ratios(rows: list[Row]) -> dict[tuple[Key, int], float]:
    """How many times as fast as dense attention each mode's attention is, by mode and length."""
    speed = {(key_of(row), row["n"]): row["tokens_per_s"] for row in rows if row["part"] == "speed"}
    dense = {length: value for ((pattern, *_), length), value in speed.items() if pattern == "dense"}
    return {(key, n): value / dense[n] for (key, n), value in speed.items() if key[0] != "dense" and n in dense}


def speed_table(rows: list[Row]) -> str:
    """Attention alone: million tokens a second of dense, and how many times as many the others."""
    measured = [row for row in rows if row["part"] == "speed"]
    if not measured:
        return "Not measured yet."
    lengths = sorted({row["n"] for row in measured})
    lines = ["| attention alone, n | " + " | ".join(map(str, lengths)) + " |", "|---|" + "---|" * len(lengths)]
    dense = {row["n"]: row["tokens_per_s"] for row in measured if row["pattern"] == "dense"}
    cells = [f"{dense[n] / 1e6:.1f}" if n in dense else "" for n in lengths]
    lines.append("| dense, million tokens a second | " + " | ".join(cells) + " |")
    faster = ratios(rows)
    for key in dict.fromkeys(key for key, _ in faster):
        cells = [f"{faster[key, n]:.2f}x" if (key, n) in faster else "" for n in lengths]
        lines.append(f"| {label_of(key)} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _style(key: Key) -> dict[str, Any]:
    pattern, grouping, rest, _ = key
    return {
        "color": COLOURS.get(pattern, "#1b1c1e"),
        "linestyle": "-" if rest == "mean" else "--",
        "marker": "o" if grouping == "interleaved" else "s",
        "markerfacecolor": COLOURS.get(pattern) if rest == "mean" else "white",
        "markersize": 5,
        "linewidth": 1.3,
    }


def _percent_axis(axis: Any) -> None:
    """Even steps up to 1 %, then by factors: interleaved losses are tenths of a per cent, consecutive ones several."""
    axis.set_yscale("symlog", linthresh=1.0, linscale=1.5)
    ticks = [0.0, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0]
    axis.set_yticks(ticks, [f"{tick:g}" for tick in ticks], minor=False)
    axis.minorticks_off()
    axis.axhline(0.0, color="#1b1c1e", linewidth=0.8)
    axis.grid(alpha=0.25)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)


def draw_context(rows: list[Row], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = [row for row in rows if row["part"] == "perplexity" and row["pattern"] != "dense"]
    figure, axes = plt.subplots(1, len(TEXTS), figsize=(9.6, 4.2), sharey=True)
    for axis, (text, title) in zip(axes, TEXTS.items(), strict=True):
        for key in modes_of(rows):
            here = sorted((row for row in rows if row["text"] == text and key_of(row) == key), key=lambda row: row["n"])
            errors = [row["two_se_percent"] or 0.0 for row in here]
            axis.errorbar(
                [row["n"] for row in here], [row["change_percent"] for row in here], errors, label=label_of(key),
                elinewidth=0.8, capsize=2, **_style(key),
            )  # fmt: skip
        lengths = sorted({row["n"] for row in rows})
        axis.set_xscale("log", base=2)
        axis.set_xticks(lengths, [str(length) for length in lengths])
        axis.minorticks_off()
        _percent_axis(axis)
        axis.set_title(title, loc="left", fontsize=10)
        axis.set_xlabel("tokens of context")
    axes[0].set_ylabel("perplexity above dense, %")
    _finish(figure, axes[0], path)
    plt.close(figure)


def draw_speed(rows: list[Row], path: Path) -> None:
    """One line a mode, one point a length: the larger, the longer."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    faster = ratios(rows)
    losses = [row for row in rows if row["part"] == "perplexity" and (key_of(row), row["n"]) in faster]
    figure, axes = plt.subplots(1, len(TEXTS), figsize=(9.6, 4.2), sharey=True)
    for axis, (text, title) in zip(axes, TEXTS.items(), strict=True):
        for key in modes_of(losses):
            here = sorted(
                (row for row in losses if row["text"] == text and key_of(row) == key), key=lambda row: row["n"]
            )
            places = [faster[key, row["n"]] for row in here]
            style = _style(key)
            axis.plot(places, [row["change_percent"] for row in here], label=label_of(key), **style)
            for place, row in zip(places, here, strict=True):
                axis.annotate(
                    str(row["n"]), (place, row["change_percent"]), xytext=(3, 3), textcoords="offset points",
                    fontsize=6.5, color=style["color"],
                )  # fmt: skip
        axis.axvline(1.0, color="#1b1c1e", linewidth=0.8)
        _percent_axis(axis)
        axis.set_title(f"{title} (numbers: tokens of context)", loc="left", fontsize=10)
        axis.set_xlabel("speed of attention over dense (cuDNN)")
    axes[0].set_ylabel("perplexity above dense, %")
    _finish(figure, axes[0], path)
    plt.close(figure)


def _finish(figure: Any, axis: Any, path: Path) -> None:
    handles, labels = axis.get_legend_handles_labels()
    figure.legend(handles, labels, loc="upper center", ncols=4, frameon=False, fontsize=7.5)
    figure.tight_layout(rect=(0, 0, 1, 0.88))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--out", type=Path, default=HERE.parent.parent / "docs" / "images")
    options = parser.parse_args(arguments)
    rows = read_rows(options.results)
    if not rows:
        print(f"error: no results in {options.results}: run gpu_perplexity.py measure first", file=sys.stderr)
        return 1
    for draw, name in ((draw_context, "quality_context.png"), (draw_speed, "quality_speed.png")):
        draw(rows, options.out / name)
        print(options.out / name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
