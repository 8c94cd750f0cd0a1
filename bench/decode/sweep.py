"""Ways to deal keys out, timed beside each other: DSPATTN_DECODE_FORCE = CTAs a multiprocessor, splits, cluster."""
import os
import sys

import torch
from bench.common import native, timing

timing.warm_up(1.0)
for choice, kv, n, d, ways in (
    ("each_head", 8, 2048, 64, ("", "1,16,1", "1,8,8", "1,8,1", "2,16,16", "2,33,1", "1,4,4")),
    ("each_head", 8, 8192, 64, ("", "1,16,1", "1,8,8", "2,16,16", "2,33,1", "1,16,2")),
    ("each_head", 8, 32768, 64, ("", "1,16,1", "2,16,16", "2,33,1", "2,32,1")),
    ("each_head", 8, 8192, 128, ("", "1,16,1", "2,16,16", "2,33,1")),
    ("each_head", 32, 2048, 64, ("", "1,4,1", "1,3,3", "2,8,1", "2,4,4", "2,7,7", "1,2,2")),
    ("each_head", 32, 8192, 64, ("", "1,4,1", "1,3,3", "2,8,1", "2,4,4", "2,7,7")),
    ("each_head", 32, 32768, 128, ("", "1,4,1", "1,3,3", "2,8,1", "2,4,4")),
    ("shared", 8, 2048, 64, ("", "1,8,8", "2,16,16", "1,4,4")),
    ("shared", 8, 8192, 64, ("", "1,8,8", "2,16,16", "1,4,4")),
    ("shared", 8, 32768, 128, ("", "1,8,8", "2,16,16")),
):
    copies = timing.rotation(2 * 2 * kv * n * d)
    sets = [
        [torch.randn(1, h, m, d, device="cuda", dtype=torch.bfloat16) for h, m in ((32, 1), (kv, n), (kv, n))]
        for _ in range(copies)
    ]
    found = []
    for way in ways:
        os.environ["DSPATTN_DECODE_FORCE"] = way
        try:
            graph = timing.Graphed([native.prepare(*s, pattern=(2, 4), choice=choice)[0] for s in sets])
            found.append(f"[{way or 'plan'}] {timing.summary(timing.burst_times(graph, 0.02))['median_us']:.1f}")
        except RuntimeError as error:
            found.append(f"[{way}] {str(error)[:40]}")
    print(choice, kv, n, d, "  ".join(found), flush=True)

os.environ["DSPATTN_DECODE_FORCE"] = ""
for batch, heads, kv, n_q, n, d in (
    (16, 32, 32, 8, 8192, 64), (16, 32, 32, 16, 8192, 64), (16, 32, 32, 16, 8192, 128), (1, 32, 32, 16, 8192, 64),
    (1, 32, 32, 16, 8192, 128), (1, 32, 8, 16, 8192, 64), (1, 32, 8, 16, 8192, 128), (16, 32, 8, 4, 8192, 64),
    (1, 12, 12, 64, 64, 64), (1, 12, 12, 64, 256, 64),
):
    sets = [
        [torch.randn(batch, h, m, d, device="cuda", dtype=torch.bfloat16) for h, m in ((heads, n_q), (kv, n), (kv, n))]
        for _ in range(timing.rotation(4 * batch * kv * n * d))
    ]
    found = []
    for kernel in ("", f"decode_bf16_d{d}", f"fused_2_4_bf16_d{d}"):
        try:
            graph = timing.Graphed([native.prepare(*s, pattern=(2, 4), kernel=kernel)[0] for s in sets])
            found.append(f"[{kernel or 'chosen'}] {timing.summary(timing.burst_times(graph, 0.02))['median_us']:.1f}")
        except RuntimeError as error:
            found.append(f"[{kernel}] {str(error)[:60]}")
    print("queries", batch, f"{heads}/{kv}", n_q, n, d, "  ".join(found), flush=True)
