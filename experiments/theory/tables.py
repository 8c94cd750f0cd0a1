"""Writes the tables of docs/theory.md and docs/theory_models.md, and what docs/log/comparison.md says the pipeline's
ratios are made of, from the committed results, between their markers.

python -m experiments.theory.tables            # rewrite
python -m experiments.theory.tables --check    # exit 1 when a table is not what the results say
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from bench.common import pages
from experiments.theory.search import disorder, inversions

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
RESULTS = HERE / "results"
PIPELINE = ROOT / "bench" / "results" / "pipeline_h200.json"
PATTERNS = ("1:2", "2:4", "1:4", "4:8")
MODELS = {"MiniLM": "maps_minilm.json", "SmolLM2-135M": "maps_smollm2.json"}
MINUS, SIGMA = "\N{MINUS SIGN}", "\N{GREEK SMALL LETTER SIGMA}"
NOTICEABLE = 0.01  # relative difference of perplexity, absolute one of Spearman's correlation

Rows = list[dict[str, Any]]


def read(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text())
    return content


def of(rows: Rows, **wanted: Any) -> Rows:
    return [row for row in rows if all(row.get(key) == value for key, value in wanted.items())]


def quality_table() -> str:
    rows = of(read(RESULTS / "theory.json")["rows"], set="page")
    columns = [("1:2", 0.5), ("2:4", 0.5), ("4:8", 0.5), ("1:4", 0.25), ("top-k", 0.5), ("top-k", 0.02)]
    names = [f"top-k {density:.0%}".replace("%", " %") if rule == "top-k" else rule for rule, density in columns]
    lines = [f"| p{SIGMA} | " + " | ".join(names) + " |", "|---|" + "---|" * len(names)]
    for p in (1.0, 2.0, 4.0):
        cells = [of(rows, rule=rule, density=density, p=p)[0]["long_rows"] for rule, density in columns]
        lines.append(f"| {p:g} | " + " | ".join(f"{cell:.4f}" for cell in cells) + " |")
    return "\n".join(lines)


def overtakes() -> str:
    rows = read(RESULTS / "theory.json")["rows"]

    def value(keys: int, quantity: str) -> float:
        return float(of(rows, set=f"overtakes {keys}", quantity=quantity)[0]["ours"])

    limit = value(1024, "p sigma where top-k overtakes 1:2")
    found = {keys: value(keys, "it overtakes, rows of --keys") for keys in (384, 1024, 4096)}
    return (
        "The paper's comparison gets *better* for N:M by this: at equal speed (top-k at 2.02 %, below), top-k "
        f"overtakes 1:2 at\np{SIGMA} = {limit:.1f} in the limit, but at p{SIGMA} ≈ {found[384]:.1f} for rows of 384 "
        f"keys, {found[1024]:.1f} for 1024 and {found[4096]:.1f} for 4096."
    )


def heads_table() -> str:
    predictions = read(RESULTS / "prediction.json")["rows"]
    lines = [
        f"| lost weight 1 {MINUS} Q¹, mean over heads | consecutive, model | measured | interleaved, model | measured "
        "| independent model |",
        "|---|---|---|---|---|---|",
    ]
    for model, file in MODELS.items():
        maps = read(RESULTS / file)
        first = maps["powers"].index(1.0)
        predicted = of(predictions, model=model)
        for pattern in PATTERNS:
            cells = []
            for grouping in ("consecutive", "interleaved"):
                name = f"{pattern} {grouping}"
                cells.append(1 - float(np.mean([row["predicted"][name] for row in predicted])))
                cells.append(1 - float(np.mean([row["quality"][name][first] for row in maps["rows"]])))
            cells.append(1 - float(np.mean([row["independent"][pattern] for row in predicted])))
            lines.append(f"| {model}, {pattern} | " + " | ".join(f"{cell:.3f}" for cell in cells) + " |")
    return "\n".join(lines)


def task_table() -> str:
    tasks = read(RESULTS / "tasks.json")
    rows = of(tasks["rows"], model="SmolLM2-135M")
    first = tasks["powers"].index(1.0)
    dense = of(rows, rule="dense")[0]["value"]
    names = {"dense": "dense"}
    for pattern in PATTERNS:
        names[f"{pattern} consecutive"] = f"{pattern} consecutive"
        names[f"{pattern} row"] = f"{pattern} spread over the row"
        names[f"{pattern} interleaved"] = f"{pattern} interleaved"
    names |= {"topk 0.25": "top-k 25 %", "topk 0.5": "top-k 50 %"}
    lines = [f"| | density of a row | lost weight 1 {MINUS} Q¹ | perplexity | against dense |", "|---|---|---|---|---|"]
    for rule, label in names.items():
        for row in of(rows, rule=rule):
            lines.append(
                f"| {label} | {row['measured_density']:.2f} | {1 - row['quality'][first]:.4f} | {row['value']:.2f} | "
                f"{100 * (row['value'] / dense - 1):+.1f} % |"
            )
    return "\n".join(lines)


def line_table() -> str:
    """How well each measure orders the rules, on the same points for every measure."""
    tasks = read(RESULTS / "tasks.json")
    lines = [
        "| | measure | unexplained, top-k and fixed | all rules | all but the worst | pairs in wrong order "
        "| by more than 1 % |",
        "|---|---|---|---|---|---|---|",
    ]
    for model in ("SmolLM2-135M", "MiniLM"):
        rows = [row for row in of(tasks["rows"], model=model) if row["family"] != "dense" and " row" not in row["rule"]]
        values = np.array([row["value"] for row in rows])
        goodness = -np.log(values) if rows[0]["metric"] == "perplexity" else values
        anchor = np.array([row["family"] != "nm" for row in rows])
        better = goodness >= np.sort(goodness)[len(goodness) - 13]  # the thirteen best of twenty
        quality = np.array([row["quality"] for row in rows])
        curve = [disorder(quality[anchor, i], goodness[anchor]) for i in range(quality.shape[1])]
        best = int(np.flatnonzero(np.array(curve) <= min(curve) + 1e-12)[0])
        measures = {f"Qᵖ, p = {tasks['powers'][best]:g} (found)": quality[:, best]}
        for power in (1.0, 6.5):
            measures[f"Qᵖ, p = {power:g}"] = quality[:, tasks["powers"].index(power)]
        measures["norm kept"] = np.array([row["frobenius"] for row in rows])
        for number, (name, measure) in enumerate(measures.items()):
            wrong = [
                abs(goodness[i] - goodness[j])
                for i in range(len(rows))
                for j in range(i)
                if (measure[i] - measure[j]) * (goodness[i] - goodness[j]) < 0
            ]
            assert len(wrong) == inversions(measure, goodness)
            shares = (
                disorder(measure[anchor], goodness[anchor]),
                disorder(measure, goodness),
                disorder(measure[better], goodness[better]),
            )
            pairs = len(rows) * (len(rows) - 1) // 2
            lines.append(
                f"| {model if number == 0 else ''} | {name} | "
                + " | ".join(f"{100 * share:.1f} %" for share in shares)
                + f" | {len(wrong)} of {pairs} | {sum(w > NOTICEABLE for w in wrong)} |"
            )
    return "\n".join(lines)


def pipeline_parts() -> str:
    """Which part of the pipeline's ratios is the peer's: softmax in place, and how the peer's softmax is written."""
    rows = read(PIPELINE)["rows"]
    memory = next(row for row in rows if "memory_ratio" in row)
    matrix = memory["batch"] * memory["heads"] * memory["n_q"] * memory["n_k"] * 2
    ours, theirs = memory["peak_bytes"], memory["peers"]["unfused"]["peak_bytes"]
    lines = [
        "Two of the ratios in [pipeline.md](../pipeline.md) owe much to the peer. *Memory*: PyTorch's softmax writes a "
        "second matrix, so the unfused "
        f"pipeline\nholds {theirs / matrix:.0f} matrices of {matrix / 2**30:.0f} GiB, and ours {ours / matrix:.2f} of "
        f"one. The ratio {ours / theirs:.2f} is a factor {theirs / matrix:.0f} from the softmax in place and a\nfactor "
        f"{matrix / ours:.2f} from the pruning; beside an unfused pipeline with a softmax in place it would be "
        f"{ours / matrix:.2f}. *Time*: PyTorch's\nsoftmax reads long rows more than once. Were it to read and write "
        "each score once, at the rate of ours, the ratios would be\nthose of the last column but one; what is above "
        "them is that softmax, not the pruning:",
        "",
        "| | n | unfused, µs | its softmax, µs | at our rate, µs | together, over that | together, measured |",
        "|---|---|---|---|---|---|---|",
    ]
    for dtype, pattern in (("bf16", "2:4"), ("fp32", "1:2")):
        for n in (256, 1024, 4096):
            chosen = {
                row["stage"]: row
                for row in of(rows, dtype=dtype, pattern=pattern, n_k=n, grouping="consecutive", mask="full")
                if row.get("median_us") and "unfused" in (row.get("peers") or {}) and "block" not in row
            }
            softmax, chain = chosen["softmax"], chosen["chain"]
            slow = softmax["peers"]["unfused"]["median_us"]
            fair = 2 * softmax["median_us"]  # twice the elements
            whole = chain["peers"]["unfused"]["median_us"]
            lines.append(
                f"| {dtype} {pattern} | {n} | {whole:.0f} | {slow:.0f} | {fair:.0f} | "
                f"{(whole - slow + fair) / chain['median_us']:.2f} | {whole / chain['median_us']:.2f} |"
            )
    return "\n".join(lines)


BLOCKS: dict[str, dict[str, Callable[[], str]]] = {
    "docs/theory.md": {
        "quality": quality_table,
        "overtakes": overtakes,
        "heads": heads_table,
    },
    "docs/theory_models.md": {"perplexity": task_table, "line": line_table},
    "docs/log/comparison.md": {"what the ratios are made of": pipeline_parts},
}


def main(arguments: list[str] | None = None) -> int:
    return int(pages.main(arguments, "experiments/theory/tables.py", __doc__, BLOCKS))


if __name__ == "__main__":
    sys.exit(main())
