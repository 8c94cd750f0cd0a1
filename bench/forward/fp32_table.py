"""Writes the fp32 table of docs/log/forward_tf32.md from bench/results/fp32_h200.json, between its markers.

python3 -m bench.forward.fp32_table            # rewrite
python3 -m bench.forward.fp32_table --check    # exit 1 when the table is not what the results say
"""

import sys

from bench.common import pages

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


TABLE = pages.Table("docs/log/forward_tf32.md", "fp32 table", "fp32_h200.json", table)


def main(arguments):
    return pages.run(arguments, "bench.forward.fp32_table", TABLE)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
