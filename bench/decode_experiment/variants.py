"""Times ours alone, with plans forced by DSPATTN_DEAL (packed,splits,cluster,stay)."""
import os
import torch
from bench.common import timing
from bench.decode.cells import Cell
from bench.decode import measure as m
timing.warm_up(2.0)
def run(cell, pattern, deals):
    sets = m.inputs_of(cell)
    out = []
    for deal in deals:
        kernel = ""
        os.environ.pop("DSPATTN_DEAL", None)
        if deal == "forward": kernel = f"sm90_fused_{pattern.replace(':', '_')}_bf16_d{cell.d}"
        elif deal is not None:
            kernel = f"decode_bf16_d{cell.d}"
            if deal != "decode": os.environ["DSPATTN_DEAL"] = deal
        try:
            calls = [m.native.prepare(*qkv, pattern=m.PATTERNS[pattern], kernel=kernel, choice=cell.choice)[0] for qkv in sets]
            t = timing.summary(timing.burst_times(timing.Graphed(calls), 0.015))["median_us"]
            out.append(f"{deal or 'auto'}: {t:.1f}")
        except RuntimeError as e:
            out.append(f"{deal}: {str(e).splitlines()[0][:50]}")
    os.environ.pop("DSPATTN_DEAL", None)
    print(cell.part, f"d {cell.d} {cell.batch}x{cell.heads}/{cell.kv_heads} n_q {cell.n_q} n_k {cell.n_k} {pattern} |", "  ".join(out), flush=True)
    del sets; torch.cuda.empty_cache()
for n in (64, 128, 256, 512, 1024):
    run(Cell("small", 1, 12, 12, n, n, 64), "2:4", ["forward", "decode", "1,1,1,0", "1,2,2,0", "1,2,1,0", "1,4,4,0", "2,1,1,0", "2,2,2,0"])
for n in (256, 512, 1024, 2048):
    run(Cell("small", 1, 12, 12, 64, n, 64), "2:4", ["forward", "decode"])
    run(Cell("small", 1, 32, 8, 8, n, 128), "2:4", ["forward", "decode"])
run(Cell("small", 1, 12, 12, 512, 512, 64), "1:2", ["forward", "decode"])
for d in (128, 64):
    for n in (2048, 8192, 32768, 131072):
        stay = {2048: ["1,8,8,1", "1,4,4,1", "1,2,2,1"], 8192: ["1,8,8,1"], 32768: ["1,8,8,1"], 131072: []}[n]
        run(Cell("shared", 1, 32, 8, 1, n, d, choice="shared"), "2:4", ["decode", "1,16,1,0", "2,32,1,0"] + stay)
    run(Cell("shared", 16, 32, 8, 1, 8192, d, choice="shared"), "2:4", ["decode", "1,1,1,0", "2,2,2,1"])
    run(Cell("one", 16, 32, 32, 1, 8192, d), "2:4", ["decode", "1,1,1,0", "2,1,1,0", "2,2,1,0"])
    for n in (2048, 8192):
        run(Cell("one", 1, 32, 8, 1, n, d), "2:4", ["decode", "1,16,1,0", "1,12,1,0", "1,8,8,0", "1,4,4,0", "1,8,1,0", "1,2,2,0"])
        run(Cell("one", 1, 32, 32, 1, n, d), "2:4", ["decode", "1,4,1,0", "2,8,1,0", "2,4,4,0", "1,2,2,0"])
