"""Times ours alone, with plans forced by DSPATTN_DEAL (packed,splits,cluster,stay,teams)."""
import os, sys
import torch
from bench.common import timing
from bench.decode.cells import Cell
from bench.decode import measure as m
timing.warm_up(2.0)
def run(cell, pattern, deals):
    sets = m.inputs_of(cell)
    out = []
    for deal in deals:
        if deal: os.environ["DSPATTN_DEAL"] = deal
        else: os.environ.pop("DSPATTN_DEAL", None)
        try:
            kernel = f"decode_bf16_d{cell.d}" if cell.n_q > 1 and deal is not None else ""
            if deal == "by name": os.environ.pop("DSPATTN_DEAL", None)
            calls = [m.native.prepare(*qkv, pattern=m.PATTERNS[pattern], kernel=kernel, choice=cell.choice)[0] for qkv in sets]
            g = timing.Graphed(calls)
            t = timing.summary(timing.burst_times(g, 0.02) )["median_us"]
            out.append(f"{deal or 'auto'}: {t:.1f}")
        except RuntimeError as e:
            out.append(f"{deal}: {str(e).splitlines()[0][:60]}")
    os.environ.pop("DSPATTN_DEAL", None)
    print(cell.part, f"d {cell.d} {cell.batch}x{cell.heads}/{cell.kv_heads} n_q {cell.n_q} n_k {cell.n_k} {pattern} |", "  ".join(out), flush=True)
    del sets; torch.cuda.empty_cache()
for d in (128, 64):
    run(Cell("several", 16, 32, 8, 8, 8192, d), "2:4", [None, "by name", "1,1,1,0", "1,2,2,0", "2,2,1,0"])
    run(Cell("several", 16, 32, 8, 16, 8192, d), "2:4", [None, "by name", "1,1,1,0"])
    run(Cell("several", 16, 32, 32, 16, 8192, d), "2:4", [None, "1,1,1,0", "2,1,1,0", "1,2,1,0"])
    run(Cell("several", 16, 32, 32, 8, 8192, d), "2:4", [None, "1,1,1,0", "2,1,1,0"])
    run(Cell("several", 1, 32, 8, 16, 8192, d), "2:4", [None, "1,16,1,0", "2,32,1,0"])
    for n in (2048, 8192, 32768, 131072):
        stay = {2048: ["1,8,8,1", "1,4,4,1"], 8192: ["1,8,8,1", "1,16,16,1"], 32768: ["1,8,8,1", "1,16,16,1"], 131072: []}[n]
        run(Cell("shared", 1, 32, 8, 1, n, d, choice="shared"), "2:4", [None, "1,16,1,0", "1,15,1,0", "2,32,1,0", "1,8,1,0"] + stay)
    run(Cell("shared", 16, 32, 8, 1, 8192, d, choice="shared"), "2:4", [None, "1,1,1,0", "2,2,1,0", "2,2,2,1", "1,2,2,1"])
    for n in (64, 128, 256, 512):
        if d == 64: run(Cell("small", 1, 12, 12, min(n, 64), n, d), "2:4", [None, "by name"])
    for n in (2048, 8192, 32768, 131072):
        run(Cell("one", 1, 32, 8, 1, n, d), "2:4", [None, "1,16,1,0", "1,15,1,0", "2,32,1,0", "1,8,8,0", "1,4,4,0", "1,8,1,0"])
        run(Cell("one", 1, 32, 32, 1, n, d), "2:4", [None, "1,4,1,0", "2,8,1,0", "2,4,4,0", "1,2,2,0", "1,4,4,0", "2,4,1,0"])
