"""Times one process against several, one thread each, on CPUs: causal attention of a long sequence, balanced.

    python experiments/parallel/measure.py --worlds 1,2 --n 8192 --heads 4 --d 64
    python experiments/parallel/measure.py --cases ring,all_to_all,ring+backward --out results.json

Needs as many idle cores as processes. The figure that counts is the speed-up of 2 processes at n = 8192.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import dspattn
from bench.common import results as files
from dspattn import parallel

LINK_BYTES = 1 << 24
CASES = ("ring", "all_to_all", "ring+backward", "all_to_all+backward")


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
    link = exchanged(rank, world) if world > 1 else None
    if rank == 0:
        results.put((times, link))
    if world > 1:
        dist.destroy_process_group()


def exchanged(rank: int, world: int) -> float:
    """Bytes per second and direction while every process sends to the next one, as the ring does."""
    sent, received = torch.zeros(LINK_BYTES // 4), torch.zeros(LINK_BYTES // 4)
    times = []
    for _ in range(4):
        dist.barrier()
        start = time.perf_counter()
        ways = [
            dist.P2POp(dist.isend, sent, (rank + 1) % world),
            dist.P2POp(dist.irecv, received, (rank - 1) % world),
        ]
        for work in dist.batch_isend_irecv(ways):
            work.wait()
        times.append(time.perf_counter() - start)
    return LINK_BYTES / statistics.median(times[1:])


def timed(world: int, given: dict[str, Any]) -> tuple[list[float], float | None]:
    """Seconds of every turn on ``world`` processes, and bytes per second between them."""
    context = multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(work, (world, str(Path(folder) / "store"), given, results), nprocs=world)
    found: tuple[list[float], float | None] = results.get()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", default="1,2")
    parser.add_argument("--n", type=int, default=8192)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--d", type=int, default=64)
    parser.add_argument("--pattern", default="2:4")
    parser.add_argument("--cases", default="ring", help=f"some of {', '.join(CASES)}")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    cases = options.cases.split(",")
    if unknown := [case for case in cases if case not in CASES]:
        parser.error(f"--cases: expected some of {', '.join(CASES)}, got {', '.join(unknown)}")
    facts = {**files.cpu(), "load_before": round(os.getloadavg()[0], 2)}
    sizes = {name: getattr(options, name) for name in ("n", "heads", "d", "pattern", "repeats")}
    rows: list[dict[str, Any]] = []
    alone: dict[bool, Any] = {}  # one process computes the same whatever the method
    for case in cases:
        method, _, backward = case.partition("+")
        given = {**sizes, "method": method, "backward": bool(backward)}
        for world in map(int, options.worlds.split(",")):
            found = alone.get(given["backward"]) if world == 1 else None
            times, link = found = found or timed(world, given)
            if world == 1:
                alone[given["backward"]] = found
            rows.append({**given, "world": world, "seconds": statistics.median(times), "all_seconds": times})
            if link is not None:
                rows[-1]["link_bytes_per_second"] = round(link)
            first = next(row for row in rows if (row["method"], row["backward"]) == (method, bool(backward)))
            ratio = first["seconds"] / rows[-1]["seconds"]
            print(
                f"{case}, world {world}: {rows[-1]['seconds']:.3f} s, {ratio:.2f} x world {first['world']}", flush=True
            )
            if options.out:
                files.write(options.out, facts, rows)


if __name__ == "__main__":
    main()
