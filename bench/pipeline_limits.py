#!/usr/bin/env python3
"""Asks Nsight Compute what bounds the pipeline's products: runs itself under ncu, one launch of each kernel.

python3 bench/pipeline_limits.py --build build --out bench/results/pipeline_limits_h200.json
"""

import argparse
import csv
import io
import json
import subprocess
import sys

import pipeline
import pipeline_lib
import torch

LENGTH, BATCH, BLOCK = 4096, 8, 64
CASES = ((torch.bfloat16, (2, 4)), (torch.float32, (1, 2)))
STALLS = (
    "barrier", "dispatch_stall", "gmma", "long_scoreboard", "math_pipe_throttle", "mio_throttle", "not_selected",
    "short_scoreboard", "wait",
)  # fmt: skip
SHARES = {
    "issue": "sm__inst_issued.avg.pct_of_peak_sustained_active",
    "alu": "sm__inst_executed_pipe_alu.avg.pct_of_peak_sustained_active",
    "tensor": "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",
    "l2": "lts__throughput.avg.pct_of_peak_sustained_elapsed",
    "dram": "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed",
}
TIME = "gpu__time_duration.sum"


def stall(name):
    return f"smsp__average_warps_issue_stalled_{name}_per_issue_active.ratio"


def launches():
    """What ncu looks at, in order: (type, pattern, block size or 0, stage)."""
    return [(*case, block, stage) for case in CASES for block in (0, BLOCK) for stage in ("qk_prune", "pv_sparse")]


def run_all(build):
    library = pipeline_lib.load(build)
    for dtype, pattern, block, stage in launches():
        if stage != "qk_prune":
            continue
        q, k, v = (torch.randn(BATCH, 4, LENGTH, 64, device="cuda").to(dtype) for _ in range(3))
        blocks = pipeline.random_blocks(LENGTH, block, LENGTH // block // 4, seed=block) if block else None
        problem = pipeline_lib.Pipeline(library, q, k, v, pattern, blocks=blocks)
        problem.qk_prune()
        problem.softmax()
        problem.pv_sparse()
        torch.cuda.synchronize()


def measured(build):
    """Rows of ncu's table, a dictionary per launch."""
    metrics = ",".join((TIME, *SHARES.values(), *map(stall, STALLS)))
    text = subprocess.run(
        ["ncu", "--clock-control", "none", "--csv", "--page", "raw", "--metrics", metrics, "-k", "regex:qk_|pv_sparse",
         sys.executable, __file__, "--build", build, "--out", ""],
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    lines = text.splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith('"ID"'))
    return list(csv.DictReader(io.StringIO("\n".join(lines[first:]))))[1:]  # the first line has the units


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--build", default="build", help="where libdspattn_pipeline_c.so was built")
    parser.add_argument("--out", required=True, help="JSON file to write; empty: only launch the kernels")
    parser.add_argument("--commit", help="revision measured, where the sources are not a git checkout")
    arguments = parser.parse_args()
    if not arguments.out:
        return run_all(arguments.build)
    rows = []
    for (dtype, pattern, block, stage), line in zip(launches(), measured(arguments.build), strict=True):
        stalls = {name: float(line[stall(name)]) for name in STALLS}
        rows.append({
            "stage": stage, "kernel": line["Kernel Name"].split("(")[0], "pattern": f"{pattern[0]}:{pattern[1]}",
            "grouping": "consecutive", "dtype": pipeline.NAMES[dtype], "batch": BATCH, "heads": 4, "kv_heads": 4,
            "n_q": LENGTH, "n_k": LENGTH, "d": 64, "pass": "forward",
            "mask": f"25 % of blocks of {block}" if block else "full",
            "busy_percent": {name: round(float(line[metric]), 1) for name, metric in SHARES.items()},
            "stalls": dict(sorted(stalls.items(), key=lambda item: -item[1])),
        })  # fmt: skip
    with open(arguments.out, "w", encoding="utf-8") as file:
        json.dump({**pipeline.environment(arguments.commit), "rows": rows}, file, indent=1)
        file.write("\n")
    return None


if __name__ == "__main__":
    main()
