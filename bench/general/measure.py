"""Times the general kernel's forward or backward, forced by name, beside PyTorch's in one process on the same tensors.

    DSPATTN_BENCH_LIBRARY=... python3 -m bench.general.measure --out bench/results/general_h200.json --check
    python3 -m bench.general.measure --only n=4096 d=128 pattern=2:4,dense
    python3 -m bench.general.measure --pass backward --out bench/results/general_backward_h200.json

bf16 beside the FLASH_ATTENTION back end (FlashAttention-2): both are mma.sync, on any card since Ampere, so that the
ratio says what sparse tensor cores bring. fp32 (tf32 allowed) beside the EFFICIENT_ATTENTION back end and the MATH one.
Ours and the peers take bursts in turn, there and back (bench/common/timing.py). --check exits 1 where a ratio to the
fastest peer is below its floor (bench/general/cells.py).
"""

import argparse
import sys
import time

import torch
import torch.nn.functional as F  # noqa: N812
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench.common import native, results, timing
from bench.general import peers
from bench.general.cells import PATTERNS, chosen, flop, shape, verdict

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
PEERS = {
    "bf16": {"flash2": SDPBackend.FLASH_ATTENTION},
    "fp32": {"efficient": SDPBackend.EFFICIENT_ATTENTION, "math": SDPBackend.MATH},
}


def forward_calls(cell, sets, library):
    """(calls of ours, {name: calls of a peer})."""
    causal = cell["mask"] == "causal"
    options = {"pattern": PATTERNS[cell["pattern"]], "causal": causal, "kernel": f"general_{cell['dtype']}"}
    ours = [native.prepare(*qkv, path=library, **options)[0] for qkv, _ in sets]

    def calls(backend):
        with sdpa_kernel(backend):
            return timing.Graphed(
                [lambda qkv=qkv: F.scaled_dot_product_attention(*qkv, is_causal=causal) for qkv, _ in sets]
            )

    return ours, {name: lambda b=backend: calls(b) for name, backend in PEERS[cell["dtype"]].items()}


def backward_calls(cell, sets, library):
    causal = cell["mask"] == "causal"
    options = {"pattern": PATTERNS[cell["pattern"]], "causal": causal, "kernel": f"general_{cell['dtype']}"}
    ours = []
    for qkv, d_out in sets:
        run, out, lse = native.prepare(*qkv, path=library, **options)
        run()
        ours.append(native.prepare_backward(*qkv, out, lse, d_out, path=library, **options)[0])

    def calls(make):
        return timing.Graphed([make(*qkv, d_out, causal) for qkv, d_out in sets])

    return ours, {name: lambda n=name: calls(peers.BACKWARD[n]) for name in PEERS[cell["dtype"]]}


def graphs_of(cell, library, passes):
    """({name: graph}, {name: why not}) of ours and the peers on copies of the inputs that exceed the L2 cache."""
    batch, heads = shape(cell)
    size = (batch, heads, cell["n"], cell["d"])
    dtype = DTYPES[cell["dtype"]]
    torch.manual_seed(0)
    copies = timing.rotation(4 * torch.Size(size).numel() * dtype.itemsize)
    make = lambda: torch.randn(size, device="cuda", dtype=dtype)  # noqa: E731
    sets = [([make() for _ in range(3)], make()) for _ in range(copies)]  # q, k, v; the output's gradient
    ours, others = (backward_calls if passes == "backward" else forward_calls)(cell, sets, library)
    graphs, skipped = {"ours": timing.Graphed(ours)}, {}
    for name, make_graph in others.items():
        try:
            graphs[name] = make_graph()
        except RuntimeError as error:
            skipped[name] = str(error).splitlines()[0][:120]
    return graphs, skipped


def measure(cell, idle, rounds, library, passes):
    graphs, skipped = graphs_of(cell, library, passes)
    times = {name: [] for name in graphs}
    for i in range(rounds):
        for name in list(graphs) if i % 2 == 0 else reversed(graphs):
            times[name] += timing.burst_times(graphs[name], idle)
    figures = {name: timing.summary(found) for name, found in times.items()}
    for found in figures.values():
        found["tflops"] = round(flop(cell, passes) / found["median_us"] / 1e6, 1)
    ours = figures.pop("ours")
    ratio = {name: round(found["median_us"] / ours["median_us"], 3) for name, found in figures.items()}
    batch, heads = shape(cell)
    best = min(ratio.values(), default=None)
    return {
        "kernel": f"general_{cell['dtype']}", "pattern": cell["pattern"], "grouping": "interleaved",
        "dtype": cell["dtype"], "batch": batch, "heads": heads, "kv_heads": heads, "n_q": cell["n"], "n_k": cell["n"],
        "d": cell["d"], "mask": cell["mask"], "pass": passes, "mode": "burst", **ours, "peers": figures,
        "ratio": ratio, "skipped": skipped, "verdict": verdict(cell, best, passes),
    }  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out")
    parser.add_argument("--pass", dest="passes", choices=("forward", "backward"), default="forward")
    parser.add_argument("--idle", type=float, default=0.3, help="seconds of pause before a burst")
    parser.add_argument("--rounds", type=int, default=2, help="bursts of each, every second time in the opposite order")
    parser.add_argument("--only", nargs="*", default=[], help="cells to take: n=256,4096 d=64 mask=causal pattern=2:4")
    parser.add_argument("--library", help="the shim to time (default: DSPATTN_BENCH_LIBRARY)")
    parser.add_argument("--seconds", type=float, default=1e9, help="after these no further cell is begun")
    parser.add_argument("--check", action="store_true", help="exit 1 when a floor is missed")
    arguments = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = True
    facts, rows = results.gpu(), []
    timing.warm_up()
    began = time.monotonic()  # of measuring: starting up alone may take several seconds
    for cell in chosen(dict(entry.split("=", 1) for entry in arguments.only), arguments.passes):
        if time.monotonic() - began > arguments.seconds:
            break
        row = measure(cell, arguments.idle, arguments.rounds, arguments.library, arguments.passes)
        rows.append(row)
        print(
            f"{row['dtype']} {row['pattern']:5} d {row['d']:3} n {row['n_q']:5} {row['mask']:6} "
            f"{row['median_us']:9.1f} us {row['tflops']:6.1f} TFLOP/s  {row['ratio']} {row['verdict']}",
            flush=True,
        )
        if arguments.out:  # after every row: a run that is cut short leaves what it has
            results.write(arguments.out, facts, rows)
        torch.cuda.empty_cache()
    missed = [row for row in rows if row["verdict"] == "BELOW"]
    took = time.monotonic() - began
    print(f"{len(rows)} cells, {len(missed)} below their floors; {took:.0f} s of measuring")
    return 1 if arguments.check and (missed or not rows) else 0


if __name__ == "__main__":
    sys.exit(main())
