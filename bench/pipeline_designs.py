#!/usr/bin/env python3
"""Times designs of the pipeline's products beside each other: libraries built from several revisions, in one process.

    python3 bench/pipeline_designs.py --out bench/results/pipeline_designs_h200.json \
        "26273a1|build-26273a1|rows stay, K streams" "64e1dcf|build-64e1dcf|nonzeros leave as vectors"

A design is its revision ("-dirty": with a change that the description names), where its libdspattn_pipeline_c.so lies,
and what it does. Every cell times all designs and cuBLAS's product in turn, as bench/pipeline.py does. The file keeps
the runs it has: this one is added.
"""

import argparse
import json
import math
import pathlib

import pipeline
import pipeline_lib
import torch

LENGTH = 4096
BLOCK = 64


def stages_of(problem):
    return {stage: getattr(problem, stage) for stage in ("qk_prune", "pv_sparse")}


def cell(run, designs, dtype, pattern, block, repeats):
    """The rows of one (type, pattern, block mask or none): a row for every design and stage."""
    n, heads, d = LENGTH, pipeline.HEADS, pipeline.HEAD_DIM
    batch = (1 << 29) // (heads * n * n)
    q, k, v = (torch.randn(batch, heads, n, d, device="cuda").to(dtype) for _ in range(3))
    blocks = pipeline.random_blocks(n, block, n // block // 4, seed=block) if block else None
    problems = [pipeline_lib.Pipeline(library, q, k, v, pattern, blocks=blocks) for _, _, library in designs]
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
    timed = pipeline.measure(functions, repeats)
    rows = []
    for index, (revision, text, _) in enumerate(designs):
        for stage in stages_of(problems[index]):
            median, spread = timed[index, stage]
            row = {
                "run": run, "design": text, "commit": revision, "stage": stage, "pattern": f"{pattern[0]}:{pattern[1]}",
                "grouping": "consecutive", "dtype": pipeline.NAMES[dtype], "batch": batch, "heads": heads,
                "kv_heads": heads, "n_q": n, "n_k": n, "d": d, "pass": "forward",
                "mask": f"25 % of blocks of {block}" if block else "full",
                "median_us": round(median, 2), "spread_us": round(spread, 2),
            }  # fmt: skip
            if not block:
                peer = timed["cublas", stage][0]
                row["peers"] = {"cublas": {"median_us": round(peer, 2)}}
                row["ratio"] = {"cublas": round(peer / median, 3)}
            rows.append(row)
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("designs", nargs="+", help="revision|directory|description")
    parser.add_argument("--out", required=True, help="JSON file to add the run to")
    parser.add_argument("--repeats", type=int, default=11)
    parser.add_argument("--commit", help="revision of this script, where it is not in a git checkout")
    arguments = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.manual_seed(0)
    pipeline.FLUSH = torch.zeros(1 << 26, device="cuda")
    designs = []
    for text in arguments.designs:
        revision, directory, description = text.split("|")
        designs.append((revision, description, pipeline_lib.load(directory)))
    out = pathlib.Path(arguments.out)
    kept = json.loads(out.read_text(encoding="utf-8")) if out.exists() else {"rows": []}
    rows = kept["rows"]
    run = 1 + max((row["run"] for row in rows), default=0)
    for dtype, pattern in ((torch.bfloat16, (2, 4)), (torch.float32, (1, 2))):
        for block in (0, BLOCK):
            rows += cell(run, designs, dtype, pattern, block, arguments.repeats)
            torch.cuda.empty_cache()
            document = {**pipeline.environment(arguments.commit), "note": kept.get("note"), "rows": rows}
            out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
