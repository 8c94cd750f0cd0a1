"""Times the fused forward with rest = mean beside rest = drop and cuDNN, in one process on the same tensors.

    python3 -m bench.forward.rest --out bench/results/rest_h200.json --check
    python3 -m bench.forward.rest --only n=1024,4096 d=128 mask=causal pattern=2:4

bf16, 16384 tokens, hidden size 2048; bursts as in bench/common/timing.py, all three in turn, there and back. tflops is
dense-equivalent. Ratios above 1 are faster: beside drop, beside cuDNN. --check exits with 1 when a bar's floor is
missed: each cell with n >= 1024 beside drop, and the geometric mean of each pattern beside cuDNN.
"""

import argparse
import math
import sys
import time
import types

from bench.common import results
from bench.forward import bars

LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
DIMS = (64, 128)
PATTERNS = ("2:4", "1:2")
RESTS = ("drop", "mean")
# (floor, goal).
BESIDE_DROP = (0.92, 0.97)
BESIDE_DROP_FROM = 1024
BESIDE_CUDNN = {"2:4": (1.15, 1.25), "1:2": (1.25, 1.35)}


def cells(only):
    """(n, d, mask) that are asked for, the most telling first."""
    for n in sorted(LENGTHS, key=lambda n: n not in (1024, 4096)):
        for d in DIMS:
            for mask in bars.MASKS:
                facts = {"n": n, "d": d, "mask": mask}
                if all(str(facts[key]) in only[key].split(",") for key in facts if key in only):
                    yield n, d, mask


def verdict(value, bar):
    floor, goal = bar
    return "goal" if value >= goal else "floor" if value >= floor else "BELOW"


def geometric_mean(values):
    return math.exp(sum(map(math.log, values)) / len(values))


def judged(rows):
    """What the bars say of mean's rows: [(what, value, bar)]."""
    means = [row for row in rows if row["rest"] == "mean"]
    found = [
        (
            f"{row['pattern']} n = {row['n']} d = {row['d']} {row['mask']}, beside drop",
            row["ratio"]["drop"],
            BESIDE_DROP,
        )
        for row in means
        if row["n"] >= BESIDE_DROP_FROM
    ]
    for pattern, bar in BESIDE_CUDNN.items():
        ratios = [row["ratio"]["cudnn"] for row in means if row["pattern"] == pattern and "cudnn" in row["ratio"]]
        if ratios:
            found.append((f"{pattern}, geometric mean of {len(ratios)} beside cuDNN", geometric_mean(ratios), bar))
    return found


def rows_of(cell, patterns, timed):
    """Rows of a cell from {contender: figures}; contenders are cudnn and (pattern, rest)."""
    rows = []
    for pattern in patterns:
        for rest in RESTS:
            figures = timed[pattern, rest]
            beside = {"drop": timed[pattern, "drop"]} | ({"cudnn": timed["cudnn"]} if "cudnn" in timed else {})
            ratio = {name: round(other["median_us"] / figures["median_us"], 3) for name, other in beside.items()}
            if rest == "drop":
                del ratio["drop"]
            n, d, mask = cell
            rows.append({"n": n, "d": d, "mask": mask, "pattern": pattern, "rest": rest, **figures, "ratio": ratio})
    return rows


def line_of(row):
    ratios = ", ".join(f"{value:.3f} of {name}" for name, value in row["ratio"].items())
    place = f"{row['pattern']} n {row['n']:5} d {row['d']:3} {row['mask']:6} {row['rest']}"
    return f"{place}  {row['median_us']:9.1f} us  {row['tflops']:6.1f} TFLOP/s  {ratios}"


def measure(bench, place, patterns):
    """{contender: figures} of one cell."""
    from bench.common import native, timing
    from bench.forward import measure as forward

    n, d, mask = place
    cell = forward.Cell(n, d, mask=mask)
    graphs, skipped = bench.graph_peers(cell, ["cudnn"])
    for name, why in skipped.items():
        print(f"{name}: {why}", file=sys.stderr)
    for pattern in patterns:
        for rest in RESTS:
            options = {"pattern": forward.PATTERNS[pattern], "causal": cell.causal, "rest": rest}
            graphs[pattern, rest] = timing.Graphed([native.prepare(*qkv, **options)[0] for qkv in cell.sets])
    timed = bench.time_in_turn(graphs, cell.flop)
    return {name: modes["burst"] for name, modes in timed.items()}


def main(argv):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", help="JSON to write, anew after every cell")
    parser.add_argument("--only", nargs="*", default=[], metavar="KEY=VALUES", help="n, d, mask, pattern")
    parser.add_argument("--idle", type=float, default=0.3, help="seconds of pause before a burst")
    parser.add_argument("--seconds", type=float, default=1e9, help="no cell is begun after this many")
    parser.add_argument("--check", action="store_true", help="exit with 1 where a floor is missed")
    arguments = parser.parse_args(argv)
    only = dict(entry.split("=", 1) for entry in arguments.only)
    if unknown := set(only) - {"n", "d", "mask", "pattern"}:
        parser.error(f"--only: expected n, d, mask or pattern, got {', '.join(sorted(unknown))}")
    patterns = [pattern for pattern in PATTERNS if pattern in only.get("pattern", ",".join(PATTERNS)).split(",")]

    from bench.common import timing
    from bench.forward import measure as forward

    bench = forward.Bench(
        types.SimpleNamespace(library=[], idle=arguments.idle, peers=["cudnn"], only=[], seconds=arguments.seconds)
    )
    facts = results.gpu() if arguments.out else None
    timing.warm_up()
    rows, began = [], time.monotonic()
    for place in cells(only):
        if time.monotonic() - began > arguments.seconds:
            print(f"left out for want of time: {place}", file=sys.stderr)
            continue
        added = rows_of(place, patterns, measure(bench, place, patterns))
        rows += added
        print("\n".join(map(line_of, added)), flush=True)
        if arguments.out:
            results.write(arguments.out, facts, rows)
    verdicts = [(what, value, verdict(value, bar), bar) for what, value, bar in judged(rows)]
    for what, value, said, (floor, goal) in verdicts:
        print(f"{said:5} {what}: {value:.3f} (floor {floor}, goal {goal})")
    return 1 if arguments.check and any(said == "BELOW" for _, _, said, _ in verdicts) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
