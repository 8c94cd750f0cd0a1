"""Writes the tables of docs/quality.md, docs/log/quality.md and README.md from the committed results, between their
markers.

python experiments/quality/tables.py            # rewrite
python experiments/quality/tables.py --check    # exit 1 when a table is not what the results say
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
sys.path[:0] = [str(HERE), str(ROOT / "experiments" / "finetune")]

import finetune_figures  # noqa: E402
import gpu_figures  # noqa: E402

PATTERNS = ("4:8", "2:4", "1:2", "1:4")  # from the mildest to the harshest
GROUPINGS = ("interleaved", "consecutive")
MINUS = "\N{MINUS SIGN}"

Key = tuple[str, str, str, str]  # task, metric, pattern, grouping
Results = dict[Key, dict[str, Any]]

LINES = (
    ("wikitext2_512", "perplexity", "WikiText-2, context 512"),
    ("wikitext2_1024", "perplexity", "WikiText-2, context 1024"),
    ("wikitext2_2048", "perplexity", "WikiText-2, context 2048"),
    ("imdb_2048", "perplexity", "IMDB reviews, context 2048"),
    ("wikitext2_1024", "same_top_token", "same next token as dense, %, WikiText-2, context 1024"),
    ("squad_retrieval", "recall_at_1", "SQuAD retrieval, right passage first, %"),
    ("squad_retrieval", "mrr_x100", "SQuAD retrieval, mean reciprocal rank, %"),
    ("squad_retrieval", "cosine_to_dense", "SQuAD passages, cosine to the dense vector"),
    ("stsb", "spearman_x100", "STS-B, Spearman correlation, %"),
)
SHORT = {
    ("wikitext2_1024", "perplexity"): "SmolLM2-135M, WikiText-2, 1024 tokens: perplexity",
    ("imdb_2048", "perplexity"): "SmolLM2-135M, IMDB, 2048 tokens: perplexity",
    ("squad_retrieval", "recall_at_1"): "MiniLM, SQuAD passages: right one first, %",
    ("squad_retrieval", "cosine_to_dense"): "MiniLM, SQuAD passages: cosine to dense",
    ("stsb", "spearman_x100"): "MiniLM, STS-B sentences: Spearman, %",
}


def read_results(folder: Path) -> Results:
    results: Results = {}
    for path in sorted(folder.glob("*.json")):
        for row in json.loads(path.read_text())["rows"]:
            if row.get("rest") == "mean":
                continue
            results[row["task"], row["metric"], row["pattern"], row["grouping"]] = row
    return results


def number(row: dict[str, Any]) -> str:
    return f"{row['value']:.4f}" if row["metric"] == "cosine_to_dense" else f"{row['value']:.2f}"


def change(row: dict[str, Any]) -> str:
    """How far from dense, with the interval in the full table."""
    digits, unit = (1, " %") if row["metric"] == "perplexity" else (4 if row["metric"] == "cosine_to_dense" else 2, "")
    text = f"{row['change']:+.{digits}f}{unit}".replace("-", MINUS)
    return re.sub(rf"^[+{MINUS}](0\.?0*)( %)?$", r"±0\2", text)


def interval(row: dict[str, Any]) -> str:
    digits = 1 if row["metric"] == "perplexity" else 4 if row["metric"] == "cosine_to_dense" else 2
    return f"{row['change_low']:.{digits}f} … {row['change_high']:.{digits}f}".replace("-", MINUS)


def full_table(results: Results) -> str:
    lines = ["| | dense | groups | " + " | ".join(PATTERNS) + " |", "|---|---|---|" + "---|" * len(PATTERNS)]
    for task, metric, label in LINES:
        dense = results.get((task, metric, "dense", "none"))
        if dense is None:
            continue
        for grouping in GROUPINGS:
            cells = []
            for pattern in PATTERNS:
                row = results.get((task, metric, pattern, grouping))
                if row is None:
                    cells.append("not measured")
                elif metric in ("cosine_to_dense", "same_top_token"):
                    cells.append(number(row))  # the change says the same
                else:
                    cells.append(f"{number(row)} ({change(row)}; {interval(row)})")
            head = f"| {label} | {number(dense)} |" if grouping == GROUPINGS[0] else "| | |"
            lines.append(f"{head} {grouping} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def short_table(results: Results) -> str:
    columns = [(pattern, grouping) for pattern in ("2:4", "1:2") for grouping in GROUPINGS]
    names = [pattern if grouping == "interleaved" else f"{pattern} consecutive" for pattern, grouping in columns]
    lines = ["| | dense | " + " | ".join(names) + " |", "|---|---|" + "---|" * len(names)]
    for (task, metric), label in SHORT.items():
        rows = [results.get((task, metric, *column)) for column in columns]
        dense = results.get((task, metric, "dense", "none"))
        if dense is None or any(row is None for row in rows):
            continue
        cells = [
            number(row) + (f" ({change(row)})" if metric == "perplexity" else "") for row in rows if row is not None
        ]
        lines.append(f"| {label} | {number(dense)} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def rest_table(folder: Path) -> str:
    """What becomes of the pruned weight: dropped beside given to the mean of the values, on the same items."""
    rows = [row for path in sorted(folder.glob("*.json")) for row in json.loads(path.read_text())["rows"]]
    labels = {(task, metric): label for task, metric, label in LINES}
    lines = ["| | dense | mode | rest dropped | rest to the mean |", "|---|---|---|---|---|"]
    for task, metric in dict.fromkeys((row["task"], row["metric"]) for row in rows):
        mine = [row for row in rows if (row["task"], row["metric"]) == (task, metric)]
        by_mode = {(row["pattern"], row["grouping"], row["rest"]): row for row in mine}
        head = f"{labels[task, metric]} | {number(by_mode['dense', 'none', 'drop'])}"
        for pattern, grouping in dict.fromkeys(key[:2] for key in by_mode if key[0] != "dense"):
            cells = [by_mode[pattern, grouping, rest] for rest in ("drop", "mean")]
            texts = [number(row) + ("" if metric == "cosine_to_dense" else f" ({interval(row)})") for row in cells]
            lines.append(f"| {head} | {pattern} {grouping} | " + " | ".join(texts) + " |")
            head = " | "
    return "\n".join(lines)


def kept_share(keys: int, keep: int, group: int, stride: int) -> float:
    """Share of a row's keys that stay when members of a group are ``stride`` apart: 1 for neighbours."""
    kept, block = 0, group * stride
    for start in range(0, keys, block):
        present = min(block, keys - start)
        for first in range(min(stride, present)):
            kept += min(keep, len(range(first, present, stride)))
    return kept / keys


def kept_table() -> str:
    """How many scores stay, counted: interleaved groups of a block that a row has only begun are not full."""
    lines = ["| kept, % of the visible scores | groups | " + " | ".join(PATTERNS) + " |", "|---|---|" + "---|" * 4]
    causal = {f"causal, context {n}": range(1, n + 1) for n in (512, 1024, 2048)}
    for label, rows in {**causal, "a passage of 174 tokens": range(174, 175)}.items():
        for grouping in GROUPINGS:
            cells = []
            for pattern in PATTERNS:
                keep, group = map(int, pattern.split(":"))
                stride = 128 // group if grouping == "interleaved" else 1
                kept = sum(kept_share(keys, keep, group, stride) * keys for keys in rows)
                cells.append(f"{100 * kept / sum(rows):.1f}")
            lines.append(f"| {label if grouping == GROUPINGS[0] else ''} | {grouping} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def replaced(text: str, table: str, marker: str = "quality table") -> str | None:
    """``text`` with what is between its markers replaced; None when it has no markers."""
    pattern = rf"(<!-- {marker}[^>]*-->\n).*?(<!-- end of table -->)"
    if not re.search(pattern, text, re.DOTALL):
        return None
    return re.sub(pattern, lambda match: match[1] + table + "\n" + match[2], text, flags=re.DOTALL)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing")
    options = parser.parse_args(arguments)
    results = read_results(HERE / "results")
    on_a_gpu = gpu_figures.read_rows()
    default_groups = [row for row in on_a_gpu if row["grouping"] != "consecutive"]
    wrong = 0
    for path, table, marker in (
        (ROOT / "docs" / "quality.md", short_table(results), "quality table"),
        (ROOT / "docs" / "log" / "quality.md", rest_table(HERE / "results" / "rest"), "rest table"),
        (ROOT / "docs" / "quality.md", finetune_figures.table(), "finetune table"),
        (
            ROOT / "docs" / "quality.md",
            gpu_figures.losses_table(gpu_figures.read_rows(gpu_figures.SHARED)),
            "shared table",
        ),
        (ROOT / "docs" / "log" / "quality.md", full_table(results), "quality table"),
        (ROOT / "docs" / "log" / "quality.md", kept_table(), "kept scores"),
        (ROOT / "docs" / "quality.md", gpu_figures.losses_table(default_groups), "context table"),
        (ROOT / "docs" / "quality.md", gpu_figures.speed_table(default_groups), "speed table"),
        (ROOT / "docs" / "log" / "quality.md", gpu_figures.losses_table(on_a_gpu), "context table"),
        (ROOT / "docs" / "log" / "quality.md", gpu_figures.speed_table(on_a_gpu), "speed table"),
        (ROOT / "README.md", short_table(results), "quality table"),
    ):
        before = path.read_text(encoding="utf-8")
        after = replaced(before, table, marker)
        if after is None:
            print(f"error: {path} has no markers for {marker}", file=sys.stderr)
            return 2
        if after != before and options.check:
            print(f"{path} is not what the results say: run experiments/quality/tables.py", file=sys.stderr)
            wrong += 1
        elif after != before:
            path.write_text(after, encoding="utf-8")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
