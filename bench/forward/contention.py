"""Runs contention.cu and writes what it measured; or writes that into docs/log/forward.md, between its markers.

python3 -m bench.forward.contention build/bench/dspattn_contention bench/results/contention_h200.json
python3 -m bench.forward.contention --table            # rewrite the table
python3 -m bench.forward.contention --table --check    # exit 1 when the table is not what the results say
"""

import json
import subprocess
import sys

from bench.common import pages, results


def measure(program, target):
    rows = json.loads(subprocess.run([program], capture_output=True, text=True, check=True).stdout)
    results.write(target, results.gpu(), rows)


def table(result):
    """A line an instruction: cycles alone, beside dense and beside sparse products, and what these then take."""
    rows = {(row["instruction"], row["product"]): row for row in result["rows"]}
    lines = [
        f"Cycles ({result['device']['name']}, commit {result['commit'][:10]}). A product alone takes "
        f"{result['rows'][0]['product_cycles']:.0f}.",
        "",
        "| instruction | alone | beside dense products | beside sparse | a dense product then | a sparse one then |",
        "|---|---|---|---|---|---|",
    ]
    for instruction in dict.fromkeys(row["instruction"] for row in result["rows"]):
        dense, sparse = rows[instruction, "dense"], rows[instruction, "sparse"]
        lines.append(
            f"| {instruction} | {dense['cycles']:.1f} | {dense['cycles_beside']:.1f} | {sparse['cycles_beside']:.1f} "
            f"| {dense['product_cycles_beside']:.0f} | {sparse['product_cycles_beside']:.0f} |"
        )
    return "\n".join(lines)


TABLE = pages.Table("docs/log/forward.md", "contention table", "contention_h200.json", table)


def main(arguments):
    if arguments[:1] == ["--table"]:
        return pages.run(arguments, "bench.forward.contention", TABLE)
    if len(arguments) != 2:
        print(__doc__, file=sys.stderr)
        return 2
    measure(*arguments)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
