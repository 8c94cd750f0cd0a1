"""Writes the tables of docs/log/forward.md, and README's summary of them, from bench/results/forward_h200.json and
packed_limits_h200.json, between their markers.

python3 -m bench.forward.tables            # rewrite
python3 -m bench.forward.tables --check    # exit 1 when the tables are not what the results say
"""

import sys
import textwrap

from bench.common import pages
from bench.forward import bars

SIGN = {"goal": " ✓", "floor": "", "BELOW": " ✗", "": ""}
TITLES = {
    "grouping": "consecutive groups",
    "fp16": "fp16",
    "d256": "head dim 256",
    "gqa": "32 heads sharing 8",
    "varlen": "packed, random lengths 128…4096",
    "mask": "mask",
}


def cell(row, peer="cudnn"):
    if row is None or peer not in row["ratio"]:
        return "-"
    return f"{row['tflops']:.0f} · {row['ratio'][peer]:.2f}x{SIGN[bars.verdict(row)]}"


def length_table(rows, mode):
    """A line per length and mask, a column per pattern and head dim."""
    found = {(r["n_q"], r["mask"], r["pattern"], r["d"]): r for r in rows if r["part"] == "table" and r["mode"] == mode}
    lengths = [n for n in bars.LENGTHS if any(key[0] == n for key in found)]
    lines = ["| n | " + " | ".join(f"{pattern}, d = {d}" for pattern, d in bars.CELLS) + " |"]
    lines.append("|---" * (len(bars.CELLS) + 1) + "|")
    for n in lengths:
        for mask in bars.MASKS:
            cells = [cell(found.get((n, mask, pattern, d))) for pattern, d in bars.CELLS]
            lines.append(f"| {n} {mask} | " + " | ".join(cells) + " |")
    return lines


def other_table(rows):
    lines = ["| what | n | d | pattern | TFLOP/s | beside | ratio | at least |", "|---|---|---|---|---|---|---|---|"]
    for row in rows:
        if row["part"] not in TITLES or row["mode"] != "burst" or not row["ratio"]:
            continue
        bar = bars.bar_of(row)
        beside = bar[0] if bar else next(iter(row["ratio"]))
        if beside == "best":
            beside = min(row["ratio"], key=row["ratio"].get)
        if beside not in row["ratio"]:
            continue
        what = TITLES[row["part"]] if row["part"] != "mask" else {"bool": "boolean mask", "bias": "bias"}[row["mask"]]
        what += ", causal" if row["mask"] == "causal" else ""
        lines.append(
            f"| {what} | {row['n_q']} | {row['d']} | {row['pattern']} | {row['tflops']:.0f} | {beside} "
            f"{row['peers'][beside]['tflops']:.0f} | {row['ratio'][beside]:.2f}{SIGN[bars.verdict(row)]} "
            f"| {bar[1] if bar else ''} |"
        )
    return lines if len(lines) > 2 else []


def tables(result):
    rows = [row for row in result["rows"] if not row.get("library")]
    for row in rows:  # files from before there were parts
        plain = row["dtype"] == "bf16" and row["grouping"] == "interleaved" and row["kv_heads"] == row["heads"]
        row.setdefault("part", "table" if plain else "")
    verdicts = [bars.verdict(row) for row in rows]
    commit = result["commit"][:10]
    lines = [
        f"Burst ({result['device']['name']}, torch {result['versions']['torch']}, cuDNN {result['versions']['cudnn']}, "
        f"commit {commit}): TFLOP/s and times faster than cuDNN in the same run; ✓ at or above the goal, ✗ below the "
        f"floor. Of all bars, {verdicts.count('goal')} are at the goal, {verdicts.count('floor')} between floor and "
        f"goal, {verdicts.count('BELOW')} below the floor.",
        "",
        *length_table(rows, "burst"),
        "",
        "Sustained, a second and more without a pause (✗: below 1.15 for 2:4, 1.25 for 1:2):",
        "",
        *length_table(rows, "sustained"),
    ]
    if others := other_table(rows):
        lines += ["", "The rest, bursts:", "", *others]
    memory = [row for row in rows if row["part"] == "memory"]
    if memory:
        lines += ["", "Memory beyond inputs and output: " + "; ".join(
            f"n = {row['n_q']}: {row['device_bytes_taken']} bytes of the device, and the log-sum-exp, "
            f"{row['lse_bytes_per_row']:.0f} bytes a query row" for row in memory) + "."]  # fmt: skip
    return "\n".join(lines)


def summary(result):
    rows = [row for row in result["rows"] if row["mode"] == "burst"]

    def span(part, wanted=lambda row: True, best=False):
        """From the least to the largest ratio to cuDNN, or to whatever is fastest."""
        found = [row["ratio"] for row in rows if row["part"] == part and wanted(row)]
        ratios = [min(ratio.values()) if best else ratio["cudnn"] for ratio in found]
        return f"{min(ratios):.2f} to {max(ratios):.2f}"

    packed = [100 * row["ratio"]["dense batch"] for row in rows if row["part"] == "varlen"]
    text = (
        f"On an H200 the fused kernel is {span('table', lambda row: row['n_q'] >= 512)} times as fast as cuDNN's dense "
        f"attention from n = 512 on, most on long sequences with 1:2; at n = 256 "
        f"{span('table', lambda row: row['n_q'] == 256 and row['mask'] == 'full')} times on full and "
        f"{span('table', lambda row: row['n_q'] == 256 and row['mask'] == 'causal')} times on causal attention. With a "
        f"mask tensor it is {span('mask', best=True)} times as fast as PyTorch's best (n = 4096), and packed batches "
        f"reach {min(packed):.0f} to {max(packed):.0f} % of the rate of equal ones:"
    )
    return textwrap.fill(text, 120)


def limits_table(result):
    units = {"tensor": "tensor", "issue": "issue", "alu": "ALU", "xu": "exponentials", "shared_memory": "shared memory",
             "l2": "L2"}  # fmt: skip
    stalls = {"barrier": "ping-pong", "long_scoreboard": "long scoreboard", "no_instruction": "no instruction"}
    titles = ["batch, d, pattern", "time, µs", "instructions, 10⁶", *units.values(), *stalls.values()]
    lines = ["| " + " | ".join(titles) + " |", "|---" * len(titles) + "|"]
    for row in result["rows"]:
        cells = [f"{row['batch']}, {row['d']}, {row['pattern']}", f"{row['ns'] / 1e3:.0f}"]
        cells += [f"{row['instructions'] / 1e6:.1f}", *(f"{row[unit]:.0f}" for unit in units)]
        cells += [f"{row['stalled_' + stall]:.2f}" for stall in stalls]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


TABLES = (
    pages.Table("docs/log/forward.md", "forward tables", "forward_h200.json", tables),
    pages.Table("docs/log/forward.md", "packed limits", "packed_limits_h200.json", limits_table),
    pages.Table("README.md", "fused forward", "forward_h200.json", summary),
)


def main(arguments):
    return pages.run(arguments, "bench.forward.tables", *TABLES)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
