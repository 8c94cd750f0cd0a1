"""Times the fused forward beside PyTorch's attention kernels, in one process on the same tensors.

    DSPATTN_BENCH_LIBRARY=... python3 -m bench.forward.measure --out bench/results/forward_h200.json --check
    python3 -m bench.forward.measure --library old=a.so --library new=b.so --parts table --only n=4096 --peers cudnn

bench/common/timing.py says how; in table and d256 ours and cuDNN take bursts in turn, there and back. tflops is
dense-equivalent: 4 batch heads n_q n_k d, halved when causal. Parts:
    table      every length, full and causal, 2:4 and 1:2, d 64 and 128, bursts, beside cuDNN
    grouping   consecutive groups beside interleaved        fp16     beside bf16
    d256       head dim 256                                 gqa      32 heads sharing 8 key heads beside 32
    varlen     random lengths 128 ... 4096 in one packed batch beside a dense batch of the same tokens and length
    memory     what a call takes beyond its inputs and outputs
    sustained  the table's cells with n >= 1024 again, without a pause
    mask       a boolean mask and a bias, beside SDPA's kernels with the same one
    peers      the other kernels of PyTorch on the table's cells
A part may be narrowed by itself and come more than once: sustained:n=4096,mask:d=64,mask:d=128.
--only keeps the cells that have one of the given values: n=256,4096 d=64 mask=causal pattern=2:4. The file is written
anew after every row; --seconds says after how many no further cell is begun.
"""

import argparse
import sys
import time
import traceback

import torch
import torch.nn.functional as F  # noqa: N812
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench.common import native, results, timing
from bench.forward import bars

TOKENS, HIDDEN = 16384, 2048
ROUNDS = 2  # of the bursts that ours and a peer take in turn
PARTS = ("table", "d256", "grouping", "fp16", "gqa", "varlen", "memory", "sustained", "mask", "peers")
PEERS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash2": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "unfused": None,
}
PATTERNS = {"2:4": (2, 4), "1:2": (1, 2)}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def tensors(shapes, dtype):
    """Copies of q, k, v that together exceed the L2 cache."""
    torch.manual_seed(0)
    copies = timing.rotation(sum(2 * torch.Size(shape).numel() for shape in shapes))
    return [[torch.randn(shape, device="cuda", dtype=dtype) for shape in shapes] for _ in range(copies)]


def unfused(q, k, v):
    return torch.softmax(q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5, dim=-1) @ v


class Cell:
    """One problem: what it is, its tensors, and how each contender is called on them."""

    def __init__(
        self, n, d, *, mask="full", dtype="bf16", heads=None, kv_heads=None, batch=None, allowed=None, bias=None
    ):
        self.n, self.d, self.mask, self.dtype = n, d, mask, dtype
        self.heads = heads or HIDDEN // d
        self.kv_heads = kv_heads or self.heads
        self.batch = batch or max(1, TOKENS // n)
        self.causal = mask == "causal"
        self.allowed, self.bias = allowed, bias
        self.flop = 4 * self.batch * self.heads * n * n * d * (0.5 if self.causal else 1)
        self.sets = tensors([(self.batch, h, n, d) for h in (self.heads, self.kv_heads, self.kv_heads)], DTYPES[dtype])

    def prepared(self, path, pattern, grouping="interleaved"):
        """(run, out, lse) of every copy of the inputs."""
        options = {"pattern": PATTERNS[pattern], "grouping": grouping, "path": path}
        options |= {"causal": self.causal, "allowed": self.allowed, "bias": self.bias}
        return [native.prepare(*qkv, **options) for qkv in self.sets]

    def ours(self, path, pattern, grouping="interleaved"):
        return [run for run, _, _ in self.prepared(path, pattern, grouping)]

    def peer(self, name, attn_mask=None):
        if name == "unfused":
            if self.causal or self.n > 4096 or self.kv_heads != self.heads or attn_mask is not None:
                raise RuntimeError("full attention up to n = 4096 only")
            return [lambda qkv=qkv: unfused(*qkv) for qkv in self.sets]
        options = {"is_causal": self.causal, "enable_gqa": self.kv_heads != self.heads, "attn_mask": attn_mask}
        return [lambda qkv=qkv: F.scaled_dot_product_attention(*qkv, **options) for qkv in self.sets]

    def facts(self):
        return {
            "dtype": self.dtype, "batch": self.batch, "heads": self.heads, "kv_heads": self.kv_heads,
            "n_q": self.n, "n_k": self.n, "d": self.d, "mask": self.mask,
        }  # fmt: skip


class Packed:
    """Random lengths 128 ... 4096 end to end, as [tokens, heads, d]."""

    def __init__(self, d):
        generator = torch.Generator().manual_seed(1)
        lengths = []
        while (left := TOKENS - sum(lengths)) > 0:
            length = int(torch.randint(128, 4097, (), generator=generator))
            if left - length < 128:  # the last one takes what is left, in two where that is too long
                length = left if left <= 4096 else left // 2
            lengths.append(length)
        self.lengths, self.d, self.heads = lengths, d, HIDDEN // d
        self.flop = sum(4 * self.heads * n * n * d for n in lengths)
        sets = tensors([(TOKENS, self.heads, d)] * 3, torch.bfloat16)
        self.sets = [[x.transpose(0, 1).unsqueeze(0) for x in qkv] for qkv in sets]
        self.cumulative = torch.tensor([0, *lengths]).cumsum(0).to("cuda", torch.int32)
        # The dense batch with as many tokens and operations: its length is the mean one, weighted by tokens.
        self.dense_n = round(sum(n * n for n in lengths) / TOKENS / 128) * 128

    def ours(self, path, pattern):
        options = {"cu_q": self.cumulative, "cu_k": self.cumulative}
        options |= {"max_q": max(self.lengths), "max_k": max(self.lengths), "path": path}
        return [native.prepare(*qkv, pattern=PATTERNS[pattern], **options)[0] for qkv in self.sets]

    def facts(self):
        return {
            "dtype": "bf16", "batch": len(self.lengths), "heads": self.heads, "kv_heads": self.heads,
            "n_q": max(self.lengths), "n_k": max(self.lengths), "d": self.d, "mask": "varlen", "lengths": self.lengths,
        }  # fmt: skip


class Bench:
    def __init__(self, arguments):
        self.libraries = dict(entry.split("=", 1) for entry in arguments.library) or {"": None}
        self.idle = arguments.idle
        self.chosen_peers = arguments.peers
        self.only = dict(entry.split("=", 1) for entry in arguments.only)
        self.deadline = time.monotonic() + arguments.seconds
        self.left_out = 0  # cells for which there was no time
        self.write = lambda rows: None
        self.rows = []

    def wanted(self, **facts):
        """Whether a cell is asked for, and there is time for it."""
        if not all(str(facts[key]) in self.only[key].split(",") for key in facts if key in self.only):
            return False
        if time.monotonic() <= self.deadline:
            return True
        self.left_out += 1
        return False

    def patterns(self):
        return [pattern for pattern in PATTERNS if pattern in self.only.get("pattern", ",".join(PATTERNS)).split(",")]

    def time(self, calls, flop):
        """{mode: figures} of some calls that do the same on copies of their inputs: bursts."""
        return self.time_in_turn({"": timing.Graphed(calls)}, flop, rounds=1)[""]

    def time_in_turn(self, graphs, flop, mode="burst", rounds=ROUNDS):
        """{name: {mode: figures}} of graphs that do as much. Bursts go to and fro: who comes first also comes last, so
        that a card that slows down is nobody's advantage; the median is over all rounds."""
        if mode == "burst":
            times = {name: [] for name in graphs}
            for i in range(rounds):
                for name in list(graphs) if i % 2 == 0 else reversed(graphs):
                    times[name] += timing.burst_times(graphs[name], self.idle)
            results = {name: timing.summary(all_times) for name, all_times in times.items()}
        else:
            results = {name: timing.sustained(graphed) for name, graphed in graphs.items()}
        for figures in results.values():
            figures["tflops"] = round(flop / figures["median_us"] / 1e6, 1)
        return {name: {mode: figures} for name, figures in results.items()}

    def graph_peers(self, cell, peers, **options):
        """({name: graph}, {name: why not})."""
        graphs, skipped = {}, {}
        for name in peers:
            try:
                backend = PEERS[name]
                with sdpa_kernel(backend if backend is not None else SDPBackend.MATH):
                    graphs[name] = timing.Graphed(cell.peer(name, **options))
            except RuntimeError as error:
                skipped[name] = str(error).splitlines()[0][:120]
        return graphs, skipped

    def time_peers(self, cell, peers, **options):
        graphs, skipped = self.graph_peers(cell, peers, **options)
        return self.time_in_turn(graphs, cell.flop, rounds=1) | dict.fromkeys(skipped), skipped

    def time_beside_cudnn(self, part, cell, mode="burst"):
        """Ours, every pattern and library, and cuDNN in turn; adds the rows."""
        graphs, skipped = self.graph_peers(cell, [peer for peer in self.chosen_peers if peer == "cudnn"])
        names = list(graphs)
        ours = [(pattern, label) for pattern in self.patterns() for label in self.libraries]
        graphs |= {key: timing.Graphed(cell.ours(self.libraries[key[1]], key[0])) for key in ours}
        results = self.time_in_turn(graphs, cell.flop, mode)
        beside = {name: results[name] for name in names} | dict.fromkeys(skipped)
        for pattern, label in ours:
            self.add(part, cell, pattern, label, results[pattern, label], beside, skipped)

    def add(self, part, cell, pattern, label, modes, beside, skipped=None, by="median_us", grouping="interleaved"):
        """A row a mode. Ratios are of times, or of tflops where the two did not do the same work."""
        for mode, figures in modes.items():
            peers = {name: (found or {}).get(mode) for name, found in beside.items()}
            ratio = {}
            for name, found in peers.items():
                if found and by == "median_us":
                    ratio[name] = round(found["median_us"] / figures["median_us"], 3)
                elif found:
                    ratio[name] = round(figures["tflops"] / found["tflops"], 3)
            facts = cell.facts()
            row = {
                "part": part,
                "kernel": f"sm90_fused_{pattern.replace(':', '_')}_{facts['dtype']}_d{facts['d']}",
                **({"library": label} if label else {}),
                "pattern": pattern, "grouping": grouping, **facts, "pass": "forward", "mode": mode, **figures,
                "peers": peers, "ratio": ratio, "skipped": skipped or {},
            }  # fmt: skip
            self.rows.append(row)
            self.write(self.rows)
            print(line_of(row), flush=True)

    def cells(self, lengths):
        """(n, d, mask) of the table, those that are asked for."""
        for n in sorted(lengths, key=lambda n: n != 4096):  # the most telling first
            for d in (64, 128):
                for mask in bars.MASKS:
                    if self.wanted(n=n, d=d, mask=mask):
                        yield n, d, mask

    def table(self, mode="burst", lengths=bars.LENGTHS):
        for n, d, mask in self.cells(lengths):
            self.time_beside_cudnn("table", Cell(n, d, mask=mask), mode)

    def sustained(self):
        self.table("sustained", [n for n in bars.LENGTHS if n >= 1024])

    def peers(self):
        """Adds PyTorch's other kernels to the rows of the table that were measured before."""
        for n, d, mask in self.cells(bars.LENGTHS):
            place = {"part": "table", "mode": "burst", "n_q": n, "d": d, "mask": mask}
            rows = [row for row in self.rows if all(row[key] == value for key, value in place.items())]
            if not rows:
                continue
            cell = Cell(n, d, mask=mask)
            beside, skipped = self.time_peers(cell, [peer for peer in self.chosen_peers if peer != "cudnn"])
            for row in rows:
                for name, found in beside.items():
                    row["peers"][name] = (found or {}).get("burst")
                    if found:
                        row["ratio"][name] = round(found["burst"]["median_us"] / row["median_us"], 3)
                row["skipped"] = row["skipped"] | skipped
                print(line_of(row), flush=True)
            self.write(self.rows)

    def against_another(self, part, first, second, beside_name, second_grouping="interleaved"):
        """Our `second` cell beside our own `first`; patterns and libraries in turn."""
        for pattern in self.patterns():
            for label, path in self.libraries.items():
                beside = {beside_name: self.time(first.ours(path, pattern), first.flop)}
                calls = (
                    second.ours(path, pattern, second_grouping) if part == "grouping" else second.ours(path, pattern)
                )
                modes = self.time(calls, second.flop)
                same = first.flop == second.flop
                self.add(
                    part, second, pattern, label, modes, beside, by="median_us" if same else "tflops",
                    grouping=second_grouping,
                )  # fmt: skip

    def grouping(self):
        for d in (64, 128):
            if self.wanted(n=4096, d=d):
                cell = Cell(4096, d)
                self.against_another("grouping", cell, cell, "interleaved", "consecutive")

    def fp16(self):
        for d in (64, 128):
            if self.wanted(n=4096, d=d):
                self.against_another("fp16", Cell(4096, d), Cell(4096, d, dtype="fp16"), "bf16")

    def d256(self):
        for mask in bars.MASKS:
            if self.wanted(n=4096, d=256, mask=mask):
                self.time_beside_cudnn("d256", Cell(4096, 256, mask=mask))

    def gqa(self):
        for d in (64, 128):
            if self.wanted(n=4096, d=d):
                shared = Cell(4096, d, heads=32, kv_heads=8)
                self.against_another("gqa", Cell(4096, d, heads=32), shared, "dense batch")

    def varlen(self):
        for d in (64, 128):
            if self.wanted(d=d):
                packed = Packed(d)
                dense = Cell(packed.dense_n, d, batch=round(TOKENS / packed.dense_n))
                self.against_another("varlen", dense, packed, "dense batch")

    def mask(self):
        for d in (64, 128):
            for n in (1024, 4096):
                heads = HIDDEN // d
                for name, shape in (("bool", (1, 1, n, n)), ("bias", (1, heads, n, n))):
                    if not self.wanted(n=n, d=d, mask=name):
                        continue
                    torch.manual_seed(2)
                    if name == "bool":
                        given = torch.rand(shape, device="cuda") < 0.7
                        cell = Cell(n, d, mask=name, allowed=given)
                        # SDPA turns a boolean mask into an additive one in every call: it may also be given that.
                        additive = torch.zeros(shape, device="cuda", dtype=torch.bfloat16)
                        masks = {"": given, " additive": additive.masked_fill_(~given, -torch.inf)}
                    else:
                        given = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
                        cell = Cell(n, d, mask=name, bias=given)
                        masks = {"": given}
                    beside, skipped = {}, {}
                    for suffix, mask in masks.items():
                        peers = [peer for peer in self.chosen_peers if peer in ("cudnn", "efficient")]
                        found, refused = self.time_peers(cell, peers, attn_mask=mask)
                        beside |= {peer + suffix: modes for peer, modes in found.items()}
                        skipped |= {peer + suffix: reason for peer, reason in refused.items()}
                    for pattern in self.patterns():
                        for label, path in self.libraries.items():
                            modes = self.time(cell.ours(path, pattern), cell.flop)
                            self.add("mask", cell, pattern, label, modes, beside, skipped)

    def memory(self):
        """Bytes a call takes beyond q, k, v and the output: what the device has less of, and the log-sum-exp."""
        for n in (1024, 16384):
            for label, path in self.libraries.items():
                if not self.wanted(n=n, d=64):
                    continue
                cell = Cell(n, 64)
                run, _, lse = native.prepare(*cell.sets[0], path=path)
                run()  # loads the kernel's code
                torch.cuda.synchronize()
                before, _ = torch.cuda.mem_get_info()
                for _ in range(3):
                    run()
                torch.cuda.synchronize()
                taken = before - torch.cuda.mem_get_info()[0]
                row = {
                    "part": "memory", "kernel": "sm90_fused_2_4_bf16_d64", **({"library": label} if label else {}),
                    "pattern": "2:4", "grouping": "interleaved", **cell.facts(), "pass": "forward", "mode": "memory",
                    "device_bytes_taken": taken, "lse_bytes": lse.numel() * 4,
                    "lse_bytes_per_row": lse.numel() * 4 / (cell.batch * cell.heads * n),
                    "peers": {}, "ratio": {}, "skipped": {},
                }  # fmt: skip
                self.rows.append(row)
                self.write(self.rows)
                print(f"memory n {n:5}: {taken} bytes of the device taken, LSE {row['lse_bytes']} bytes", flush=True)


def line_of(row):
    beside = "  ".join(
        f"{name} {row['peers'][name]['tflops']:.0f} ({ratio:.3f}x)" for name, ratio in row["ratio"].items()
    )
    clock = f" {row['sm_clock_mhz']} MHz" if row.get("sm_clock_mhz") else ""
    return (
        f"{row['part']:8} d {row['d']:3} n {row['n_q']:5} {row['mask']:6} {row['dtype']} {row['pattern']} "
        f"{row['mode']:9} {row.get('library', ''):8} {row['median_us']:8.1f} us {row['tflops']:6.0f} TFLOP/s{clock}  "
        f"{beside}  {bars.verdict(row)}"
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", help="JSON file to write")
    parser.add_argument("--library", action="append", default=[], metavar="LABEL=PATH", help="a build; may be repeated")
    parser.add_argument("--parts", type=lambda text: text.split(","), default=list(PARTS))
    parser.add_argument("--only", nargs="*", default=[], metavar="KEY=VALUES")
    parser.add_argument("--peers", type=lambda text: text.split(","), default=list(PEERS))
    parser.add_argument("--idle", type=float, default=0.5, help="seconds of pause before a burst")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no cell after this many")
    parser.add_argument("--no-sustained", action="store_true", help="leave out that part")
    parser.add_argument("--check", action="store_true", help="exit with 1 when a floor does not hold or was not judged")
    arguments = parser.parse_args()
    names = [part.split(":")[0] for part in arguments.parts]
    for given, known, what in ((names, PARTS, "parts"), (arguments.peers, PEERS, "peers")):
        if unknown := [name for name in given if name not in known]:
            parser.error(f"{what}: expected some of {', '.join(known)}, got {', '.join(unknown)}")
    narrowed = arguments.only + [part.split(":")[1] for part in arguments.parts if ":" in part]
    if unknown := [entry for entry in narrowed if entry.split("=")[0] not in ("n", "d", "mask", "pattern")]:
        parser.error(f"only: expected n=, d=, mask= or pattern=, got {' '.join(unknown)}")

    bench = Bench(arguments)
    if arguments.out:
        facts = results.gpu()
        bench.write = lambda rows: results.write(arguments.out, facts, rows)
    timing.warm_up()
    broken = []
    for part, _, narrowing in (entry.partition(":") for entry in arguments.parts):
        if part == "sustained" and arguments.no_sustained:
            continue
        bench.only = dict(entry.split("=", 1) for entry in [*arguments.only, *narrowing.split()])
        try:
            getattr(bench, part)()
        except Exception:  # the other parts still count
            traceback.print_exc()
            broken.append(part)
        torch.cuda.empty_cache()
    if broken:
        print(f"not measured to the end: {', '.join(broken)}")
    if bench.left_out:
        print(f"no time for {bench.left_out} cells")
    counts = bars.counts(bench.rows)
    print(
        f"{counts['goal']} at the goal, {counts['floor']} between floor and goal, {counts['BELOW']} below the floor, "
        f"{counts['unjudged']} with a bar and nothing to compare with"
    )
    return 1 if broken or (arguments.check and not (bars.all_hold(counts) and not bench.left_out)) else 0


if __name__ == "__main__":
    sys.exit(main())
