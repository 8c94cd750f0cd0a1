#!/usr/bin/env python3
"""Times the fused forward beside PyTorch's attention kernels, in one process on the same tensors.

    DSPATTN_BENCH_LIBRARY=... python3 bench/fused_forward.py --out bench/results/forward_h200.json

Every kernel runs from a CUDA graph (no launch overhead inside). burst: 0.5 s idle, 5 warm-ups, median of 30; sustained:
1 s of launches without a pause, median of the second half (a card under its power cap clocks down). Inputs rotate among
enough copies to exceed the L2 cache. tflops is dense-equivalent: 4 batch heads n^2 d, halved when causal.
"""

import argparse
import datetime
import json
import os
import statistics
import subprocess
import sys
import time

import native
import torch
import torch.nn.functional as F  # noqa: N812
from torch.nn.attention import SDPBackend, sdpa_kernel

PEERS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash2": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
L2_BYTES = 60 << 20


def graph_of(run):
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def timed(replays, count):
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(count)]
    for i, (start, end) in enumerate(events):
        start.record()
        replays[i % len(replays)]()
        end.record()
    torch.cuda.synchronize()
    return [1e3 * start.elapsed_time(end) for start, end in events]


def burst(replays, idle):
    torch.cuda.synchronize()
    time.sleep(idle)
    timed(replays, 5)
    return timed(replays, 30)


def sustained(replays, expected_us):
    count = max(60, int(1e6 / expected_us))
    return timed(replays, count)[count // 2 :]


def summary(times, flop):
    ordered = sorted(times)
    median = statistics.median(ordered)
    return {
        "median_us": round(median, 2),
        "spread_us": round(ordered[int(0.9 * len(ordered))] - ordered[int(0.1 * len(ordered))], 2),
        "tflops": round(flop / median / 1e6, 1),
    }


def unfused(q, k, v):
    return torch.softmax(q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5, dim=-1) @ v


def measure(cell, idle, with_sustained, peers):
    n, d, causal, dtype = cell["n"], cell["d"], cell["causal"], cell["dtype"]
    batch, heads = max(1, 16384 // n), 2048 // d
    kv_heads = cell.get("kv_heads", heads)
    flop = 4 * batch * heads * n * n * d * (0.5 if causal else 1)
    bytes_each = 2 * batch * n * d * (heads + 2 * kv_heads)
    copies = max(1, -(-L2_BYTES // bytes_each))
    torch.manual_seed(0)
    sets = [
        [torch.randn(batch, h, n, d, device="cuda", dtype=dtype) for h in (heads, kv_heads, kv_heads)]
        for _ in range(copies)
    ]
    results, skipped = {}, {}
    for peer in peers:
        try:
            if peer == "unfused":
                if causal or n > 4096 or kv_heads != heads:
                    raise RuntimeError("full attention up to n = 4096 only")
                replays = [graph_of(lambda s=s: unfused(*s)) for s in sets]
            else:
                with sdpa_kernel(PEERS[peer]):
                    replays = [
                        graph_of(
                            lambda s=s: F.scaled_dot_product_attention(
                                *s, is_causal=causal, enable_gqa=kv_heads != heads
                            )
                        )
                        for s in sets
                    ]
            results[peer] = {"burst": summary(burst(replays, idle), flop)}
            if with_sustained and peer == "cudnn":
                results[peer]["sustained"] = summary(sustained(replays, results[peer]["burst"]["median_us"]), flop)
        except RuntimeError as error:
            results[peer], skipped[peer] = None, str(error).splitlines()[0][:120]
    rows = []
    for pattern in ((2, 4), (1, 2)):
        for grouping in cell.get("groupings", ("interleaved",)):
            runs = [native.prepare(*s, pattern=pattern, grouping=grouping, causal=causal) for s in sets]
            replays = [graph_of(run) for run, _, _ in runs]
            modes = {"burst": summary(burst(replays, idle), flop)}
            if with_sustained:
                modes["sustained"] = summary(sustained(replays, modes["burst"]["median_us"]), flop)
            for mode, figures in modes.items():
                beside = {peer: (r or {}).get(mode) for peer, r in results.items()}
                rows.append(
                    {
                        "kernel": f"sm90_fused_{pattern[0]}_{pattern[1]}_{'bf16' if dtype == torch.bfloat16 else 'fp16'}_d{d}",  # noqa: E501
                        "pattern": f"{pattern[0]}:{pattern[1]}",
                        "grouping": grouping,
                        "dtype": "bf16" if dtype == torch.bfloat16 else "fp16",
                        "batch": batch,
                        "heads": heads,
                        "kv_heads": kv_heads,
                        "n_q": n,
                        "n_k": n,
                        "d": d,
                        "mask": "causal" if causal else "full",
                        "pass": "forward",
                        "mode": mode,
                        **figures,
                        "peers": beside,
                        "ratio": {p: round(b["median_us"] / figures["median_us"], 3) for p, b in beside.items() if b},
                        "skipped": skipped,
                    }
                )
    return rows


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    parser.add_argument("--idle", type=float, default=0.5)
    parser.add_argument(
        "--quick", action="store_true", help="peers other than cuDNN, and sustained runs, at n = 4096 only"
    )
    arguments = parser.parse_args()
    cells = [
        {"n": n, "d": d, "causal": causal, "dtype": torch.bfloat16}
        for d in (64, 128)
        for causal in (False, True)
        for n in (256, 512, 1024, 4096, 16384)
    ]
    cells += [{"n": 4096, "d": d, "causal": False, "dtype": torch.float16} for d in (64, 128)]
    cells += [
        {"n": 4096, "d": 256, "causal": False, "dtype": torch.bfloat16},
        {"n": 4096, "d": 64, "causal": False, "dtype": torch.bfloat16, "kv_heads": 8},
        {"n": 4096, "d": 128, "causal": False, "dtype": torch.bfloat16, "groupings": ("consecutive",)},
    ]
    rows = []
    for cell in cells:
        plain = cell["dtype"] == torch.bfloat16 and "kv_heads" not in cell and "groupings" not in cell
        heavy = plain and (cell["n"] == 4096 if arguments.quick else cell["n"] >= 1024)
        peers = ("cudnn", "flash2", "efficient", "unfused") if heavy or not arguments.quick else ("cudnn",)
        new = measure(cell, arguments.idle, heavy, peers)
        rows += new
        for row in new:
            print(
                f"d {row['d']:3} n {row['n_q']:5} {row['mask']:6} {row['dtype']} {row['pattern']} {row['mode']:9} "
                f"{row['tflops']:6.0f} TFLOP/s  "
                + "  ".join(f"{p} {row['peers'][p]['tflops']:.0f} ({r:.2f}x)" for p, r in row["ratio"].items()),
                flush=True,
            )
    query = (
        subprocess.run(
            ["nvidia-smi", "--query-gpu=clocks.sm,driver_version", "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            check=False,
        )
        .stdout.strip()
        .split(", ")
    )
    nvcc = (
        subprocess.run(["nvcc", "--version"], capture_output=True, text=True, check=False).stdout.strip().splitlines()
    )
    result = {
        "command": "python3 bench/fused_forward.py " + " ".join(sys.argv[1:]),
        "commit": os.environ.get("DSPATTN_COMMIT", "unknown"),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "device": {
            "name": torch.cuda.get_device_name(),
            "sm_clock_mhz": int(query[0]) if query[0].isdigit() else None,
            "driver": query[-1],
            "cores": os.cpu_count(),
        },
        "versions": {
            "cuda": torch.version.cuda,
            "torch": torch.__version__,
            "cudnn": str(torch.backends.cudnn.version()),
            "compiler": nvcc[-1] if nvcc else "unknown",
        },
        "rows": rows,
    }
    with open(arguments.out, "w", encoding="utf-8") as file:
        json.dump(result, file, indent=1)
        file.write("\n")


if __name__ == "__main__":
    main()
