"""``python -m experiments.theory``: measure real attention, evaluate the formulas, draw the pictures."""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

from . import formulas

RESULTS = Path("experiments/theory/results")
PICTURES = Path("docs/images/theory")
BENCH = Path("bench/results")
MODELS = ("smollm2", "minilm")


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number >= 1, got {text}")
    return value


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m experiments.theory", description=__doc__)
    parser.add_argument(
        "step",
        choices=["maps", "tasks", "formulas", "plots", "all"],
        help="maps: Q^p, deviation and correlation per head of MiniLM and SmolLM2-135M; tasks: perplexity and STS-B "
        "under every rule; formulas: the C++ program's numbers; plots: pictures from the JSON files alone; all of it",
    )
    parser.add_argument("--data", type=Path, help="folder with wikitext2/ and stsb/ (needed by maps, tasks and all)")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the JSON files (default: %(default)s)")
    parser.add_argument("--pictures", type=Path, default=PICTURES, help="folder of the pictures (default: %(default)s)")
    parser.add_argument("--bench", type=Path, default=BENCH, help="folder of measured times (default: %(default)s)")
    parser.add_argument("--cli", help="the program dspattn (default: $DSPATTN_CLI or build/release/apps/dspattn)")
    parser.add_argument(
        "--window", type=_positive, default=512, help="tokens per window of the tasks (default: %(default)s)"
    )
    parser.add_argument("--windows", type=_positive, default=2, help="windows of WikiText-2 (default: %(default)s)")
    parser.add_argument("--rows", type=_positive, default=24, help="rows measured per map (default: %(default)s)")
    parser.add_argument("--pairs", type=_positive, default=150, help="STS-B pairs (default: %(default)s)")
    parser.add_argument(
        "--models", nargs="+", choices=MODELS, default=list(MODELS), help="of the tasks (default: both)"
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="of SmolLM2-135M's tasks")
    parser.add_argument(
        "--tokens", type=Path, help="token ids of WikiText-2 in place of --data (experiments/quality writes the file)"
    )
    return parser


def main(arguments: list[str] | None = None) -> int:
    parser = _parser()
    options = parser.parse_args(arguments)
    measures = options.step in ("maps", "tasks", "all")
    from_tokens = options.step == "tasks" and options.tokens is not None and options.models == ["smollm2"]
    if measures and options.data is None and not from_tokens:
        parser.error(f"--data: expected a folder for `{options.step}`, got none")
    began = time.monotonic()
    try:
        if measures:
            from . import measure

            if options.step in ("maps", "all"):
                measure.measure_maps(options.data, options.results, options.windows, options.rows)
            if options.step in ("tasks", "all"):
                measure.measure_tasks(
                    options.data, options.tokens, options.models, options.results, options.windows, options.window,
                    options.pairs, options.device,
                )  # fmt: skip
        if options.step in ("formulas", "all"):
            formulas.evaluate_formulas(formulas.find_program(options.cli), options.results)
        if options.step in ("plots", "all"):
            from . import pictures

            for path in pictures.draw_all(options.results, options.pictures, options.bench):
                print(path)
    except (OSError, ValueError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    used = sum(os.times()[:4])  # of this process and of the C++ program
    print(f"{options.step}: done in {time.monotonic() - began:.0f} s, {used:.0f} s of processor time", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
