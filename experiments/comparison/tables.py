"""Writes the tables of docs/comparison.md from the zoo itself and from the committed results, between their markers.

python experiments/comparison/tables.py            # rewrite
python experiments/comparison/tables.py --check    # exit 1 when a table is not what the zoo and the results say
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dspattn import zoo

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
PAGE = ROOT / "docs" / "comparison.md"
BENCH = ROOT / "bench" / "results"
RESULTS = HERE / "results"
DASH = "\N{EN DASH}"
LENGTHS = (256, 384, 512, 1024, 2048, 4096)

Rows = list[dict[str, Any]]


def read(path: Path) -> dict[str, Any] | None:
    return json.loads(path.read_text()) if path.is_file() else None


def of(rows: Rows, **wanted: Any) -> Rows:
    return [row for row in rows if all(row.get(key) == value for key, value in wanted.items())]


def zoo_table() -> str:
    lines = ["| name | multiply-adds | memory | masks | defaults |", "|---|---|---|---|---|"]
    for name, kind in zoo.MECHANISMS.items():
        masks = ", ".join(sorted(kind.masks)) + (f"; no use for {', '.join(kind.unused)}" if kind.unused else "")
        lines.append(f"| `{name}` | {kind.cost} | {kind.memory} | {masks} | {kind.defaults} |")
    return "\n".join(lines)


def _ratio(rows: Rows, peer: str) -> str:
    found = [row["ratio"][peer] for row in rows if (row.get("ratio") or {}).get(peer)]
    return f"{found[0]:.2f}" if found else DASH


def kernels_table() -> str:
    """What the kernels' own benchmarks say of the first figure: this package's kernels against dense attention."""
    pipeline = (read(BENCH / "pipeline_h200.json") or {"rows": []})["rows"]
    forward = (read(BENCH / "forward_h200.json") or {"rows": []})["rows"]
    fp32 = (read(BENCH / "fp32_h200.json") or {"rows": []})["rows"]
    chain = [row for row in pipeline if row.get("stage") == "chain" and row.get("median_us")]
    plain = {"d": 64, "mask": "full", "pass": "forward"}
    cases: list[tuple[str, Callable[[int], Rows], str]] = [
        (
            "pipeline, bf16 2:4, over unfused",
            lambda n: of(chain, dtype="bf16", pattern="2:4", n_k=n, **plain),
            "unfused",
        ),
        (
            "pipeline, fp32 1:2, over unfused",
            lambda n: of(chain, dtype="fp32", pattern="1:2", n_k=n, **plain),
            "unfused",
        ),
        (
            "fused, bf16 2:4, over unfused",
            lambda n: of(forward, dtype="bf16", pattern="2:4", n_k=n, **plain),
            "unfused",
        ),
        ("fused, bf16 2:4, over cuDNN", lambda n: of(forward, dtype="bf16", pattern="2:4", n_k=n, **plain), "cudnn"),
        ("fused, fp32 1:2, over unfused", lambda n: of(fp32, dtype="fp32", pattern="1:2", n_k=n, **plain), "unfused"),
        ("fused, fp32 1:2, over PyTorch's fused", lambda n: of(fp32, pattern="1:2", n_k=n, **plain), "efficient"),
    ]
    lines = ["| n | " + " | ".join(map(str, LENGTHS)) + " |", "|---|" + "---|" * len(LENGTHS)]
    for label, rows, peer in cases:
        lines.append(f"| {label} | " + " | ".join(_ratio(rows(n), peer) for n in LENGTHS) + " |")
    return "\n".join(lines)


def _results(figure: str) -> list[tuple[str, dict[str, Any]]]:
    """(machine, content) of a figure's files, a GPU's first."""
    found = [(path.stem.split("_", 1)[1], json.loads(path.read_text())) for path in RESULTS.glob(f"{figure}_*.json")]
    return sorted(found, key=lambda pair: ("sm_clock_mhz" not in pair[1]["device"], pair[0]))


def _length_table(rows: Rows, cell: Callable[[dict[str, Any]], str]) -> list[str]:
    lengths = sorted({row["n_k"] for row in rows})
    lines = ["| | " + " | ".join(map(str, lengths)) + " |", "|---|" + "---|" * len(lengths)]
    for name in dict.fromkeys(row["kernel"] for row in rows):
        cells = [cell(found[0]) if (found := of(rows, kernel=name, n_k=n)) else DASH for n in lengths]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return lines


def _speed(row: dict[str, Any]) -> str:
    ratio = (row.get("ratio") or {}).get("unfused") or (row.get("ratio") or {}).get("product")
    return f"{ratio:.2f}" if ratio else "cannot"


def _mebibytes(row: dict[str, Any]) -> str:
    return f"{row['peak_bytes'] / 2**20:.1f}" if row.get("peak_bytes") else "cannot"


def _text(figure: str, machine: str, content: dict[str, Any]) -> list[str]:
    rows = content["rows"]
    head = f"{content['device']['name']}, revision {content['commit']}, `{content['command']}`"
    lines = [f"![{figure}](images/comparison/{figure}_{machine}.png)", ""]
    for dtype in dict.fromkeys(row["dtype"] for row in rows):
        mine = of(rows, dtype=dtype)
        if figure == "memory":
            lines += [f"MiB beyond the inputs, {dtype}, batch {mine[0]['batch']} ({head}):", ""]
            lines += _length_table(mine, _mebibytes)
        elif figure in ("latency", "overhead"):
            over = "unfused full attention" if figure == "latency" else "the product alone"
            lines += [f"Speed over {over}, {dtype} ({head}):", "", *_length_table(mine, _speed)]
        elif figure == "density":
            lines += [f"Speed over unfused full attention, {dtype}, n = {mine[0]['n_k']} ({head}):", ""]
            lines += ["| | density | speed |", "|---|---|---|"]
            lines += [f"| {row['kernel']} | {row['density'] or ''} | {_speed(row)} |" for row in mine]
        else:
            lines += [f"Time of the model over that of the unfused one, {dtype} ({head}):", ""]
            for heads, width in dict.fromkeys((row["heads"], row["feed_forward"]) for row in mine):
                case = of(mine, heads=heads, feed_forward=width)
                base = {row["n_k"]: row["median_us"] for row in of(case, kernel="full")}
                for row in case:
                    both = row["median_us"] and base.get(row["n_k"])
                    row["ratio"] = {"unfused": base[row["n_k"]] / row["median_us"]} if both else {}
                lines += [f"{heads} heads, feed-forward {width}:", "", *_length_table(case, _speed), ""]
        lines.append("")
    return lines


def figure_text(figure: str) -> Callable[[], str]:
    def make() -> str:
        found = _results(figure)
        lines: list[str] = []
        if not any("sm_clock_mhz" in content["device"] for _, content in found):
            lines += [f"**Not measured on a GPU yet**: `python experiments/comparison/run.py {figure}` there, then "
                      "`plot.py` and `tables.py`.", ""]  # fmt: skip
        for machine, content in found:
            lines += _text(figure, machine, content)
        return "\n".join(lines).rstrip("\n")

    return make


BLOCKS: dict[str, Callable[[], str]] = {
    "zoo": zoo_table,
    "kernels": kernels_table,
    **{figure: figure_text(figure) for figure in ("latency", "overhead", "density", "model", "memory")},
}


def rewritten(text: str) -> str:
    """The page with everything between its markers made anew."""
    for name, make in BLOCKS.items():
        pattern = rf"(<!-- {name}, written by experiments/comparison/tables.py -->\n).*?(<!-- end of {name} -->)"
        if not re.search(pattern, text, re.DOTALL):
            raise SystemExit(f"{PAGE.name} has no markers of {name!r}")
        content = make()
        text = re.sub(
            pattern, lambda match, content=content: match[1] + content + "\n" + match[2], text, flags=re.DOTALL
        )
    return text


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing")
    options = parser.parse_args(arguments)
    before = PAGE.read_text()
    after = rewritten(before)
    if after == before:
        return 0
    if options.check:
        print(f"{PAGE} is not what the zoo and the results say: run {Path(__file__).name}", file=sys.stderr)
        return 1
    PAGE.write_text(after)
    print(PAGE)
    return 0


if __name__ == "__main__":
    sys.exit(main())
