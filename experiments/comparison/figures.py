"""What each figure measures: attention against length (time by stage, memory), pruning's overhead, density."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from typing import Any

import contenders
import torch
from contenders import BASELINE, DTYPES, TODAY, Contender
from measuring import Clock, attempt
from torch import Tensor

import dspattn

HEADS, HEAD_DIM = 4, 64  # the paper's
Row = dict[str, Any]


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _shape(dtype: str, batch: int, n: int) -> Row:
    return {
        "dtype": dtype, "batch": batch, "heads": HEADS, "kv_heads": HEADS, "n_q": n, "n_k": n, "d": HEAD_DIM,
        "mask": "full", "pass": "forward",
    }  # fmt: skip


def batch_for(n: int, tokens: int) -> int:
    """So many sequences that a batch has ``tokens`` tokens, at least one."""
    return max(1, tokens // n)


def with_ratios(rows: list[Row]) -> list[Row]:
    """Each row with the dense times of the same shape beside it, and how much faster it is than they are."""
    for row in rows:
        peers: Row = {}
        ratio: Row = {}
        for peer in (BASELINE, TODAY, "sdpa"):
            twin = next(
                (
                    other
                    for other in rows
                    if other["kernel"] == peer and (other["dtype"], other["n_k"]) == (row["dtype"], row["n_k"])
                ),
                None,
            )
            if twin is None:
                continue
            label = "unfused" if peer == BASELINE else peer
            peers[label] = {"median_us": twin["median_us"]} if twin["median_us"] else None
            if row["median_us"] and twin["median_us"]:
                ratio[label] = round(twin["median_us"] / row["median_us"], 3)
        row["peers"], row["ratio"] = peers, ratio
    return rows


def _timed(one: Contender, clock: Clock, shape: Row, device: str, compiled: bool) -> Row:
    dtype = DTYPES[shape["dtype"]]
    attend = one.make(HEADS, HEAD_DIM, shape["n_k"], device, dtype)
    tensors = contenders.inputs(shape["batch"], HEADS, shape["n_k"], HEAD_DIM, device, dtype)

    def run() -> Tensor:
        return attend(*tensors)

    with torch.inference_mode():
        found: Row = clock.times(run)
        if one.kind in ("zoo", "combined") or one.name == BASELINE:
            found["stages"] = clock.stages(run)
        if compiled and one.kind == "zoo":
            torch._dynamo.reset()
            traced = torch.compile(attend)
            again = clock.times(lambda: traced(*tensors))
            found["compiled_us"] = again["median_us"]
    return found


def latency(
    device: str, lengths: Sequence[int], dtypes: Sequence[str], tokens: int, clock: Clock, compiled: bool
) -> list[Row]:
    """Figure 1: every mechanism against length, with the split into stages."""
    rows = []
    for n in lengths:  # outermost: where time runs out, what is missing are the longest of every type
        for dtype in dtypes:
            batch = batch_for(n, tokens)
            say(f"latency: {dtype}, n = {n}, batch {batch}")
            for one in contenders.contenders(device, dtype):
                shape = _shape(dtype, batch, n)
                found = attempt(
                    one.name, lambda one=one, shape=shape: _timed(one, clock, shape, device, compiled), clock
                )
                rows.append(
                    {"part": "latency", "kernel": one.name, "kind": one.kind, "pattern": one.pattern,
                     "grouping": one.grouping, **shape, **found}
                )  # fmt: skip
    return with_ratios(rows)


def memory(device: str, lengths: Sequence[int], dtypes: Sequence[str], batch: int, clock: Clock) -> list[Row]:
    """Figure 5: the most memory that attention holds beyond its inputs, output included."""
    rows = []
    # Dense attention and this package's first: where time runs out, what is missing are the others' longest.
    for first, dtype, n in itertools.product((True, False), dtypes, lengths):
        say(f"memory: {dtype}, n = {n}, {'dense and ours' if first else 'the others'}")
        for one in contenders.contenders(device, dtype):
            if (one.kind in ("dense", "ours")) != first:
                continue
            shape = _shape(dtype, batch, n)

            def measured(one: Contender = one, n: int = n, dtype: str = dtype) -> Row:
                attend = one.make(HEADS, HEAD_DIM, n, device, DTYPES[dtype])
                tensors = contenders.inputs(batch, HEADS, n, HEAD_DIM, device, DTYPES[dtype])
                with torch.inference_mode():
                    attend(*tensors)  # whatever is kept for later calls is not the call's
                    return {"peak_bytes": clock.peak_bytes(lambda: attend(*tensors))}

            found = attempt(one.name, measured, clock)
            found.pop("median_us", None)
            rows.append(
                {"part": "memory", "kernel": one.name, "kind": one.kind, "pattern": one.pattern,
                 "grouping": one.grouping, **shape, **found}
            )  # fmt: skip
    return rows


def training(device: str, n: int, dtypes: Sequence[str], batch: int, clock: Clock) -> list[Row]:
    """Every mechanism forward and backward: time, and the most memory beyond inputs and parameters."""
    rows = []
    for dtype in dtypes:
        say(f"training: {dtype}, n = {n}, batch {batch}")
        for one in contenders.contenders(device, dtype):

            def measured(one: Contender = one, dtype: str = dtype) -> Row:
                attend = one.make(HEADS, HEAD_DIM, n, device, DTYPES[dtype])
                parameters = list(attend.train().parameters()) if isinstance(attend, torch.nn.Module) else []
                tensors = contenders.inputs(batch, HEADS, n, HEAD_DIM, device, DTYPES[dtype])
                leaves = [*(t.requires_grad_() for t in tensors), *parameters]
                ahead = torch.randn_like(tensors[0])

                def step() -> Any:
                    return torch.autograd.grad(attend(*tensors), leaves, ahead, allow_unused=True)

                if not all(bool(grad.isfinite().all()) for grad in step() if grad is not None):
                    raise RuntimeError("a gradient is not finite")
                return {**clock.times(step), "peak_bytes": clock.peak_bytes(step)}

            shape = {**_shape(dtype, batch, n), "pass": "forward and backward"}
            rows.append(
                {"part": "training", "kernel": one.name, "kind": one.kind, "pattern": one.pattern,
                 "grouping": one.grouping, **shape, **attempt(one.name, measured, clock)}
            )  # fmt: skip
    return with_ratios(rows)


def prune_separately(scores: Tensor, pattern: str) -> tuple[Tensor, Tensor]:
    """What a pruning kernel after the product does: read every score, write the kept ones and their codes."""
    if pattern == "1:2":
        a, b = scores.unflatten(-1, (-1, 2)).unbind(-1)
        return torch.maximum(a, b), (b > a).to(torch.uint8)
    a, b, c, d = scores.unflatten(-1, (-1, 4)).unbind(-1)
    front = torch.minimum(a, b) >= torch.maximum(c, d)
    back = torch.minimum(c, d) > torch.maximum(a, b)
    first = torch.where(front, a, torch.where(back, c, torch.maximum(a, b)))
    second = torch.where(front, b, torch.where(back, d, torch.maximum(c, d)))
    code = torch.where(front, 4, torch.where(back, 14, 8 + (b > a).to(torch.uint8) + 4 * (d > c).to(torch.uint8)))
    return torch.stack([first, second], -1).flatten(-2), code.to(torch.uint8)


def overhead(device: str, lengths: Sequence[int], dtypes: Sequence[str], tokens: int, clock: Clock) -> list[Row]:
    """Figure 2: the first product with pruning in its epilogue, without, and followed by a kernel that prunes.

    The separate kernel is written by torch.compile, one for all lengths: one pass over the scores.
    """
    rows = []
    separate = torch.compile(prune_separately, dynamic=True) if device == "cuda" else prune_separately
    # The separate kernel last: compiling it takes longer than all measurements.
    for compiled, dtype, n in itertools.product((False, True), dtypes, lengths):
        pattern = contenders.pattern_of(dtype)
        batch = batch_for(n, tokens)
        say(f"overhead: {dtype}, n = {n}, batch {batch}")
        q, k, _ = contenders.inputs(batch, HEADS, n, HEAD_DIM, device, DTYPES[dtype])
        scaled = q * HEAD_DIM**-0.5

        def dense(q: Tensor = scaled, k: Tensor = k) -> Tensor:
            return q @ k.transpose(-1, -2)

        runs = {
            "product": dense,
            "product, pruned in the epilogue": lambda q=q, k=k, pattern=pattern: dspattn.sddmm(q, k, pattern=pattern),
            "product, then a pruning kernel": lambda dense=dense, pattern=pattern: separate(dense(), pattern),
        }
        for name, run in runs.items():
            if (name == "product, then a pruning kernel") != compiled:
                continue

            def timed(run: Any = run) -> Row:
                with torch.inference_mode():
                    return clock.times(run)

            rows.append(
                {"part": "overhead", "kernel": name, "pattern": "dense" if name == "product" else pattern,
                 "grouping": "consecutive", **_shape(dtype, batch, n), **attempt(name, timed, clock)}
            )  # fmt: skip
    for row in rows:
        product = next(
            other
            for other in rows
            if other["kernel"] == "product" and (other["dtype"], other["n_k"]) == (row["dtype"], row["n_k"])
        )
        if row["median_us"] and product["median_us"]:
            row["ratio"] = {"product": round(product["median_us"] / row["median_us"], 3)}
    return rows


def kept_columns(share: float, n: int) -> int:
    """So many of n columns, a multiple of 8 where there are more: other widths fall out of cuBLAS's fast kernels, which
    says nothing of truncation."""
    count = max(1, round(share * n))
    return count if count < 8 else count // 8 * 8


def density(
    device: str, n: int, dtypes: Sequence[str], tokens: int, shares: Sequence[float], clock: Clock
) -> list[Row]:
    """Figure 3: truncated columns and top-k over density, beside unfused full attention and this package's kernels."""
    rows = []
    batch = batch_for(n, tokens)
    shares = [kept_columns(share, n) / n for share in shares]
    for name, dtype in itertools.product(("peers", "fixed", "top_k"), dtypes):  # the slowest last
        if name == "peers":
            everything = contenders.contenders(device, dtype)
            cases = [(one, None) for one in everything if one.kind in ("dense", "ours")]
        elif name == "fixed":
            cases = [(Contender("fixed", "zoo", contenders._zoo("fixed", density=share)), share) for share in shares]
        else:
            cases = [
                (Contender("top_k", "zoo", contenders._zoo("top_k", k=round(share * n))), share) for share in shares
            ]
        say(f"density: {dtype}, n = {n}, batch {batch}, {name}")
        for one, share in cases:
            shape = _shape(dtype, batch, n)
            found = attempt(one.name, lambda one=one, shape=shape: _timed(one, clock, shape, device, False), clock)
            rows.append(
                {"part": "density", "kernel": one.name, "density": share, "pattern": one.pattern,
                 "grouping": one.grouping, **shape, **found}
            )  # fmt: skip
    return with_ratios(rows)
