"""What Nsight Compute says bounds the pipeline's products: launches each kernel once for ncu, and reads what it prints.

    ncu --clock-control none -k 'regex:qk_prune|qk_blocks|pv_sparse' --print-details all \
        --section SpeedOfLight --section WarpStateStats --section LaunchStats \
        python3 -m bench.pipeline.limits launch > ncu.txt
    python3 -m bench.pipeline.limits read ncu.txt --out bench/results/pipeline_limits_h200.json
"""

import argparse
import datetime
import pathlib
import re

from bench.common import results

LENGTH, BATCH, HEADS, HEAD_DIM, BLOCK = 4096, 2, 4, 64, 64
CASES = (("bf16", (2, 4)), ("fp32", (1, 2)))
SHARES = {
    "issue": "SM: Issue Active",
    "alu": "SM: Pipe Alu Cycles Active",
    "tensor": "SM: Pipe Tensor Cycles Active",
    "l2": "L2 Cache Throughput",
    "dram": "DRAM Throughput",
}


def launches():
    """What is launched, in order: (type, pattern, block size or 0, stage)."""
    return [(*case, block, stage) for case in CASES for block in (0, BLOCK) for stage in ("qk_prune", "pv_sparse")]


def launch(library):
    import torch  # needed here only

    from bench.pipeline import measure
    from bench.pipeline.problem import Pipeline

    types = {name: dtype for dtype, name in measure.NAMES.items()}
    for dtype, pattern in CASES:
        for block in (0, BLOCK):
            shape = (BATCH, HEADS, LENGTH, HEAD_DIM)
            q, k, v = (torch.randn(shape, device="cuda").to(types[dtype]) for _ in range(3))
            blocks = measure.random_blocks(LENGTH, block, LENGTH // block // 4, seed=block) if block else None
            problem = Pipeline(library, q, k, v, pattern, blocks=blocks)
            problem.qk_prune()
            problem.softmax()
            problem.pv_sparse()
            torch.cuda.synchronize()


def figure(text, name):
    return float(re.search(rf"^ +{re.escape(name)} +\S+ +([\d.,]+)$", text, re.MULTILINE).group(1).replace(",", ""))


def rows_of(text):
    parts = re.split(r"^  (?=void )", text, flags=re.MULTILINE)[1:]
    rows = []
    for (dtype, pattern, block, stage), part in zip(launches(), parts, strict=True):
        stalls = {
            name: float(value) for name, value in re.findall(r"^ +Stall ([\w ]+?) +inst +([\d.]+)$", part, re.MULTILINE)
        }
        rows.append({
            "kernel": re.match(r"void (.+?)\(", part).group(1), "stage": stage, "pattern": f"{pattern[0]}:{pattern[1]}",
            "grouping": "consecutive", "dtype": dtype, "batch": BATCH, "heads": HEADS, "kv_heads": HEADS,
            "n_q": LENGTH, "n_k": LENGTH, "d": HEAD_DIM, "pass": "forward",
            "mask": f"25 % of blocks of {block}" if block else "full",
            "busy_percent": {name: figure(part, metric) for name, metric in SHARES.items()},
            "registers": int(figure(part, "Registers Per Thread")),
            "waits_per_issue": dict(sorted(stalls.items(), key=lambda item: -item[1])[:5]),
        })  # fmt: skip
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    actions = parser.add_subparsers(dest="action", required=True)
    action = actions.add_parser("launch", help="launch every kernel once: to be run under ncu")
    action.add_argument("--library", help="the build to launch (default: DSPATTN_BENCH_LIBRARY)")
    action = actions.add_parser("read", help="write JSON from what ncu printed")
    action.add_argument("printed")
    action.add_argument("--out", required=True)
    action.add_argument("--device", default="NVIDIA H200")
    action.add_argument("--commit", help="revision measured; by default the one checked out")
    arguments = parser.parse_args()
    if arguments.action == "launch":
        return launch(arguments.library)
    printed = pathlib.Path(arguments.printed)
    written = datetime.datetime.fromtimestamp(printed.stat().st_mtime, datetime.timezone.utc)
    facts = {
        "command": results.command(),
        "commit": arguments.commit or results.commit(),
        "date": written.isoformat("T", "seconds"),
        "device": {"name": arguments.device},
    }
    results.write(arguments.out, facts, rows_of(printed.read_text(encoding="utf-8")))
    return None


if __name__ == "__main__":
    main()
