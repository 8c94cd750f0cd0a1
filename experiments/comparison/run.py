"""Measures the figures of docs/comparison.md; one JSON file each, under results/.

python experiments/comparison/run.py all                     # on a GPU where there is one, else on the CPU
python experiments/comparison/run.py all --device cuda --budget-seconds 120
python experiments/comparison/run.py latency memory --lengths 256,1024 --dtypes bf16
python experiments/comparison/plot.py && python experiments/comparison/tables.py
"""

from __future__ import annotations

import argparse
import gc
import itertools
import sys
import time
from collections.abc import Sequence

import figures
import text_model
import torch
from measuring import Clock, write

# What each figure may take of --budget-seconds; what one leaves is the next one's.
SHARES_OF_TIME = {"latency": 0.34, "overhead": 0.15, "density": 0.07, "model": 0.30, "memory": 0.09, "training": 0.05}
CASE_SECONDS = 0.05  # of a case's timed calls, where time is bounded
FIGURES = ("latency", "overhead", "density", "model", "memory", "training")
SHARES = (0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 0.63, 0.8, 1.0)
# The CPU form is small: it shows orders of growth, not the paper's figures.
SIZES = {
    "cuda": {"lengths": [256, 512, 1024, 2048, 4096], "long": [8192, 16384, 32768, 65536], "tokens": 2**17,
             "dtypes": ["bf16", "fp32"], "density_n": 4096, "training_n": 4096, "heads": [4, 8],
             "hidden": [256, 512, 1024], "model_lengths": [512, 1024, 2048, 4096], "repeats": 50},
    "cpu": {"lengths": [256, 1024, 4096], "long": [], "tokens": 256, "dtypes": ["fp32"], "density_n": 1024,
            "training_n": 256, "heads": [4], "hidden": [256], "model_lengths": [512, 2048], "repeats": 5},
}  # fmt: skip


def ends_of(chosen: Sequence[str], seconds: float | None) -> dict[str, float]:
    """When each figure must have begun its last case (time.monotonic)."""
    if seconds is None:
        return dict.fromkeys(chosen, float("inf"))
    whole = sum(SHARES_OF_TIME[figure] for figure in chosen)
    shares = itertools.accumulate(SHARES_OF_TIME[figure] / whole for figure in chosen)
    now = time.monotonic()
    return {figure: now + seconds * share for figure, share in zip(chosen, shares, strict=True)}


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("figure", nargs="+", choices=[*FIGURES, "all"])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--lengths", type=_numbers, help="of latency, overhead, memory and model (default: the paper's)"
    )
    parser.add_argument("--dtypes", type=lambda text: text.split(","), help="bf16, fp32 or both")
    parser.add_argument("--tokens", type=int, help="tokens of a batch")
    parser.add_argument("--repeats", type=int, help="timed calls of each case")
    parser.add_argument("--names", type=lambda text: text.split(","), help="contenders of the model figure")
    parser.add_argument(
        "--compile", action="store_true", help="time the zoo under torch.compile too (minutes a length)"
    )
    parser.add_argument("--no-long", action="store_true", help="leave out the lengths beyond 4096")
    parser.add_argument(
        "--budget-seconds", type=float,
        help="of the whole run: fewer timed calls, and cases that have not begun by then are rows that say so",
    )  # fmt: skip
    parser.add_argument(
        "--case-seconds",
        type=float,
        help=f"of one case's timed calls (default: {CASE_SECONDS:g} where time is bounded)",
    )
    options = parser.parse_args(arguments)
    if options.budget_seconds is not None and options.budget_seconds <= 0:
        parser.error(f"--budget-seconds: expected more than 0, got {options.budget_seconds:g}")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device: expected cpu, got cuda, which PyTorch does not find here")
    sizes = dict(SIZES[options.device])
    device = options.device
    tokens, dtypes = options.tokens or sizes["tokens"], options.dtypes or sizes["dtypes"]
    lengths = options.lengths or sizes["lengths"]
    longer = [] if options.no_long or options.lengths else sizes["long"]
    seconds = options.case_seconds or (CASE_SECONDS if options.budget_seconds is not None else None)
    bounded = {} if seconds is None else {"case_seconds": seconds}
    clock = Clock(device, options.repeats or sizes["repeats"], warmup=3 if device == "cuda" else 1, **bounded)
    torch.backends.cuda.matmul.allow_tf32 = True  # as the paper's baseline
    chosen = FIGURES if "all" in options.figure else tuple(options.figure)
    ends = ends_of(chosen, options.budget_seconds)
    gc.freeze()  # what was imported is not searched again before every measurement of memory
    for figure in chosen:
        clock.until = ends[figure]
        if figure == "latency":
            rows = figures.latency(device, [*lengths, *longer], dtypes, tokens, clock, options.compile)
        elif figure == "overhead":
            rows = figures.overhead(device, lengths, dtypes, tokens, clock)
        elif figure == "density":
            rows = figures.density(device, sizes["density_n"], dtypes, tokens, SHARES, clock)
        elif figure == "training":
            rows = figures.training(device, sizes["training_n"], dtypes, 2, clock)
        elif figure == "memory":
            rows = figures.memory(device, [*lengths, *longer], dtypes[:1], 1, clock)
        else:
            rows = text_model.end_to_end(
                device, options.lengths or sizes["model_lengths"], sizes["heads"], sizes["hidden"], dtypes, tokens,
                clock, options.names,
            )  # fmt: skip
        print(write(figure, device, rows) or f"{figure}: there was no time for any case, nothing written")
    return 0


if __name__ == "__main__":
    sys.exit(main())
