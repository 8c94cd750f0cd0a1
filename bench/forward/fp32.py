"""Times the fused forward of fp32 inputs (1:2, products in tf32) beside every fp32 attention of PyTorch, in one process
on the same tensors.

    DSPATTN_BENCH_LIBRARY=... python3 -m bench.forward.fp32 --out bench/results/fp32_h200.json

Peers: SDPA's memory-efficient kernel, SDPA's math path with tf32 allowed, and products and softmax one after the other
in tf32 (torch.bmm, torch.softmax, torch.bmm, which is what a user without SDPA writes). Timing: bench/common/timing.py.
Bars: at least 5 times the fastest peer at n = 4096 and 2 times at every n from 512 on, 4 heads, d = 64, batch 8;
--check exits 1 below one. --before names the shim of another build: the two are then timed by turns, and `of_before` is
how fast this one is beside it. tflops is dense-equivalent: 4 batch heads n^2 d, halved when causal.
"""

import argparse
import sys

import torch
import torch.nn.functional as F  # noqa: N812
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench.common import native, results, timing

BATCH, HEADS = 8, 4
BARS = {512: 2.0, 1024: 2.0, 2048: 2.0, 4096: 5.0}  # d = 64, full
CELLS = [
    *({"n": n, "d": 64} for n in (256, 512, 1024, 2048, 4096)),
    *({"n": n, "d": 64, "causal": True} for n in (512, 1024, 2048, 4096)),
    {"n": 4096, "d": 64, "grouping": "consecutive"},
    *({"n": 4096, "d": d} for d in (32, 96, 128, 192, 256)),
]


def unfused(q, k, v, causal):
    """Three kernels (four under a causal mask), each a whole pass over n x n scores."""
    flat = [x.flatten(0, 1) for x in (q, k, v)]
    scores = torch.bmm(flat[0], flat[1].transpose(1, 2)) * q.shape[-1] ** -0.5
    if causal:
        n = q.shape[-2]
        hidden = torch.ones(n, n, dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(hidden, float("-inf"))
    return torch.bmm(torch.softmax(scores, -1), flat[2])


def peers(sets, causal):
    def sdpa(backend, s):
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(*s, is_causal=causal)

    return {
        "efficient": [lambda s=s: sdpa(SDPBackend.EFFICIENT_ATTENTION, s) for s in sets],
        "math": [lambda s=s: sdpa(SDPBackend.MATH, s) for s in sets],
        "unfused": [lambda s=s: unfused(*s, causal) for s in sets],
    }


def by_turns(graphs, idle, rounds=5):
    """Median microseconds of a call of each, from bursts in turn."""
    times = {name: [] for name in graphs}
    for _ in range(rounds):
        for name, graphed in graphs.items():
            times[name] += timing.burst_times(graphed, idle / rounds)
    return {name: timing.summary(found)["median_us"] for name, found in times.items()}


def measure(cell, idle, library, before=None):
    n, d, causal = cell["n"], cell["d"], cell.get("causal", False)
    grouping = cell.get("grouping", "interleaved")
    flop = 4 * BATCH * HEADS * n * n * d * (0.5 if causal else 1)
    torch.manual_seed(0)
    copies = timing.rotation(4 * BATCH * HEADS * n * d * 4)
    sets = [[torch.randn(BATCH, HEADS, n, d, device="cuda") for _ in range(3)] for _ in range(copies)]
    figures, skipped = {}, {}
    calls = peers(sets, causal)
    calls["ours"] = [
        native.prepare(*s, pattern=(1, 2), grouping=grouping, causal=causal, path=library)[0] for s in sets
    ]
    of_before = {}
    if before:
        old = [native.prepare(*s, pattern=(1, 2), grouping=grouping, causal=causal, path=before)[0] for s in sets]
        turns = by_turns({"ours": timing.Graphed(calls["ours"]), "before": timing.Graphed(old)}, idle)
        of_before = {"of_before": round(turns["before"] / turns["ours"], 3)}
    for name, call in calls.items():
        try:
            figures[name] = timing.burst(timing.Graphed(call), idle)
            figures[name]["tflops"] = round(flop / figures[name]["median_us"] / 1e6, 1)
        except RuntimeError as error:
            figures[name], skipped[name] = None, str(error).splitlines()[0][:120]
        torch.cuda.empty_cache()
    ours = figures.pop("ours")
    if ours is None:
        raise RuntimeError(skipped["ours"])
    ratio = {name: round(f["median_us"] / ours["median_us"], 3) for name, f in figures.items() if f}
    bar = BARS.get(n) if d == 64 and not causal and grouping == "interleaved" else None
    return {
        "kernel": f"sm90_fused_1_2_fp32_d{d}",
        "pattern": "1:2",
        "grouping": grouping,
        "dtype": "fp32",
        "batch": BATCH,
        "heads": HEADS,
        "kv_heads": HEADS,
        "n_q": n,
        "n_k": n,
        "d": d,
        "mask": "causal" if causal else "full",
        "pass": "forward",
        "mode": "burst",
        **ours,
        "peers": figures,
        "ratio": ratio,
        "skipped": skipped,
        "best_ratio": min(ratio.values()) if ratio else None,
        "bar": bar,
        **of_before,
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out")
    parser.add_argument("--idle", type=float, default=0.5, help="seconds of pause before a burst")
    parser.add_argument("--only", nargs="*", default=[], help="cells to take: n=4096 d=64 mask=causal")
    parser.add_argument("--library", help="the shim to time (default: DSPATTN_BENCH_LIBRARY)")
    parser.add_argument("--before", help="another build's shim, timed by turns with this one's")
    parser.add_argument("--check", action="store_true", help="exit 1 when a bar is missed")
    arguments = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = True
    rows, missed = [], False
    facts = results.gpu()
    timing.warm_up()
    wanted = dict(item.split("=") for item in arguments.only)
    for cell in CELLS:
        seen = {**cell, "mask": "causal" if cell.get("causal") else "full"}
        if any(str(seen.get(key)) != value for key, value in wanted.items()):
            continue
        row = measure(cell, arguments.idle, arguments.library, arguments.before)
        rows.append(row)
        if arguments.out:  # after every row: a run that is cut short leaves what it has
            results.write(arguments.out, facts, rows)
        below = row["bar"] is not None and row["best_ratio"] < row["bar"]
        missed |= below
        times = "  ".join(f"{name} {f['median_us']:8.1f}" if f else f"{name} -" for name, f in row["peers"].items())
        print(
            f"n {row['n_q']:5} d {row['d']:3} {row['mask']:6} {row['grouping']:11} ours {row['median_us']:8.1f} us "
            f"{row['tflops']:6.1f} TFLOP/s  {times}  best ratio {row['best_ratio']:.2f}"
            f"{'' if row['bar'] is None else '  bar ' + str(row['bar']) + (' BELOW' if below else '')}"
            f"{'  of before ' + str(row['of_before']) if 'of_before' in row else ''}",
            flush=True,
        )
    return 1 if missed and arguments.check else 0


if __name__ == "__main__":
    sys.exit(main())
