"""Times the three-kernel pipeline on a GPU, stage by stage, beside PyTorch's unfused dense attention.

    python3 -m bench.pipeline.measure --out bench/results/pipeline_h200.json

Every cell alternates ours and theirs in one process: bursts of `--repeats` launches after a warm-up, medians of CUDA
events. The scores of a cell exceed the L2 cache many times over. Peers are torch.bmm, torch.softmax and torch.bmm (tf32
allowed for fp32); ceilings are a large copy and a large matrix product measured in the same run.
"""

import argparse
import math
import sys

import torch

from bench.common import results, timing
from bench.pipeline.problem import Pipeline

HEADS, HEAD_DIM = 4, 64
LENGTHS = (256, 384, 512, 1024, 2048, 4096)
CASES = ((torch.bfloat16, (2, 4)), (torch.bfloat16, (1, 2)), (torch.float32, (1, 2)))
NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


def kernel_name():
    """The row of the kernel table that the pipeline's functions run on this GPU."""
    return "sm90_pipeline" if torch.cuda.get_device_capability()[0] == 9 else "sm80_pipeline"


def ceilings(repeats):
    """Bytes per second of a copy (read plus written), and FLOP/s of bf16 and tf32 products."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    functions = {"copy": lambda: target.copy_(source)}
    for dtype in (torch.bfloat16, torch.float32):
        a, b = (torch.randn(8192, 8192, device="cuda").to(dtype) for _ in range(2))
        functions[NAMES[dtype]] = lambda a=a, b=b: a @ b
    medians = {name: timed["median_us"] for name, timed in timing.in_turn(functions, repeats).items()}
    return {
        "copy_tb_per_s": 2 * source.numel() / medians["copy"] / 1e6,
        "bf16_tflops": 2 * 8192**3 / medians["bf16"] / 1e6,
        "tf32_tflops": 2 * 8192**3 / medians["fp32"] / 1e6,
    }


def bytes_of(stage, n, places, nonzero_bytes, metadata_bits, value_bytes, d):
    """The fewest bytes a stage of one matrix moves through memory."""
    nonzeros = n * places // 2 * nonzero_bytes
    metadata = n * places * metadata_bits // 8
    rows = n * d * value_bytes
    return {
        "qk_prune": 2 * rows + nonzeros + metadata,
        "softmax": 2 * nonzeros,
        "pv_sparse": 2 * rows + nonzeros + metadata,
        "chain": 4 * rows + 4 * nonzeros + 2 * metadata,
    }[stage]


def cell_rows(library, dtype, pattern, n, repeats, limits):
    """The rows of one (type, pattern, length): each stage and the chain."""
    batch = max((1 << 29) // (HEADS * n * n), 1)
    q, k, v = (torch.randn(batch, HEADS, n, HEAD_DIM, device="cuda").to(dtype) for _ in range(3))
    ours = Pipeline(library, q, k, v, pattern)
    scale = 1 / math.sqrt(HEAD_DIM)
    flat = [x.view(batch * HEADS, n, HEAD_DIM) for x in (q, k, v)]
    scores = torch.empty(batch * HEADS, n, n, dtype=dtype, device="cuda")
    weights = torch.empty_like(scores)
    out = torch.empty_like(flat[0])
    scaled_q = flat[0] * scale  # the scale costs the dense pipeline nothing here

    def dense():
        torch.bmm(scaled_q, flat[1].transpose(1, 2), out=scores)
        torch.softmax(scores, -1, out=weights)
        torch.bmm(weights, flat[2], out=out)

    ours.chain()
    dense()
    timed = timing.in_turn(
        {
            "qk_prune": ours.qk_prune,
            "softmax": ours.softmax,
            "pv_sparse": ours.pv_sparse,
            "chain": ours.chain,
            "qk_prune/unfused": lambda: torch.bmm(scaled_q, flat[1].transpose(1, 2), out=scores),
            "softmax/unfused": lambda: torch.softmax(scores, -1, out=weights),
            "pv_sparse/unfused": lambda: torch.bmm(weights, flat[2], out=out),
            "chain/unfused": dense,
        },
        repeats,
    )
    element = q.element_size()
    rows = []
    for stage in ("qk_prune", "softmax", "pv_sparse", "chain"):
        median, spread = timed[stage].values()
        peer = timed[f"{stage}/unfused"]["median_us"]
        flops = {"qk_prune": 2, "softmax": 0, "pv_sparse": 2, "chain": 4}[stage] * batch * HEADS * n * n * HEAD_DIM
        moved = batch * HEADS * bytes_of(stage, n, n, element, 1 if element == 2 else 2, element, HEAD_DIM)
        tensor = limits["bf16_tflops" if element == 2 else "tf32_tflops"]
        # Least time: bytes at the copy's rate, or products at the dense rate (twice that for the sparse one).
        work = {"qk_prune": 1, "softmax": 0, "pv_sparse": 0.5, "chain": 0.75}[stage] * flops
        floor = max(moved / limits["copy_tb_per_s"] / 1e6, work / tensor / 1e6)
        rows.append({
            "kernel": kernel_name(), "stage": stage, "pattern": f"{pattern[0]}:{pattern[1]}",
            "grouping": "consecutive", "dtype": NAMES[dtype], "batch": batch, "heads": HEADS, "kv_heads": HEADS,
            "n_q": n, "n_k": n, "d": HEAD_DIM, "mask": "full", "pass": "forward",
            "median_us": round(median, 2), "spread_us": round(spread, 2), "tflops": round(flops / median / 1e6, 1),
            "tb_per_s": round(moved / median / 1e6, 3), "of_copy": round(moved / median / 1e6 / limits["copy_tb_per_s"], 3),  # noqa: E501
            "of_roofline": round(floor / median, 3),
            "peers": {"unfused": {"median_us": round(peer, 2), "tflops": round(flops / peer / 1e6, 1)}},
            "ratio": {"unfused": round(peer / median, 3)},
        })  # fmt: skip
    return rows


def random_blocks(n, block, kept, seed):
    """A block mask with `kept` random blocks in each block row, on the GPU."""
    generator = torch.Generator().manual_seed(seed)
    count = n // block
    columns = torch.stack([torch.randperm(count, generator=generator)[:kept].sort().values for _ in range(count)])
    counts = torch.full((count,), kept, dtype=torch.int32)
    return block, counts.cuda(), columns.to(torch.int32).cuda()


def hybrid_rows(library, repeats):
    """The chain with a quarter of the blocks kept, beside the chain without a block mask."""
    n, batch, rows = 4096, 8, []
    for dtype, pattern in ((torch.bfloat16, (2, 4)), (torch.float32, (1, 2))):
        q, k, v = (torch.randn(batch, HEADS, n, HEAD_DIM, device="cuda").to(dtype) for _ in range(3))
        full = Pipeline(library, q, k, v, pattern)
        for block in (64, 128):
            hybrid = Pipeline(library, q, k, v, pattern, blocks=random_blocks(n, block, n // block // 4, seed=block))
            timed = timing.in_turn({"full": full.chain, "hybrid": hybrid.chain}, repeats)
            rows.append({
                "kernel": kernel_name(), "stage": "chain", "pattern": f"{pattern[0]}:{pattern[1]}",
                "grouping": "consecutive", "dtype": NAMES[dtype], "batch": batch, "heads": HEADS, "kv_heads": HEADS,
                "n_q": n, "n_k": n, "d": HEAD_DIM, "mask": f"25 % of blocks of {block}", "pass": "forward",
                **timed["hybrid"],
                "peers": {kernel_name(): {"median_us": timed["full"]["median_us"]}},
                "ratio": {kernel_name(): round(timed["full"]["median_us"] / timed["hybrid"]["median_us"], 3)},
            })  # fmt: skip
    return rows


def memory_rows(library):
    """Peak memory beyond the inputs, ours over the unfused pipeline's."""
    n, batch, dtype = 4096, 8, torch.bfloat16
    q, k, v = (torch.randn(batch, HEADS, n, HEAD_DIM, device="cuda").to(dtype) for _ in range(3))

    def peak(function):
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        function()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before

    ours = peak(lambda: Pipeline(library, q, k, v).chain())
    dense = peak(lambda: torch.softmax((q / math.sqrt(HEAD_DIM)) @ k.transpose(-1, -2), -1) @ v)
    return [{
        "kernel": kernel_name(), "stage": "chain", "pattern": "2:4", "grouping": "consecutive", "dtype": "bf16",
        "batch": batch, "heads": HEADS, "kv_heads": HEADS, "n_q": n, "n_k": n, "d": HEAD_DIM, "mask": "full",
        "pass": "forward", "peak_bytes": ours, "peers": {"unfused": {"peak_bytes": dense}},
        "memory_ratio": {"unfused": round(ours / dense, 3)},
    }]  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--library", help="the build to time (default: DSPATTN_BENCH_LIBRARY)")
    parser.add_argument("--out", help="JSON file to write")
    parser.add_argument("--repeats", type=int, default=15)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("bench.pipeline.measure needs a CUDA GPU")
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.manual_seed(0)
    library = arguments.library
    limits = ceilings(arguments.repeats)
    print(limits, flush=True)
    rows = []
    for dtype, pattern in CASES:
        for n in LENGTHS:
            cell = cell_rows(library, dtype, pattern, n, arguments.repeats, limits)
            rows += cell
            torch.cuda.empty_cache()
            print(
                f"{NAMES[dtype]} {pattern[0]}:{pattern[1]} n {n:5}  "
                + "  ".join(
                    f"{row['stage']} {row['median_us']:8.1f} us {row['ratio']['unfused']:5.2f}x {row['of_copy']:4.2f}bw"
                    for row in cell
                ),
                flush=True,
            )
    for row in hybrid_rows(library, arguments.repeats):
        rows.append(row)
        print(row["dtype"], row["mask"], row["median_us"], row["ratio"], flush=True)
    rows += memory_rows(library)
    print("memory", rows[-1]["memory_ratio"], flush=True)
    if arguments.out:
        rounded = {name: round(value, 3) for name, value in limits.items()}
        results.write(arguments.out, {**results.gpu(), "ceilings": rounded}, rows)


if __name__ == "__main__":
    main()
