#!/usr/bin/env python3
"""Times the three-kernel pipeline on a GPU, stage by stage, beside PyTorch's unfused dense attention.

    python3 bench/pipeline.py --build build --out bench/results/pipeline_h200.json

Every cell alternates ours and theirs in one process: bursts of `--repeats` launches after a warm-up, medians of CUDA
events. The scores of a cell exceed the L2 cache many times over. Peers are torch.bmm, torch.softmax and torch.bmm (tf32
allowed for fp32); ceilings are a large copy and a large matrix product measured in the same run.
"""

import argparse
import datetime
import json
import math
import shlex
import statistics
import subprocess
import sys

import pipeline_lib
import torch

HEADS, HEAD_DIM = 4, 64
LENGTHS = (256, 384, 512, 1024, 2048, 4096)
CASES = ((torch.bfloat16, (2, 4)), (torch.bfloat16, (1, 2)), (torch.float32, (1, 2)))
NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


def kernel_name():
    """The row of the kernel table that the pipeline's functions run on this GPU."""
    return "sm90_pipeline" if torch.cuda.get_device_capability()[0] == 9 else "sm80_pipeline"


def once(function):
    """Microseconds of one call, by events."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    function()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1000


def measure(functions, repeats):
    """Median and p90 - p10 in microseconds of each of several functions, called in turn so that they share the state
    of the card. Before each a large buffer is read and written: none finds its inputs in the cache."""
    times = {name: [] for name in functions}
    for function in functions.values():
        for _ in range(3):
            function()
    torch.cuda.synchronize()
    for _ in range(repeats):
        for name, function in functions.items():
            FLUSH.add_(1)
            times[name].append(once(function))
    result = {}
    for name, values in times.items():
        values.sort()
        low, high = values[len(values) // 10], values[-1 - len(values) // 10]
        result[name] = (statistics.median(values), high - low)
    return result


def ceilings(repeats):
    """Bytes per second of a copy (read plus written), and FLOP/s of bf16 and tf32 products."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    functions = {"copy": lambda: target.copy_(source)}
    for dtype in (torch.bfloat16, torch.float32):
        a, b = (torch.randn(8192, 8192, device="cuda").to(dtype) for _ in range(2))
        functions[NAMES[dtype]] = lambda a=a, b=b: a @ b
    medians = {name: median for name, (median, _) in measure(functions, repeats).items()}
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
    ours = pipeline_lib.Pipeline(library, q, k, v, pattern)
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
    timed = measure(
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
        median, spread = timed[stage]
        peer = timed[f"{stage}/unfused"][0]
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
        full = pipeline_lib.Pipeline(library, q, k, v, pattern)
        for block in (64, 128):
            hybrid = pipeline_lib.Pipeline(
                library, q, k, v, pattern, blocks=random_blocks(n, block, n // block // 4, seed=block)
            )
            timed = measure({"full": full.chain, "hybrid": hybrid.chain}, repeats)
            rows.append({
                "kernel": kernel_name(), "stage": "chain", "pattern": f"{pattern[0]}:{pattern[1]}",
                "grouping": "consecutive", "dtype": NAMES[dtype], "batch": batch, "heads": HEADS, "kv_heads": HEADS,
                "n_q": n, "n_k": n, "d": HEAD_DIM, "mask": f"25 % of blocks of {block}", "pass": "forward",
                "median_us": round(timed["hybrid"][0], 2), "spread_us": round(timed["hybrid"][1], 2),
                "peers": {kernel_name(): {"median_us": round(timed["full"][0], 2)}},
                "ratio": {kernel_name(): round(timed["full"][0] / timed["hybrid"][0], 3)},
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

    ours = peak(lambda: pipeline_lib.Pipeline(library, q, k, v).chain())
    dense = peak(lambda: torch.softmax((q / math.sqrt(HEAD_DIM)) @ k.transpose(-1, -2), -1) @ v)
    return [{
        "kernel": kernel_name(), "stage": "chain", "pattern": "2:4", "grouping": "consecutive", "dtype": "bf16",
        "batch": batch, "heads": HEADS, "kv_heads": HEADS, "n_q": n, "n_k": n, "d": HEAD_DIM, "mask": "full",
        "pass": "forward", "peak_bytes": ours, "peers": {"unfused": {"peak_bytes": dense}},
        "memory_ratio": {"unfused": round(ours / dense, 3)},
    }]  # fmt: skip


def shell(*command):
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def commit():
    revision = shell("git", "rev-parse", "--short", "HEAD")
    return revision + ("-dirty" if shell("git", "status", "--porcelain") else "") if revision else "unknown"


def environment(revision=None):
    """What a committed result says about how and where it was measured."""
    clock, driver = (shell("nvidia-smi", f"--query-gpu={what}", "--format=csv,noheader,nounits")
                     for what in ("clocks.sm", "driver_version"))  # fmt: skip
    properties = torch.cuda.get_device_properties(0)
    return {
        "command": shlex.join(["python3", *sys.argv]),
        "commit": revision or commit(),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "device": {"name": properties.name, "sm_clock_mhz": int(clock) if clock.isdigit() else None,
                   "driver": driver, "cores": properties.multi_processor_count},
        "versions": {"cuda": torch.version.cuda, "torch": torch.__version__,
                     "cudnn": str(torch.backends.cudnn.version()), "compiler": shell("nvcc", "--version").split("\n")[-1]},  # noqa: E501
    }  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--build", default="build", help="where libdspattn_pipeline_c.so was built")
    parser.add_argument("--out", help="JSON file to write")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--commit", help="revision measured, where the sources are not a git checkout")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("bench/pipeline.py needs a CUDA GPU")
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.manual_seed(0)
    global FLUSH
    FLUSH = torch.zeros(1 << 26, device="cuda")  # 256 MiB: several times any L2
    library = pipeline_lib.load(arguments.build)
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
        document = {
            **environment(arguments.commit),
            "ceilings": {name: round(value, 3) for name, value in limits.items()},
            "rows": rows,
        }
        with open(arguments.out, "w", encoding="utf-8") as file:
            json.dump(document, file, indent=1)
            file.write("\n")


if __name__ == "__main__":
    main()
