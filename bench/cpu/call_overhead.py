#!/usr/bin/env python3
"""A call of dspattn.attention beside PyTorch's own, on tensors too small to matter, and the import of the package.

    python3 -m bench.cpu.call_overhead            # prints both, and a call inside of dspattn.use and with gradients
    python3 -m bench.cpu.call_overhead --check    # exit status 1 when a bar is missed

Calls alternate, and the shortest time of each counts, so that a busy machine delays none more than another. One matrix
product runs first: until a process has run one, PyTorch's attention on the CPU takes up to 1.8 times as long (seen on
aarch64: 91 us against 52 at eight heads), and a comparison would depend on what ran before it.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable

import torch
from torch.nn.functional import scaled_dot_product_attention

import dspattn

HEADS = (1, 8)
LENGTH, HEAD_DIM = 16, 64
# What the project promises: microseconds a call beyond PyTorch's, processor seconds of the import beyond torch's.
CALL_BAR_US = 30.0
IMPORT_BAR_S = 0.3


def microseconds_a_call(calls: list[Callable[[], object]], rounds: int, calls_a_round: int = 10) -> list[float]:
    """The shortest time of each call, one round of each in turn."""
    best = [float("inf")] * len(calls)
    for _ in range(rounds):
        for i, call in enumerate(calls):
            start = time.perf_counter()
            for _ in range(calls_a_round):
                call()
            best[i] = min(best[i], (time.perf_counter() - start) / calls_a_round * 1e6)
    return best


def overhead_us(heads: int, rounds: int) -> tuple[float, float]:
    """Times of PyTorch's call and of ours."""
    q, k, v = (torch.randn(1, heads, LENGTH, HEAD_DIM) for _ in range(3))
    theirs, ours = microseconds_a_call(
        [lambda: scaled_dot_product_attention(q, k, v), lambda: dspattn.attention(q, k, v)], rounds
    )
    return theirs, ours


def other_calls_us(rounds: int) -> dict[str, tuple[float, float]]:
    """The same of a call inside of dspattn.use, and of one with its gradients."""
    q, k, v = (torch.randn(1, 1, LENGTH, HEAD_DIM, requires_grad=True) for _ in range(3))
    gradient = torch.randn(1, 1, LENGTH, HEAD_DIM)

    def redirected() -> object:
        with torch.no_grad():
            return scaled_dot_product_attention(q, k, v)

    def both(function: Callable[..., torch.Tensor]) -> Callable[[], object]:
        return lambda: torch.autograd.grad(function(q, k, v), (q, k, v), gradient)

    (theirs,) = microseconds_a_call([redirected], rounds)
    with dspattn.use("2:4"):
        (ours,) = microseconds_a_call([redirected], rounds)
    with_gradients = microseconds_a_call([both(scaled_dot_product_attention), both(dspattn.attention)], rounds)
    return {"inside of use": (theirs, ours), "with gradients": (with_gradients[0], with_gradients[1])}


def import_seconds() -> float:
    """Processor time of the import in a new process that has torch already."""
    code = "import torch, time; t = time.process_time(); import dspattn; print(time.process_time() - t)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd="/", check=True)
    return float(done.stdout)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=1000, help="rounds of ten calls (default 1000)")
    parser.add_argument("--check", action="store_true", help="exit status 1 when a bar is missed")
    options = parser.parse_args(argv)
    if options.rounds < 1:
        parser.error(f"--rounds: expected at least 1, got {options.rounds}")
    torch.set_num_threads(1)
    torch.randn(64, 64) @ torch.randn(64, 64)
    missed = 0
    for heads in HEADS:
        theirs, ours = overhead_us(heads, options.rounds)
        missed += ours - theirs > CALL_BAR_US
        print(
            f"n = {LENGTH}, d = {HEAD_DIM}, {heads} heads: ours {ours:.1f} us, PyTorch's {theirs:.1f} us, "
            f"{ours - theirs:.1f} us more (bar {CALL_BAR_US:.0f})"
        )
    for name, (theirs, ours) in other_calls_us(options.rounds).items():
        print(f"1 head, {name}: ours {ours:.1f} us, PyTorch's {theirs:.1f} us, {ours - theirs:.1f} us more")
    seconds = import_seconds()
    missed += seconds > IMPORT_BAR_S
    print(f"import: {seconds:.2f} s beyond torch (bar {IMPORT_BAR_S})")
    return 1 if options.check and missed else 0


if __name__ == "__main__":
    sys.exit(main())
