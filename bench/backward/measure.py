"""Times the fused backward, alone and with the forward before it, beside PyTorch's kernels, in one process on the same
tensors.

    DSPATTN_BENCH_LIBRARY=... python3 -m bench.backward.measure --out bench/results/backward_h200.json --check
    python3 -m bench.backward.measure --parts table --only n=4096 d=128 --peers cudnn

Graphs of ours (2:4 and 1:2), cuDNN and FlashAttention-2 take bursts in turn, there and back (bench/common/timing.py).
Parts:
    table      n 512 ... 16384, full and causal, d 64 and 128, backward alone and both passes, bursts
    dims       head dims 96, 192 and 256                      gqa      32 heads sharing 8 key heads beside 32
    mask       a boolean mask and a bias, and                 varlen   a packed batch, beside a dense batch of ours
    sustained  the table's cells with n >= 1024, without a pause
--only keeps the cells that have one of the given values: n=1024,4096 d=64 mask=causal.
"""

import argparse
import sys
import traceback

import torch

from bench.backward import bars
from bench.common import native, results, timing

TOKENS, HIDDEN = 16384, 2048
ROUNDS = 2  # of bursts in turn
PARTS = ("table", "dims", "gqa", "mask", "varlen", "sustained")
PEERS = ("cudnn", "flash2")
PATTERNS = {"2:4": (2, 4), "1:2": (1, 2)}
ATEN = torch.ops.aten


class Cell:
    """One problem: what it is, its tensors, and how each contender is called on them."""

    def __init__(self, n, d, *, mask="full", heads=None, kv_heads=None, batch=None, tensors=None, lengths=None):
        self.n, self.d, self.mask = n, d, mask
        self.heads = heads or HIDDEN // d
        self.kv_heads = kv_heads or self.heads
        self.batch = batch or max(1, TOKENS // n)
        self.causal = mask == "causal"
        self.tensors = tensors or {}  # masks
        self.lengths = lengths
        torch.manual_seed(0)
        rows = [(self.batch, h, n, d) for h in (self.heads, self.kv_heads, self.kv_heads, self.heads)]
        if lengths:
            rows = [(1, self.heads, sum(lengths), d)] * 4
            cumulative = torch.tensor([0, *lengths]).cumsum(0).to("cuda", torch.int32)
            self.tensors = {"cu_q": cumulative, "cu_k": cumulative}
        copies = timing.rotation(sum(2 * torch.Size(shape).numel() for shape in rows))
        make = lambda shape: torch.randn(shape, device="cuda", dtype=torch.bfloat16)  # noqa: E731
        self.sets = [[make(shape) for shape in rows] for _ in range(copies)]  # q, k, v, dO

    def flop(self, passes):
        if self.lengths:
            return sum(bars.flop(1, self.heads, n, self.d, False, passes) for n in self.lengths)
        return bars.flop(self.batch, self.heads, self.n, self.d, self.causal, passes)

    def ours(self, pattern, passes, path=None):
        calls = []
        longest = {"max_q": max(self.lengths), "max_k": max(self.lengths)} if self.lengths else {}
        options = {"pattern": PATTERNS[pattern], "causal": self.causal, "path": path} | longest
        for q, k, v, d_out in self.sets:
            forward, out, lse = native.prepare(q, k, v, **self.tensors, **options)
            forward()
            backward = native.prepare_backward(q, k, v, out, lse, d_out, tensors=self.tensors, **options)[0]
            calls.append(backward if passes == "backward" else lambda f=forward, b=backward: (f(), b()))
        return calls

    def peer(self, name, passes):
        """PyTorch's own operators, called as its autograd calls them."""
        if self.tensors or self.kv_heads != self.heads:
            raise RuntimeError("neither masks nor shared keys")

        def forward(q, k, v):
            if name == "cudnn":
                return ATEN._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, self.causal)
            return ATEN._scaled_dot_product_flash_attention(q, k, v, 0.0, self.causal)

        def backward(q, k, v, d_out, found):
            out, lse, cu_q, cu_k, max_q, max_k, seed, offset, _ = found
            if name == "cudnn":
                return ATEN._scaled_dot_product_cudnn_attention_backward(
                    d_out, q, k, v, out, lse, seed, offset, None, cu_q, cu_k, max_q, max_k, 0.0, self.causal
                )
            return ATEN._scaled_dot_product_flash_attention_backward(
                d_out, q, k, v, out, lse, cu_q, cu_k, max_q, max_k, 0.0, self.causal, seed, offset
            )

        calls = []
        for q, k, v, d_out in self.sets:
            if passes == "both":
                calls.append(lambda q=q, k=k, v=v, d=d_out: backward(q, k, v, d, forward(q, k, v)))
            else:
                found = forward(q, k, v)
                calls.append(lambda q=q, k=k, v=v, d=d_out, found=found: backward(q, k, v, d, found))
        return calls

    def facts(self):
        return {
            "dtype": "bf16", "batch": self.batch, "heads": self.heads, "kv_heads": self.kv_heads,
            "n_q": self.n, "n_k": self.n, "d": self.d, "mask": self.mask,
        }  # fmt: skip


def in_turn(graphs, mode, idle):
    """{name: figures}. Bursts go to and fro: who comes first also comes last, so that a card that slows down is
    nobody's advantage."""
    if mode == "sustained":
        return {name: timing.sustained(graph) for name, graph in graphs.items()}
    times = {name: [] for name in graphs}
    for i in range(ROUNDS):
        for name in list(graphs) if i % 2 == 0 else reversed(graphs):
            times[name] += timing.burst_times(graphs[name], idle)
    return {name: timing.summary(all_times) for name, all_times in times.items()}


class Bench:
    def __init__(self, arguments):
        self.idle, self.peers = arguments.idle, arguments.peers
        self.only = dict(entry.split("=", 1) for entry in arguments.only)
        self.write = lambda rows: None
        self.rows = []

    def wanted(self, **facts):
        return all(str(facts[key]) in self.only[key].split(",") for key in facts if key in self.only)

    def add(self, part, cell, passes, mode, pattern, figures, beside, skipped, by="median_us"):
        """Ratios are of times, or of tflops where the two did not do the same work."""
        ratio = {}
        for name, found in beside.items():
            pair = (found[by], figures[by]) if by == "median_us" else (figures[by], found[by])
            ratio[name] = round(pair[0] / pair[1], 3)
        row = {
            "part": part, "pattern": pattern, "grouping": "interleaved", **cell.facts(), "pass": passes, "mode": mode,
            **figures, "peers": beside, "ratio": ratio, "skipped": skipped,
        }  # fmt: skip
        self.rows.append(row)
        self.write(self.rows)
        print(line_of(row), flush=True)

    def figures(self, graphs, cell, passes, mode):
        found = in_turn(graphs, mode, self.idle)
        for name in found:
            found[name]["tflops"] = round(cell.flop(passes) / found[name]["median_us"] / 1e6, 1)
        return found

    def beside_peers(self, part, cell, passes, mode="burst"):
        graphs, skipped = {}, {}
        for name in self.peers:
            try:
                graphs[name] = timing.Graphed(cell.peer(name, passes))
            except RuntimeError as error:
                skipped[name] = str(error).splitlines()[0][:120]
        names = list(graphs)
        graphs |= {pattern: timing.Graphed(cell.ours(pattern, passes)) for pattern in PATTERNS}
        found = self.figures(graphs, cell, passes, mode)
        for pattern in PATTERNS:
            self.add(part, cell, passes, mode, pattern, found[pattern], {name: found[name] for name in names}, skipped)

    def beside_dense(self, part, cell, dense):
        """Ours on `cell` beside ours on another, by tflops."""
        for pattern in PATTERNS:
            graphs = {"dense batch": timing.Graphed(dense.ours(pattern, "backward"))}
            graphs["ours"] = timing.Graphed(cell.ours(pattern, "backward"))
            found = in_turn(graphs, "burst", self.idle)
            for name, which in (("ours", cell), ("dense batch", dense)):
                found[name]["tflops"] = round(which.flop("backward") / found[name]["median_us"] / 1e6, 1)
            beside = {"dense batch": found["dense batch"]}
            self.add(part, cell, "backward", "burst", pattern, found["ours"], beside, {}, by="tflops")

    def table(self, mode="burst", lengths=bars.LENGTHS):
        for n in sorted(lengths, key=lambda n: n != 4096):  # the most telling first
            for d in (64, 128):
                for mask in bars.MASKS:
                    if self.wanted(n=n, d=d, mask=mask):
                        for passes in ("backward", "both"):
                            self.beside_peers("table", Cell(n, d, mask=mask), passes, mode)

    def sustained(self):
        self.table("sustained", [n for n in bars.LENGTHS if n >= 1024])

    def dims(self):
        for d in (96, 192, 256):
            for mask in bars.MASKS:
                if self.wanted(n=4096, d=d, mask=mask):
                    self.beside_peers("dims", Cell(4096, d, mask=mask), "backward")

    def gqa(self):
        for d in (64, 128):
            if self.wanted(n=4096, d=d):
                self.beside_dense("gqa", Cell(4096, d, heads=32, kv_heads=8), Cell(4096, d, heads=32))

    def mask(self):
        n = 4096
        for d in (64, 128):
            for name in ("bool", "bias"):
                if not self.wanted(n=n, d=d, mask=name):
                    continue
                torch.manual_seed(2)
                if name == "bool":
                    given = {"allowed": torch.rand((1, 1, n, n), device="cuda") < 0.7}
                else:
                    given = {"bias": torch.randn((1, HIDDEN // d, n, n), device="cuda", dtype=torch.bfloat16)}
                self.beside_dense("mask", Cell(n, d, mask=name, tensors=given), Cell(n, d))

    def varlen(self):
        lengths = [256, 4096, 512, 3072, 1024, 2048, 384, 3584, 1408]
        for d in (64, 128):
            if self.wanted(d=d):
                packed = Cell(max(lengths), d, mask="varlen", batch=len(lengths), lengths=lengths)
                # The dense batch with as many tokens and operations: its length is the mean one, weighted by tokens.
                dense_n = round(sum(n * n for n in lengths) / sum(lengths) / 128) * 128
                self.beside_dense("varlen", packed, Cell(dense_n, d, batch=round(sum(lengths) / dense_n)))


def line_of(row):
    beside = "  ".join(
        f"{name} {row['peers'][name]['tflops']:.0f} ({ratio:.3f}x)" for name, ratio in row["ratio"].items()
    )
    return (
        f"{row['part']:6} {row['pass']:8} d {row['d']:3} n {row['n_q']:5} {row['mask']:6} {row['pattern']} "
        f"{row['mode']:9} {row['median_us']:8.1f} us {row['tflops']:6.0f} TFLOP/s  {beside}  {bars.verdict(row)}"
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", help="JSON file to write")
    parser.add_argument("--parts", type=lambda text: text.split(","), default=list(PARTS))
    parser.add_argument("--only", nargs="*", default=[], metavar="KEY=VALUES")
    parser.add_argument("--peers", type=lambda text: text.split(","), default=list(PEERS))
    parser.add_argument("--idle", type=float, default=0.5, help="seconds of pause before a burst")
    parser.add_argument("--check", action="store_true", help="exit with 1 when a floor does not hold")
    arguments = parser.parse_args()
    for given, known, what in ((arguments.parts, PARTS, "parts"), (arguments.peers, PEERS, "peers")):
        if unknown := [name for name in given if name not in known]:
            parser.error(f"{what}: expected some of {', '.join(known)}, got {', '.join(unknown)}")
    if unknown := [entry for entry in arguments.only if entry.split("=")[0] not in ("n", "d", "mask")]:
        parser.error(f"only: expected n=, d= or mask=, got {' '.join(unknown)}")

    bench = Bench(arguments)
    if arguments.out:
        facts = results.gpu()
        bench.write = lambda rows: results.write(arguments.out, facts, rows)
    timing.warm_up()
    broken = []
    for part in arguments.parts:
        try:
            getattr(bench, part)()
        except Exception:  # the other parts still count
            traceback.print_exc()
            broken.append(part)
        torch.cuda.empty_cache()
    if broken:
        print(f"not measured to the end: {', '.join(broken)}")
    verdicts = [bars.verdict(row) for row in bench.rows]
    counts = {name: verdicts.count(name) for name in ("goal", "floor", "BELOW")}
    print(f"{counts['goal']} at the goal, {counts['floor']} between floor and goal, {counts['BELOW']} below the floor")
    return 1 if broken or (arguments.check and counts["BELOW"]) else 0


if __name__ == "__main__":
    sys.exit(main())
