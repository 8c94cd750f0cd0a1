"""Loss curves and what fine-tuning ends at: the picture and the table of docs/quality.md, from the results alone.

python experiments/finetune/finetune_figures.py            # docs/images/finetune.png
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results" / "finetune.json"
PICTURE = HERE.parent.parent / "docs" / "images" / "finetune.png"
LABELS = {"sdpa": "dense (PyTorch's)", "dspattn_2_4": "2:4 interleaved", "dspattn_1_2": "1:2 interleaved"}
COLOURS = {"sdpa": "black", "dspattn_2_4": "#1f66c1", "dspattn_1_2": "#c2502e"}
MINUS = "\N{MINUS SIGN}"


def read() -> dict[str, Any] | None:
    return json.loads(RESULTS.read_text()) if RESULTS.is_file() else None


def by_attention(rows: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    names = dict.fromkeys(row["attention"] for row in rows)
    return {name: [row for row in rows if row["attention"] == name] for name in names}


def table() -> str:
    """A line for each attention, its seeds side by side."""
    content = read()
    if content is None:
        return "Not measured yet: `experiments/finetune/run.py measure` on a GPU, then `finetune_figures.py`."
    lines = [
        "| | perplexity before | after, each seed | against dense, each seed, % | speed of a step over dense |",
        "|---|---|---|---|---|",
    ]
    for name, rows in by_attention(content["rows"]).items():
        before = statistics.fmean(row["perplexity_before"] for row in rows)
        after = ", ".join(f"{row['perplexity']:.3f}" for row in rows)
        changes = ", ".join(f"{row['change_percent']:+.2f}".replace("-", MINUS) for row in rows)
        speed = f"{statistics.median(row['speed_over_sdpa'] for row in rows):.3f}"
        own = ("", "") if name == "sdpa" else (changes, speed)
        lines.append(f"| {LABELS[name]} | {before:.2f} | {after} | " + " | ".join(own) + " |")
    training = content["training"]
    seconds = statistics.median(row["seconds_per_step"] for row in content["rows"] if row["attention"] == "sdpa")
    tokens = training["batch"] * training["length"]
    lines += [
        "",
        f"{training['steps']} steps of {training['batch']} windows of {training['length']} tokens, AdamW, highest rate "
        f"{training['rate']:g}; dense {1e3 * seconds:.0f} ms a step, {tokens / seconds / 1e3:.0f} thousand "
        f"tokens a second ({content['device']['name']}, revision {content['commit'][:12]}).",
    ]
    return "\n".join(lines)


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """The mean loss of the seeds, smoothed over ten steps, over the single runs in pale; beside it the difference."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    means: dict[str, list[float]] = {}
    for name, runs in by_attention(rows).items():
        means[name] = [statistics.fmean(step) for step in zip(*(run["losses"] for run in runs), strict=True)]
        for run in runs:
            left.plot(run["losses"], color=COLOURS[name], alpha=0.15, lw=0.7)
        width = max(1, min(10, len(means[name]) // 4))
        smooth = [statistics.fmean(means[name][i : i + width]) for i in range(len(means[name]) - width + 1)]
        left.plot(range(width - 1, len(means[name])), smooth, color=COLOURS[name], label=LABELS[name])
        if name != "sdpa":
            apart = [own - dense for own, dense in zip(means[name], means["sdpa"], strict=True)]
            right.plot(apart, color=COLOURS[name], label=LABELS[name])
    left.set(xlabel="step", ylabel="training loss")
    right.axhline(0, color="black", lw=0.8)
    right.set(xlabel="step", ylabel="loss above dense attention's, same text")
    for axes in (left, right):
        axes.legend(frameon=False)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main() -> int:
    content = read()
    if content is None:
        print(f"error: {RESULTS} does not exist: run experiments/finetune/run.py measure first", file=sys.stderr)
        return 2
    draw(content["rows"], PICTURE)
    print(PICTURE)
    return 0


if __name__ == "__main__":
    sys.exit(main())
