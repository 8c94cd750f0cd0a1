"""Times designs of the pipeline's products beside each other: libraries built from several revisions, in one process.

    python3 -m bench.pipeline.designs --out bench/results/pipeline_designs_h200.json \
        "26273a1|26273a1.so|rows stay, K streams" "64e1dcf|64e1dcf.so|nonzeros leave as vectors"

A design is its revision ("-dirty": with a change that the description names), its libdspattn_bench_shim.so (built
with this revision's bench/common, where its own is older), and what it does. Every cell times all designs and cuBLAS's
product in turn, as bench.pipeline.measure does. The file keeps the runs it has: this one is added.
"""

import argparse
import math
import pathlib

import torch

from bench.common import results, timing
from bench.pipeline import measure
from bench.pipeline.problem import Pipeline

LENGTH = 4096
BLOCK = 64


def stages_of(problem):
    return {stage: getattr(problem, stage) for stage in ("qk_prune", "pv_sparse")}


def cell(run, designs, dtype, pattern, block, repeats):
    """The rows of one (type, pattern, block mask or none): a row for every design and stage."""
    n, heads, d = LENGTH, measure.HEADS, measure.HEAD_DIM
    batch = (1 << 29) // (heads * n * n)
    q, k, v = (torch.randn(batch, heads, n, d, device="cuda").to(dtype) for _ in range(3))
    blocks = measure.random_blocks(n, block, n // block // 4, seed=block) if block else None
    problems = [Pipeline(library, q, k, v, pattern, blocks=blocks) for _, _, library in designs]
    functions = {}
    for index, problem in enumerate(problems):
        problem.chain()
        functions |= {(index, stage): call for stage, call in stages_of(problem).items()}
    if not block:
        flat = [x.view(batch * heads, n, d) for x in (q, k, v)]
        scores = torch.empty(batch * heads, n, n, dtype=dtype, device="cuda")
        weights, out = torch.empty_like(scores), torch.empty_like(flat[0])
        torch.bmm(flat[0] / math.sqrt(d), flat[1].transpose(1, 2), out=scores)
        torch.softmax(scores, -1, out=weights)
        functions["cublas", "qk_prune"] = lambda: torch.bmm(flat[0], flat[1].transpose(1, 2), out=scores)
        functions["cublas", "pv_sparse"] = lambda: torch.bmm(weights, flat[2], out=out)
    timed = timing.in_turn(functions, repeats)
    rows = []
    for index, (revision, text, _) in enumerate(designs):
        for stage in stages_of(problems[index]):
            median, spread = timed[index, stage].values()
            row = {
                "run": run, "design": text, "commit": revision, "stage": stage, "pattern": f"{pattern[0]}:{pattern[1]}",
                "grouping": "consecutive", "dtype": measure.NAMES[dtype], "batch": batch, "heads": heads,
                "kv_heads": heads, "n_q": n, "n_k": n, "d": d, "pass": "forward",
                "mask": f"25 % of blocks of {block}" if block else "full",
                "median_us": round(median, 2), "spread_us": round(spread, 2),
            }  # fmt: skip
            if not block:
                peer = timed["cublas", stage]["median_us"]
                row["peers"] = {"cublas": {"median_us": round(peer, 2)}}
                row["ratio"] = {"cublas": round(peer / median, 3)}
            rows.append(row)
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("designs", nargs="+", help="revision|library|description")
    parser.add_argument("--out", required=True, help="JSON file to add the run to")
    parser.add_argument("--repeats", type=int, default=11)
    arguments = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.manual_seed(0)
    designs = []
    for text in arguments.designs:
        revision, library, description = text.split("|")
        designs.append((revision, description, library))
    out = pathlib.Path(arguments.out)
    kept = results.read(out) if out.exists() else {"rows": []}
    rows = kept["rows"]
    run = 1 + max((row["run"] for row in rows), default=0)
    for dtype, pattern in ((torch.bfloat16, (2, 4)), (torch.float32, (1, 2))):
        for block in (0, BLOCK):
            rows += cell(run, designs, dtype, pattern, block, arguments.repeats)
            torch.cuda.empty_cache()
            results.write(out, {**results.gpu(), "note": kept.get("note")}, rows)


if __name__ == "__main__":
    main()
