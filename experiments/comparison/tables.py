"""Writes the tables of docs/comparison.md, docs/zoo.md and docs/log/comparison.md from the zoo itself and from the
committed results, between their markers.

python experiments/comparison/tables.py            # rewrite
python experiments/comparison/tables.py --check    # exit 1 when a table is not what the zoo and the results say
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
DOCS = ROOT / "docs"
sys.path.insert(0, str(ROOT))

from bench.common import pages  # noqa: E402
from dspattn import zoo  # noqa: E402

WRITER = "experiments/comparison/tables.py"
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


def results_of(figure: str) -> list[tuple[str, dict[str, Any]]]:
    """(machine, content) of a figure's files, a GPU's first."""
    found = [(path.stem.split("_", 1)[1], json.loads(path.read_text())) for path in RESULTS.glob(f"{figure}_*.json")]
    return sorted(found, key=lambda pair: ("sm_clock_mhz" not in pair[1]["device"], pair[0]))


def on_gpu(figure: str) -> tuple[str, dict[str, Any]] | None:
    return next(
        ((machine, content) for machine, content in results_of(figure) if machine != "aarch64" and machine != "x86_64"),
        None,
    )


def _source(content: dict[str, Any]) -> str:
    return f"{content['device']['name']}, revision {content['commit']}, `{content['command']}`"


def _with_model_ratios(rows: Rows) -> Rows:
    """Rows of the model figure with the unfused model's and cuDNN's times and memory beside them."""
    for row in rows:
        same = {key: row[key] for key in ("dtype", "heads", "feed_forward", "n_k")}
        row["ratio"], row["less"] = {}, {}
        for peer, label in (("full", "unfused"), ("cudnn", "cudnn"), ("sdpa", "sdpa")):
            for twin in of(rows, kernel=peer, **same):
                if row["median_us"] and twin["median_us"]:
                    row["ratio"][label] = twin["median_us"] / row["median_us"]
                    row["less"][label] = twin["peak_bytes"] / row["peak_bytes"]
    return rows


# ---- short tables, of the page


def _grid(title: str, columns: list[Any], lines: list[tuple[str, list[str]]]) -> list[str]:
    made = [f"| {title} | " + " | ".join(map(str, columns)) + " |", "|---|" + "---|" * len(columns)]
    return made + [f"| {label} | " + " | ".join(cells) + " |" for label, cells in lines]


def _number(value: float | None) -> str:
    if value is None:
        return DASH
    return f"{value:.2f}" if value < 20 else f"{value:.0f}"


def _short_latency(rows: Rows) -> list[str]:
    lengths = sorted({row["n_k"] for row in rows})
    lines = []
    for dtype, name in (
        (d, k) for d in dict.fromkeys(r["dtype"] for r in rows) for k in ("cudnn", "pipeline", "fused")
    ):
        by_n = {row["n_k"]: row["ratio"].get("unfused") for row in of(rows, dtype=dtype, kernel=name)}
        label = {"cudnn": "PyTorch's fused" if dtype == "fp32" else "cuDNN"}.get(name, name)
        lines.append((f"{label}, {dtype}", [_number(by_n.get(n)) for n in lengths]))
    return _grid("speed over unfused, n", lengths, lines)


def crossing(slow: dict[int, float], fast: dict[int, float]) -> str:
    """From which length on ``fast`` is the faster of two, by lines between the measured points on logarithmic scales;
    both as {length: microseconds}."""
    lengths = sorted(set(slow) & set(fast))
    behind = [n for n in lengths if fast[n] > slow[n]]
    if not lengths or (behind and behind[-1] == lengths[-1]):
        return f"not up to {lengths[-1]:,}" if lengths else DASH
    if not behind:
        return f"below {lengths[0]:,}"
    before, after = behind[-1], lengths[lengths.index(behind[-1]) + 1]
    gap, then = (math.log(fast[n] / slow[n]) for n in (before, after))
    found = before * (after / before) ** (gap / (gap - then))
    return f"{round(found, -2):,.0f}"


def _crossings(rows: Rows) -> list[str]:
    names = [name for name in dict.fromkeys(row["kernel"] for row in rows) if of(rows, kernel=name)[0]["kind"] == "zoo"]
    names += sorted({r["kernel"].split(" + ")[0] + " + N:M" for r in rows if r["kind"] == "combined"})
    dtypes = list(dict.fromkeys(row["dtype"] for row in rows))
    lines = []
    for name in names:
        cells = []
        for dtype in dtypes:
            mine = [
                r for r in of(rows, dtype=dtype)
                if r["kernel"] == name or (name.endswith(" + N:M") and r["kernel"].startswith(name[:-3]))
            ]  # fmt: skip
            times = [{r["n_k"]: r["median_us"] for r in found if r["median_us"]}
                     for found in (of(rows, dtype=dtype, kernel="fused"), mine)]  # fmt: skip
            cells.append(crossing(*times))
        lines.append((f"{name}", cells))
    return _grid("faster than the fused kernel from n =", dtypes, lines)


def _short_overhead(rows: Rows) -> list[str]:
    lengths = sorted({row["n_k"] for row in rows})
    lines = []
    for dtype in dict.fromkeys(row["dtype"] for row in rows):
        for name in dict.fromkeys(row["kernel"] for row in of(rows, dtype=dtype)):
            by_n = {row["n_k"]: row for row in of(rows, dtype=dtype, kernel=name)}
            ratios = [(by_n.get(n) or {}).get("ratio", {}).get("product") for n in lengths]
            if name != "product":
                lines.append((f"{name}, {dtype}", [_number(1 / ratio) if ratio else DASH for ratio in ratios]))
    return _grid("time over the product alone, n", lengths, lines)


def _short_density(rows: Rows) -> list[str]:
    shares = sorted({row["density"] for row in rows if row["density"]})
    lines = []
    for dtype in dict.fromkeys(row["dtype"] for row in rows):
        for name in ("fixed", "top_k"):
            by_share = {row["density"]: row["ratio"].get("unfused") for row in of(rows, dtype=dtype, kernel=name)}
            lines.append((f"{name}, {dtype}", [_number(by_share.get(share)) for share in shares]))
    peers = [
        f"{row['kernel']} {row['dtype']} {row['ratio']['unfused']:.2f}"
        for row in rows
        if row["kernel"] in ("pipeline", "fused") and row["ratio"].get("unfused")
    ]
    made = _grid("speed over unfused, density", [f"{share:.2f}" for share in shares], lines)
    return [*made, "", f"n = {rows[0]['n_k']}; beside them {', '.join(peers)}."]


def _short_model(rows: Rows) -> list[str]:
    rows = [row for row in _with_model_ratios(rows) if row["median_us"]]
    lengths = sorted({row["n_k"] for row in rows})
    lines = []
    for dtype, heads, width in dict.fromkeys((r["dtype"], r["heads"], r["feed_forward"]) for r in rows):
        by_n = {r["n_k"]: r for r in of(rows, kernel="fused", dtype=dtype, heads=heads, feed_forward=width)}
        cells = [_number((by_n.get(n) or {}).get("ratio", {}).get("cudnn")) for n in lengths]
        if any(cell != DASH for cell in cells):
            lines.append((f"{dtype}, {heads} heads, feed-forward {width}", cells))
    made = _grid("model with the fused kernel over the same with PyTorch's, n", lengths, lines)
    for name in ("pipeline", "fused"):
        speeds = [row["ratio"]["unfused"] for row in of(rows, kernel=name) if "unfused" in row["ratio"]]
        memory = [row["less"]["unfused"] for row in of(rows, kernel=name) if "unfused" in row["less"]]
        if speeds:
            made += ["", f"Over the unfused model the {name} one is {min(speeds):.2f} to {max(speeds):.2f} times as "
                     f"fast, its peak memory {min(memory):.2f} to {max(memory):.2f} times smaller."]  # fmt: skip
    return made


def _short_memory(rows: Rows) -> list[str]:
    lengths = sorted({row["n_k"] for row in rows})
    lines = []
    for name in ("full", "cudnn", "sdpa", "pipeline", "fused"):
        by_n = {row["n_k"]: row for row in of(rows, kernel=name)}
        if by_n:
            lines.append((name, [_mebibytes(by_n[n]) if n in by_n else DASH for n in lengths]))
    return _grid("MiB beyond the inputs, n", lengths, lines)


SHORT: dict[str, Callable[[Rows], list[str]]] = {
    "latency": _short_latency, "crossings": _crossings, "overhead": _short_overhead, "density": _short_density,
    "model": _short_model, "memory": _short_memory,
}  # fmt: skip


def short_text(block: str) -> Callable[[], str]:
    def make() -> str:
        figure = "latency" if block == "crossings" else block
        found = on_gpu(figure)
        if found is None:
            return (f"**Not measured on a GPU yet**: `python experiments/comparison/run.py {figure}` there, then "
                    "`plot.py` and `tables.py`.")  # fmt: skip
        machine, content = found
        picture = [] if block == "crossings" else [f"![{figure}](images/comparison/{figure}_{machine}.png)", ""]
        return "\n".join([*picture, *SHORT[block](content["rows"])])

    return make


# ---- everything, of the log


def _length_table(rows: Rows, cell: Callable[[dict[str, Any]], str]) -> list[str]:
    lengths = sorted({row["n_k"] for row in rows})
    lines = []
    for name in dict.fromkeys(row["kernel"] for row in rows):
        lines.append((name, [cell(found[0]) if (found := of(rows, kernel=name, n_k=n)) else DASH for n in lengths]))
    return _grid("", lengths, lines)


def _speed(row: dict[str, Any]) -> str:
    ratio = (row.get("ratio") or {}).get("unfused") or (row.get("ratio") or {}).get("product")
    return f"{ratio:.2f}" if ratio else "cannot"


def _mebibytes(row: dict[str, Any]) -> str:
    return f"{row['peak_bytes'] / 2**20:,.1f}" if row.get("peak_bytes") else "cannot"


def _text(figure: str, content: dict[str, Any]) -> list[str]:
    rows = content["rows"] if figure != "model" else _with_model_ratios(content["rows"])
    lines = [f"{_source(content)}.", ""]
    for dtype in dict.fromkeys(row["dtype"] for row in rows):
        mine = of(rows, dtype=dtype)
        if figure == "memory":
            lines += [
                f"MiB beyond the inputs, {dtype}, batch {mine[0]['batch']}:",
                "",
                *_length_table(mine, _mebibytes),
            ]
        elif figure in ("latency", "overhead"):
            over = "unfused full attention" if figure == "latency" else "the product alone"
            lines += [f"Speed over {over}, {dtype}:", "", *_length_table(mine, _speed)]
        elif figure == "density":
            lines += [f"Speed over unfused full attention, {dtype}, n = {mine[0]['n_k']}:", ""]
            lines += ["| | density | speed |", "|---|---|---|"]
            lines += [f"| {row['kernel']} | {row['density'] or ''} | {_speed(row)} |" for row in mine]
        else:
            for heads, width in dict.fromkeys((row["heads"], row["feed_forward"]) for row in mine):
                case = of(mine, heads=heads, feed_forward=width)
                lines += [f"Speed over the unfused model, {dtype}, {heads} heads, feed-forward {width}:", ""]
                lines += [*_length_table(case, _speed), ""]
        lines.append("")
    left = content.get("left_out")
    if left:
        lines += [f"Not measured for want of time: {len(left)} cases, named in the JSON.", ""]
    return lines


def figure_text(figure: str) -> Callable[[], str]:
    def make() -> str:
        lines: list[str] = []
        for _, content in results_of(figure):
            lines += _text(figure, content)
        return "\n".join(lines).rstrip("\n") or "Not measured yet."

    return make


FIGURES = ("latency", "overhead", "density", "model", "memory")
PAGES: dict[str, dict[str, Callable[[], str]]] = {
    "comparison.md": {block: short_text(block) for block in SHORT},
    "zoo.md": {"zoo": zoo_table},
    "log/comparison.md": {"kernels": kernels_table, **{figure: figure_text(figure) for figure in FIGURES}},
}


def rewritten(page: str, text: str) -> str:
    """A page with everything between its markers made anew."""
    return str(pages.rewritten(text, WRITER, PAGES[page]))


def main(arguments: list[str] | None = None) -> int:
    named = {f"docs/{page}": tables for page, tables in PAGES.items()}
    return int(pages.main(arguments, WRITER, __doc__, named))


if __name__ == "__main__":
    sys.exit(main())
