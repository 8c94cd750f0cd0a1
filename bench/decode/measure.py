"""Times attention of few queries beside the fastest dense kernels of PyTorch, in one process on the same tensors.

    DSPATTN_BENCH_LIBRARY=... python3 -m bench.decode.measure --out bench/results/decode_h200.json --check

bf16, CUDA graphs, bursts (bench/common/timing.py); peers are SDPA's cuDNN and FlashAttention-2 back ends, with
enable_gqa where heads share keys. Cells and bars: bench/decode/cells.py. bytes_per_s counts what must be read: K, and
the rows of V that are kept where all rows of a key head keep the same. --parts and --only keep some cells:
--parts one,shared --only d=128 batch=1 pattern=1:2. A cell that the library does not serve is reported and skipped.
"""

import argparse
import sys

import torch
import torch.nn.functional as F  # noqa: N812
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench.common import native, results, timing
from bench.decode.cells import cells, row_of

PEERS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash2": SDPBackend.FLASH_ATTENTION}
PATTERNS = {"2:4": (2, 4), "1:2": (1, 2)}
ROUNDS = 2  # ours and the peers take bursts in turn


def pages_of(tensor, page, table):
    """[batch, heads, n, d] as pages, in the order that the table says."""
    batch, heads, n, d = tensor.shape
    split = tensor.view(batch, heads, n // page, page, d).transpose(1, 2).reshape(-1, heads, page, d)
    pages = torch.empty_like(split)
    pages[table.flatten().long()] = split
    return pages


def inputs_of(cell):
    """Copies of q, k, v that together exceed the L2 cache."""
    torch.manual_seed(0)
    shapes = [(cell.batch, cell.heads, cell.n_q, cell.d)] + [(cell.batch, cell.kv_heads, cell.n_k, cell.d)] * 2
    copies = timing.rotation(cell.dense_bytes)
    return [[torch.randn(s, device="cuda", dtype=torch.bfloat16) for s in shapes] for _ in range(copies)]


def ours_of(cell, sets, pattern, path):
    options = {"pattern": PATTERNS[pattern], "path": path, "choice": cell.choice}
    if cell.lengths:
        options["key_lengths"] = torch.full((cell.batch,), cell.n_k, device="cuda", dtype=torch.int32)
    if not cell.page:
        return [native.prepare(*qkv, **options)[0] for qkv in sets]
    blocks = cell.n_k // cell.page
    table = torch.randperm(cell.batch * blocks, device="cuda").to(torch.int32).view(cell.batch, blocks)
    return [
        native.prepare(q, pages_of(k, cell.page, table), pages_of(v, cell.page, table), block_table=table, **options)[0]
        for q, k, v in sets
    ]


def peers_of(cell, sets):
    def call(backend, qkv):
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(*qkv, enable_gqa=cell.heads != cell.kv_heads)

    return {name: [lambda s=s, b=backend: call(b, s) for s in sets] for name, backend in PEERS.items()}


def measure(cell, patterns, idle, path):
    """Rows of a cell, one a pattern."""
    sets = inputs_of(cell)
    calls = peers_of(cell, sets)
    graphs, skipped = {}, {}
    for pattern in patterns:
        try:
            calls[pattern] = ours_of(cell, sets, pattern, path)
        except RuntimeError as error:
            skipped[pattern] = str(error).splitlines()[0][:200]
    for name, each in calls.items():
        try:
            graphs[name] = timing.Graphed(each)
        except RuntimeError as error:
            skipped[name] = str(error).splitlines()[0][:200]
    times = {name: [] for name in graphs}
    for _ in range(ROUNDS):
        for name, graphed in graphs.items():
            times[name] += timing.burst_times(graphed, idle / ROUNDS)
    found = {name: timing.summary(each) for name, each in times.items()}
    peers = {name: found.get(name) for name in PEERS}
    for pattern in patterns:
        if pattern not in found:
            print(f"{cell.facts()} {pattern}: not served: {skipped[pattern]}", flush=True)
    return [row_of(cell, p, found[p], peers, skipped) for p in patterns if p in found]


def line_of(row):
    beside = "  ".join(f"{name} {ratio:.3f}x" for name, ratio in row["ratio"].items())
    return (
        f"{row['part']:8} d {row['d']:3} batch {row['batch']:2} heads {row['heads']}/{row['kv_heads']:<2} "
        f"n_q {row['n_q']:4} n_k {row['n_k']:6} {row['pattern']} {row['median_us']:8.1f} us "
        f"{row['bytes_per_s'] / 1e12:5.2f} TB/s ({row['of_card']:.0%})  {beside}  {row['verdict']}"
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", help="JSON file to write")
    parser.add_argument("--library", help="the shim of another build than DSPATTN_BENCH_LIBRARY's")
    parser.add_argument("--parts", type=lambda text: text.split(","), help="some of the parts")
    parser.add_argument("--only", nargs="*", default=[], metavar="KEY=VALUES", help="d=128 batch=1,16 pattern=1:2 ...")
    parser.add_argument("--idle", type=float, default=0.2, help="seconds of pause before a burst")
    parser.add_argument("--check", action="store_true", help="exit with 1 when a floor does not hold")
    arguments = parser.parse_args()
    only = {key: values.split(",") for key, values in (entry.split("=", 1) for entry in arguments.only)}
    wanted = only.pop("pattern", list(PATTERNS))
    patterns = [p for p in PATTERNS if p in wanted]
    chosen = [c for c in cells() if not arguments.parts or c.part in arguments.parts]
    for key, values in only.items():
        if chosen and key not in chosen[0].facts():
            parser.error(f"only: expected one of {', '.join(chosen[0].facts())}, pattern, got {key}")
        chosen = [c for c in chosen if str(c.facts()[key]) in values]
    if not chosen:
        parser.error("parts, only: expected some cell, got none")
    facts = results.gpu()
    timing.warm_up()
    rows = []
    for cell in chosen:
        for row in measure(cell, patterns, arguments.idle, arguments.library):
            rows.append(row)
            print(line_of(row), flush=True)
        if arguments.out:
            results.write(arguments.out, facts, rows)
        torch.cuda.empty_cache()
    verdicts = [row["verdict"] for row in rows]
    print(", ".join(f"{verdicts.count(name)} {name}" for name in ("goal", "floor", "BELOW")))
    return 1 if arguments.check and ("BELOW" in verdicts or not rows) else 0


if __name__ == "__main__":
    sys.exit(main())
