#!/usr/bin/env python3
"""What Nsight Compute says bounds the pipeline's products: launches each kernel once for ncu, and reads what it prints.

    ncu --clock-control none -k 'regex:qk_prune|qk_blocks|pv_sparse' --print-details all \
        --section SpeedOfLight --section WarpStateStats --section LaunchStats \
        python3 bench/pipeline_limits.py launch --build build > ncu.txt
    python3 bench/pipeline_limits.py read ncu.txt --out bench/results/pipeline_limits_h200.json
"""

import argparse
import datetime
import json
import pathlib
import re
import subprocess
import sys

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


def launch(build):
    import pipeline
    import pipeline_lib
    import torch

    library = pipeline_lib.load(build)
    types = {name: dtype for dtype, name in pipeline.NAMES.items()}
    for dtype, pattern in CASES:
        for block in (0, BLOCK):
            shape = (BATCH, HEADS, LENGTH, HEAD_DIM)
            q, k, v = (torch.randn(shape, device="cuda").to(types[dtype]) for _ in range(3))
            blocks = pipeline.random_blocks(LENGTH, block, LENGTH // block // 4, seed=block) if block else None
            problem = pipeline_lib.Pipeline(library, q, k, v, pattern, blocks=blocks)
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
    action.add_argument("--build", default="build", help="where libdspattn_pipeline_c.so was built")
    action = actions.add_parser("read", help="write JSON from what ncu printed")
    action.add_argument("printed")
    action.add_argument("--out", required=True)
    action.add_argument("--device", default="NVIDIA H200")
    action.add_argument("--commit", help="revision measured; by default the one checked out")
    arguments = parser.parse_args()
    if arguments.action == "launch":
        return launch(arguments.build)
    printed = pathlib.Path(arguments.printed)
    head = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False).stdout
    document = {
        "command": " ".join(["python3", *sys.argv]),
        "commit": arguments.commit or head.strip() or "unknown",
        "date": datetime.datetime.fromtimestamp(printed.stat().st_mtime, datetime.timezone.utc).isoformat(
            "T", "seconds"
        ),
        "device": {"name": arguments.device},
        "rows": rows_of(printed.read_text(encoding="utf-8")),
    }
    pathlib.Path(arguments.out).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return None


if __name__ == "__main__":
    main()
