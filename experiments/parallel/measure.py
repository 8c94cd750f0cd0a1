"""Times one process against several, one thread each, on CPUs: causal attention of a long sequence, balanced ring.

    python experiments/parallel/measure.py --worlds 1,2 --n 8192 --heads 4 --d 64 --out results.json

Needs as many idle cores as processes. The figure that counts is the speed-up of 2 processes at n = 8192.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

import dspattn
from dspattn import parallel


def work(rank: int, world: int, store: str, given: dict[str, Any], results: Any) -> None:
    torch.set_num_threads(1)
    if world > 1:
        dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world)
    generator = torch.Generator().manual_seed(1)
    shape = (1, given["heads"], given["n"], given["d"])
    q, k, v, d_out = (torch.randn(shape, generator=generator) for _ in range(4))
    q, k, v, d_out = (parallel.shard(t, 2).contiguous() for t in (q, k, v, d_out))
    q, k, v = (t.requires_grad_(given["backward"]) for t in (q, k, v))
    options = {"is_causal": True, "pattern": given["pattern"]}
    times = []
    for turn in range(given["repeats"] + 1):
        if world > 1:
            dist.barrier()
        start = time.perf_counter()
        if world > 1:
            out = parallel.attention(q, k, v, method=given["method"], **options)
        else:
            out = dspattn.attention(q, k, v, **options)
        if given["backward"]:
            torch.autograd.grad(out, (q, k, v), d_out)
        if world > 1:
            dist.barrier()
        if turn > 0:  # the first one warms up
            times.append(time.perf_counter() - start)
    if rank == 0:
        results.put(times)
    if world > 1:
        dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", default="1,2")
    parser.add_argument("--n", type=int, default=8192)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--d", type=int, default=64)
    parser.add_argument("--pattern", default="2:4")
    parser.add_argument("--method", default="ring", choices=["ring", "all_to_all"])
    parser.add_argument("--backward", action="store_true")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    given = {name: getattr(options, name) for name in ("n", "heads", "d", "pattern", "method", "backward", "repeats")}
    context = multiprocessing.get_context("spawn")
    rows = []
    for world in map(int, options.worlds.split(",")):
        results = context.SimpleQueue()
        with tempfile.TemporaryDirectory() as folder:
            arguments = (world, str(Path(folder) / "store"), given, results)
            multiprocessing.spawn(work, arguments, nprocs=world)
        times = results.get()
        rows.append({**given, "world": world, "seconds": statistics.median(times), "all_seconds": times})
        ratio = rows[0]["seconds"] / rows[-1]["seconds"]
        print(f"world {world}: {rows[-1]['seconds']:.3f} s, {ratio:.2f} x world {rows[0]['world']}")
    if options.out:
        machine = {"machine": platform.machine(), "cores": os.cpu_count(), "load_before": os.getloadavg()[0]}
        options.out.write_text(
            json.dumps({"device": machine, "torch": torch.__version__, "rows": rows}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
