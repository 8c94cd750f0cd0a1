#!/usr/bin/env python3
"""Writes the fp32 table of docs/fused_kernel.md from bench/results/fp32_h200.json, between its markers.

python3 bench/fp32_table.py            # rewrite
python3 bench/fp32_table.py --check    # exit 1 when the table is not what the results say
"""

import sys

import page_table

RESULTS = page_table.ROOT / "bench" / "results" / "fp32_h200.json"
PAGE = page_table.ROOT / "docs" / "fused_kernel.md"
BEGIN = "<!-- fp32 table, written by bench/fp32_table.py -->"
END = "<!-- end of fp32 table -->"
PEERS = {"efficient": "memory-efficient", "math": "math, tf32", "unfused": "unfused, tf32"}


def microseconds(figures):
    return f"{figures['median_us']:.0f}" if figures else "-"


def table(result):
    """A line per cell: our time and rate, the peers' times, and how many times faster than the fastest of them."""
    first = result["rows"][0]
    lines = [
        f"Microseconds ({result['device']['name']}, torch {result['versions']['torch']}, batch {first['batch']}, "
        f"{first['heads']} heads, commit {result['commit'][:10]}); the last column is how many times faster than the "
        "fastest peer.",
        "",
        "| n | d | mask | groups | ours | TFLOP/s | " + " | ".join(PEERS.values()) + " | faster |",
        "|---" * (7 + len(PEERS)) + "|",
    ]
    for row in result["rows"]:
        verdict = (
            ""
            if row["bar"] is None
            else f" (bar {row['bar']:g}{'' if row['best_ratio'] >= row['bar'] else ', missed'})"
        )
        facts = (row["n_q"], row["d"], row["mask"], row["grouping"], f"{row['median_us']:.0f}", f"{row['tflops']:.0f}")
        times = (microseconds(row["peers"].get(peer)) for peer in PEERS)
        lines.append("| " + " | ".join(map(str, (*facts, *times, f"{row['best_ratio']:.1f}x{verdict}"))) + " |")
    return "\n".join(lines)


def main(arguments):
    return page_table.run(arguments, __file__, PAGE, RESULTS, BEGIN, END, table)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
