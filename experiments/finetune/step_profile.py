"""Where the time of a training step goes: SmolLM2-135M's shape, random, with PyTorch's attention beside 2:4 and 1:2.

    python experiments/finetune/step_profile.py --out out/finetune/profile.json      # on a GPU, under a minute
    python experiments/finetune/step_profile.py --tiny --device cpu --batch 1 2

For every batch size the models take steps in turn, as `run.py` times them; then each takes one under PyTorch's
profiler, which says how long each kernel ran, how often, and how long the device ran anything at all. `host` repeats
the first with windows so short that the device waits for Python: what a layer costs there. `calls` does so for
attention alone.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import run as finetune
import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa

import dspattn
from bench.common import results, timing

LISTED, KEPT = 12, 60  # kernels of each model, by time: printed, written
LEAST_ROUNDS = 4
HOST_LENGTH = 64  # tokens of a window with which a step waits for Python


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, nargs="+", default=[8, 32], help="windows of a step")
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--seconds", type=float, default=10.0, help="of steps in turn, for every batch size")
    parser.add_argument("--calls", type=int, default=200, help="calls of attention alone whose time is taken together")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tiny", action="store_true", help="a small model")
    parser.add_argument("--out", type=Path, default=finetune.ROOT / "out" / "finetune" / "profile.json")
    options = parser.parse_args(arguments)
    options.random, options.rate, options.limit = not options.tiny, 2e-4, None
    return options


def timed(runs: list[Any], batch: torch.Tensor, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Steps in turn; the median of each, and of its ratio to the first one's of the same round, with two standard
    errors of that."""
    rounds: list[dict[str, float]] = []
    ends = time.monotonic() + options.seconds
    while len(rounds) < finetune.WARM_UPS + LEAST_ROUNDS or time.monotonic() < ends:
        first = len(rounds) % len(runs)
        order = runs[first:] + runs[:first]
        rounds.append({run.attention: finetune.timed_step(run, batch, 0.0, options.device)[1] for run in order})
    del rounds[: finetune.WARM_UPS]
    rows = []
    for run in runs:
        own = [found[run.attention] for found in rounds]
        ratios = [found[runs[0].attention] / found[run.attention] for found in rounds]
        error = 1.253 * statistics.stdev(ratios) / len(ratios) ** 0.5  # of a median of normal numbers
        rows.append(
            {
                "attention": run.attention,
                "rounds": len(rounds),
                "ms_per_step": round(statistics.median(own) * 1e3, 3),
                "speed_over_sdpa": round(statistics.median(ratios), 4),
                "two_se": round(2 * error, 4),
            }
        )
    return rows


def profiled(run: Any, batch: torch.Tensor, options: argparse.Namespace) -> dict[str, Any]:
    """Kernels of one step, by time, and how long the device ran any."""
    from torch.profiler import ProfilerActivity, profile

    device = options.device == "cuda"
    activities = [ProfilerActivity.CUDA] if device else [ProfilerActivity.CPU]
    with profile(activities=activities) as profiler:
        finetune.timed_step(run, batch, 0.0, options.device)
    on_device = torch.autograd.DeviceType.CUDA if device else torch.autograd.DeviceType.CPU
    events = [e for e in profiler.events() if e.device_type == on_device and not e.is_user_annotation]
    totals: dict[str, list[float]] = {}
    for event in events:
        totals.setdefault(event.name, []).append(event.time_range.elapsed_us())
    spans = sorted((event.time_range.start, event.time_range.end) for event in events)
    busy, reached = 0.0, 0.0
    for start, end in spans:
        busy += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    ranked = sorted(totals.items(), key=lambda item: -sum(item[1]))
    return {
        "attention": run.attention, "busy_ms": round(busy / 1e3, 3), "kernels": len(events),
        "span_ms": round((reached - spans[0][0]) / 1e3, 3),
        "totals_us": {name: [len(found), round(sum(found), 1)] for name, found in ranked[:KEPT]},
    }  # fmt: skip


def print_differences(found: list[dict[str, Any]]) -> None:
    """What runs longer, or shorter, than in the step with PyTorch's attention."""
    first = found[0]["totals_us"]
    for other in found:
        own = other["totals_us"]
        print(f"  {other['attention']}: busy {other['busy_ms']} of {other['span_ms']} ms, {other['kernels']} kernels")
        change = {name: own.get(name, [0, 0.0])[1] - first.get(name, [0, 0.0])[1] for name in own | first}
        most = sorted(own if other is found[0] else change, key=lambda name: -abs(change[name]))
        for name in most[:LISTED]:
            count, total = own.get(name, [0, 0.0])
            print(f"    {total:10.0f} us ({change[name]:+9.0f}), {count:4d} x {name[:110]}")


def microseconds(call: Callable[[], object], device: str, count: int, rounds: int = 5) -> float:
    """Host time of a call whose kernels take less."""
    best = float("inf")
    for _ in range(rounds):
        finetune.wait(device)
        begin = time.perf_counter()
        for _ in range(count):
            call()
        best = min(best, (time.perf_counter() - begin) / count * 1e6)
        finetune.wait(device)
    return round(best, 1)


def calls(device: str, count: int) -> list[dict[str, Any]]:
    """Host time of attention alone, in the layout that models have."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    q, k, v = (torch.randn(1, 64, heads, 64, device=device, dtype=dtype).transpose(1, 2) for heads in (9, 3, 3))
    with_gradients = [t.detach().requires_grad_() for t in (q, k, v)]
    gradient = torch.randn(1, 9, 64, 64, device=device, dtype=dtype)
    rows = []
    for name, function in (("sdpa", sdpa), ("dspattn", dspattn.attention)):

        def forward(function: Any = function) -> Any:
            return function(q, k, v, is_causal=True, enable_gqa=True)

        def recorded(function: Any = function) -> Any:
            return function(*with_gradients, is_causal=True, enable_gqa=True)

        def both(recorded: Any = recorded) -> Any:
            torch.autograd.grad(recorded(), with_gradients, gradient)

        for what, call in (("forward", forward), ("forward, recorded", recorded), ("forward and backward", both)):
            rows.append({"call": name, "what": what, "us": microseconds(call, device, count)})
    return rows


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    torch.set_float32_matmul_precision("high")
    options.batch_sizes = options.batch
    options.batch = max(options.batch_sizes)
    base, windows, _ = finetune.load(options)
    head = results.gpu() if options.device == "cuda" else results.cpu()
    if options.device == "cuda":
        timing.warm_up(1.0)
    head["model"] = "small, random" if options.tiny else "SmolLM2-135M's shape, random"
    rows: list[dict[str, Any]] = [{"case": "calls", "rows": calls(options.device, options.calls)}]
    for row in rows[0]["rows"]:
        print(f"{row['call']:8} {row['what']:24} {row['us']:8.1f} us", flush=True)
    runs = [finetune.start(base, attention, 0, options) for attention in finetune.ATTENTIONS]
    short = windows[:1, : HOST_LENGTH + 1]
    for case, batch in [("host", short), *((f"batch {size}", windows[:size]) for size in options.batch_sizes)]:
        found = timed(runs, batch, options)
        row = {"case": case, "timed": found}
        texts = [f"{r['attention']} {r['ms_per_step']} ms ({r['speed_over_sdpa']} ± {r['two_se']})" for r in found]
        print(f"{case}: {', '.join(texts)}")
        if case != "host":
            row["profiled"] = [profiled(run, batch, options) for run in runs]
            print_differences(row["profiled"])
        sys.stdout.flush()
        rows.append(row)
        options.out.parent.mkdir(parents=True, exist_ok=True)
        results.write(options.out, head, rows)
    print(options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
