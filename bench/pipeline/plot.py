"""Draws the pipeline's pictures from bench/results/pipeline_h200.json.

python3 -m bench.pipeline.plot [--results bench/results/pipeline_h200.json] [--out docs/images]
"""

import argparse
import json
import pathlib

import matplotlib

matplotlib.use("svg")
matplotlib.rcParams["svg.hashsalt"] = "dspattn"  # the same data gives the same file
import matplotlib.pyplot as plt  # noqa: E402

STAGES = {"qk_prune": "qk_prune / bmm", "softmax": "softmax", "pv_sparse": "pv_sparse / bmm"}
COLOURS = {"qk_prune": "#4477aa", "softmax": "#ccbb44", "pv_sparse": "#aa3377", "chain": "#222222"}
CASES = (("bf16", "2:4"), ("fp32", "1:2"))


def select(rows, dtype, pattern, stage):
    """The rows of a series, by length."""
    return sorted(
        (
            row
            for row in rows
            if (row["dtype"], row["pattern"], row.get("stage"), row["mask"]) == (dtype, pattern, stage, "full")
            and "median_us" in row
        ),
        key=lambda row: row["n_k"],
    )


def draw_speedup(rows, path, device):
    """Speed over the unfused dense pipeline, per stage and together."""
    figure, axes = plt.subplots(1, len(CASES), figsize=(9, 3.6), sharey=True)
    for axis, (dtype, pattern) in zip(axes, CASES, strict=False):
        for stage in (*STAGES, "chain"):
            series = select(rows, dtype, pattern, stage)
            label = "together" if stage == "chain" else stage
            axis.plot(
                [str(row["n_k"]) for row in series],
                [row["ratio"]["unfused"] for row in series],
                marker="o", color=COLOURS[stage], linewidth=2.5 if stage == "chain" else 1.5, label=label,
            )  # fmt: skip
        axis.axhline(1, color="grey", linewidth=0.8)
        axis.set_title(f"{dtype}, {pattern}")
        axis.set_xlabel("sequence length")
        axis.set_ylim(bottom=0)
    axes[0].set_ylabel("speed over unfused dense")
    axes[0].legend(frameon=False)
    figure.suptitle(f"{device}, 4 heads, d = 64")
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def draw_breakdown(rows, path, device):
    """Time of each stage, dense beside sparse, the dense total of a length being 1."""
    figure, axes = plt.subplots(1, len(CASES), figsize=(9, 3.6), sharey=True)
    for axis, (dtype, pattern) in zip(axes, CASES, strict=False):
        series = {stage: select(rows, dtype, pattern, stage) for stage in STAGES}
        lengths = [row["n_k"] for row in series["softmax"]]
        for i in range(len(lengths)):
            total = sum(series[stage][i]["peers"]["unfused"]["median_us"] for stage in STAGES)
            for offset, ours in ((-0.2, False), (0.2, True)):
                bottom = 0.0
                for stage, label in STAGES.items():
                    row = series[stage][i]
                    height = (row["median_us"] if ours else row["peers"]["unfused"]["median_us"]) / total
                    axis.bar(
                        i + offset, height, 0.36, bottom=bottom, color=COLOURS[stage], alpha=1.0 if ours else 0.45,
                        label=label if i == 0 and ours else None,
                    )  # fmt: skip
                    bottom += height
        axis.set_xticks(range(len(lengths)), [str(n) for n in lengths])
        axis.set_title(f"{dtype}, {pattern}: dense (pale), pipeline (full)")
        axis.set_xlabel("sequence length")
    axes[0].set_ylabel("time, dense total = 1")
    axes[1].legend(frameon=False, loc="upper right")
    figure.suptitle(f"{device}, 4 heads, d = 64")
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", default="bench/results/pipeline_h200.json")
    parser.add_argument("--out", default="docs/images")
    arguments = parser.parse_args()
    with open(arguments.results, encoding="utf-8") as file:
        document = json.load(file)
    out = pathlib.Path(arguments.out)
    out.mkdir(parents=True, exist_ok=True)
    device = document["device"]["name"]
    draw_speedup(document["rows"], out / "pipeline_speedup.svg", device)
    draw_breakdown(document["rows"], out / "pipeline_breakdown.svg", device)


if __name__ == "__main__":
    main()
