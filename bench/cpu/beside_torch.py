"""CPU attention against PyTorch's own, side by side in one process.

    python -m bench.cpu.beside_torch            # every cell; writes bench/results/cpu_<arch>.json
    python -m bench.cpu.beside_torch --quick    # one length and head dim, writes nothing
    python -m bench.cpu.beside_torch --check    # exit status 1 when a bar is missed

Each cell (head dim, length, mask) times PyTorch's scaled_dot_product_attention and ours for 2:4 and 1:2 in both
groupings, one call of each in turn on the same tensors and threads, so that whatever else the machine does meets all
alike; medians are compared. A ratio above 1 means ours is faster. bf16 and fp16 are compared with our own fp32.

On a busy machine wall-clock times say little. `--threads 1 --clock cpu` counts processor time of one thread instead,
which other programs disturb only through the caches.
"""

from __future__ import annotations

import argparse
import math
import os
import platform
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

import dspattn
from bench.common import results, timing

VARIANTS = [(p, g) for p in ("2:4", "1:2") for g in ("interleaved", "consecutive")]
HEAD_DIMS = (32, 64, 128)
LENGTHS = (128, 256, 512, 1024, 2048, 4096)
MASKS = ("full", "causal")
HALF_TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
PEER = "torch_sdpa"

# What the project promises of this comparison.
BARS = {
    "forward full, geometric mean": ("at least", 1.2),
    "forward causal, geometric mean": ("at least", 1.5),
    "forward, slowest cell": ("at least", 1.0),
    "forward and backward, geometric mean": ("at least", 1.1),
    "bf16 time over fp32 time, geometric mean": ("at most", 1.3),
    "fp16 time over fp32 time, geometric mean": ("at most", 1.3),
}


def heads_for(n: int) -> int:
    """Enough heads to give every thread work, without minutes per cell."""
    return max(2, min(16, 8192 // n))


def with_rate(timed: dict[str, float], flops: float) -> dict[str, float]:
    return {**timed, "tflops": flops / timed["median_us"] / 1e6}


def tensors(heads: int, n: int, d: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(n * 1000 + d)
    return [torch.randn(1, heads, n, d, generator=generator).to(dtype) for _ in range(3)]


def forward_calls(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> dict[str, Callable[[], Any]]:
    calls: dict[str, Callable[[], Any]] = {PEER: lambda: scaled_dot_product_attention(q, k, v, is_causal=causal)}
    for pattern, grouping in VARIANTS:
        calls[f"{pattern} {grouping}"] = lambda p=pattern, g=grouping: dspattn.attention(
            q, k, v, is_causal=causal, pattern=p, grouping=g
        )
    return calls


def with_backward(
    forward: Callable[[], torch.Tensor], inputs: list[torch.Tensor], grad: torch.Tensor
) -> Callable[[], Any]:
    return lambda: torch.autograd.grad(forward(), inputs, grad)


def rows_of_cell(d: int, n: int, mask: str, direction: str, seconds: float, clock: str) -> list[dict[str, Any]]:
    heads = heads_for(n)
    inputs = tensors(heads, n, d)
    flops = 4.0 * heads * n * n * d * (0.5 if mask == "causal" else 1.0)
    if direction == "forward":
        calls = forward_calls(*inputs, mask == "causal")
    else:
        flops *= 3.5
        grad = torch.randn(inputs[0].shape)
        for tensor in inputs:
            tensor.requires_grad_()
        calls = {
            name: with_backward(call, inputs, grad) for name, call in forward_calls(*inputs, mask == "causal").items()
        }
    times = {name: with_rate(timed, flops) for name, timed in timing.in_turn_on_cpu(calls, seconds, clock).items()}
    peer = times.pop(PEER)
    rows = []
    for (pattern, grouping), ours in zip(VARIANTS, times.values(), strict=True):
        rows.append(
            {
                "kernel": "cpu_" + pattern.replace(":", "_"),
                "pattern": pattern,
                "grouping": grouping,
                "dtype": "fp32",
                "batch": 1,
                "heads": heads,
                "kv_heads": heads,
                "n_q": n,
                "n_k": n,
                "d": d,
                "mask": mask,
                "pass": direction,
                **ours,
                "peers": {PEER: peer},
                "ratio": {PEER: peer["median_us"] / ours["median_us"]},
            }
        )
    return rows


def rows_of_types(d: int, n: int, mask: str, seconds: float, clock: str) -> list[dict[str, Any]]:
    """2:4 interleaved in 16-bit types beside the same in fp32."""
    heads = heads_for(n)
    calls: dict[str, Callable[[], Any]] = {}
    for name, dtype in {"fp32": torch.float32, **HALF_TYPES}.items():
        q, k, v = tensors(heads, n, d, dtype)
        calls[name] = lambda q=q, k=k, v=v: dspattn.attention(q, k, v, is_causal=mask == "causal", pattern="2:4")
    flops = 4.0 * heads * n * n * d * (0.5 if mask == "causal" else 1.0)
    times = {name: with_rate(timed, flops) for name, timed in timing.in_turn_on_cpu(calls, seconds, clock).items()}
    peer = times.pop("fp32")
    return [
        {
            "kernel": "cpu_2_4",
            "pattern": "2:4",
            "grouping": "interleaved",
            "dtype": name,
            "batch": 1,
            "heads": heads,
            "kv_heads": heads,
            "n_q": n,
            "n_k": n,
            "d": d,
            "mask": mask,
            "pass": "forward",
            **ours,
            "peers": {"cpu_2_4_fp32": peer},
            "ratio": {"cpu_2_4_fp32": peer["median_us"] / ours["median_us"]},
        }
        for name, ours in times.items()
    ]


def geometric_mean(values: list[float]) -> float:
    return math.exp(sum(math.log(value) for value in values) / len(values))


def figures(rows: list[dict[str, Any]]) -> dict[str, float]:
    """The numbers the bars speak of, as far as the rows have them."""

    def ratios(peer: str, **wanted: str) -> list[float]:
        return [
            row["ratio"][peer]
            for row in rows
            if peer in row["ratio"] and all(row[key] == value for key, value in wanted.items())
        ]

    found = {
        "forward full, geometric mean": ratios(PEER, mask="full", **{"pass": "forward"}),
        "forward causal, geometric mean": ratios(PEER, mask="causal", **{"pass": "forward"}),
        "forward and backward, geometric mean": ratios(PEER, **{"pass": "forward_backward"}),
    }
    result = {name: geometric_mean(values) for name, values in found.items() if values}
    forward = ratios(PEER, **{"pass": "forward"})
    if forward:
        result["forward, slowest cell"] = min(forward)
    for name in HALF_TYPES:
        values = ratios("cpu_2_4_fp32", dtype=name)
        if values:
            result[f"{name} time over fp32 time, geometric mean"] = 1.0 / geometric_mean(values)
    return result


def misses(found: dict[str, float]) -> list[str]:
    text = []
    for name, value in found.items():
        kind, bar = BARS[name]
        if (value < bar) if kind == "at least" else (value > bar):
            text.append(f"{name}: {value:.2f}, expected {kind} {bar}")
    return text


def print_cell(rows: list[dict[str, Any]]) -> None:
    row = rows[0]
    peer_name, peer = next(iter(row["peers"].items()))
    head = f"{row['pass']:17} {row['mask']:7} d {row['d']:3} n {row['n_q']:5}  {peer_name} {peer['tflops'] * 1e3:6.1f}"
    if peer_name == PEER:
        cells = [f"{r['pattern']} {r['grouping'][:5]} {r['tflops'] * 1e3:6.1f} ({r['ratio'][PEER]:.2f}x)" for r in rows]
    else:
        cells = [f"{r['dtype']} {r['tflops'] * 1e3:6.1f} ({r['ratio'][peer_name]:.2f}x)" for r in rows]
    print(head + " GFLOP/s   " + "  ".join(cells), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one length and head dim; nothing is written")
    parser.add_argument("--check", action="store_true", help="exit status 1 when a bar is missed")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="for both; default all cores")
    parser.add_argument(
        "--clock", choices=timing.CPU_CLOCKS, default="wall", help="cpu: processor time; needs --threads 1"
    )
    parser.add_argument("--seconds", type=float, default=1.5, help="per cell, shared by all that is timed in it")
    parser.add_argument("--output", type=Path, help="default bench/results/cpu_<arch>.json")
    options = parser.parse_args()
    if options.clock == "cpu" and options.threads != 1:
        parser.error("--clock cpu counts one thread only: give --threads 1")
    clock = options.clock
    torch.set_num_threads(options.threads)
    started = results.now()

    lengths, head_dims = ((256,), (64,)) if options.quick else (LENGTHS, HEAD_DIMS)
    rows: list[dict[str, Any]] = []
    for direction in ("forward", "forward_backward"):
        for mask in MASKS:
            for d in head_dims:
                for n in lengths:
                    rows += rows_of_cell(d, n, mask, direction, options.seconds, clock)
                    print_cell(rows[-len(VARIANTS) :])
    for mask in MASKS:
        for d in head_dims:
            for n in lengths:
                rows += rows_of_types(d, n, mask, options.seconds, clock)
                print_cell(rows[-len(HALF_TYPES) :])

    found = figures(rows)
    for name, value in found.items():
        print(f"{name:45} {value:5.2f}   ({BARS[name][0]} {BARS[name][1]})")
    if not options.quick or options.output:
        path = options.output or results.FOLDER / f"cpu_{platform.machine()}.json"
        results.write(path, {**results.cpu(), "date": started, "summary": found}, rows)
        print(f"wrote {path}")
    missed = misses(found)
    for line in missed:
        print("missed: " + line)
    return 1 if options.check and missed else 0


if __name__ == "__main__":
    sys.exit(main())
