"""PyTorch's own tests of attention with dspattn in its place: which of them fail that pass without it.

    python experiments/clients/pytorch_tests.py SOURCES/test/test_transformers.py --json result.json
    python experiments/clients/pytorch_tests.py SOURCES/test/test_transformers.py --chosen "" --processes 16

The file is not in PyTorch's wheels: take it from the sources of the installed version (it needs the package
expecttest). Every test runs inside ``dspattn.use("dense", strict=False)``; those that fail there run once more
without it, and count only if they then pass. Attention left to PyTorch is as good as served here: what matters is that
nothing becomes wrong. Exits 1 when a test fails that no difference in DIFFERENCES explains, or was not begun in time.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import dspattn

# What docs/models.md says differs by design: the tests that it makes fail, and what they then say.
DIFFERENCES = {
    "dropout drops other weights than PyTorch's": (
        r"test_scaled_dot_product_attention_\w+_dropout_p_0_[25]_|test_transformerencoderlayer_subclass",
        r"not close|RuntimeError not raised",
    ),
    "a mask beside is_causal is served, by whichever kernel": (
        r"test_scaled_dot_product_attention_\w+_causal_attn_mask_dropout_p_0_0_",
        r"RuntimeError not raised",
    ),
    "PyTorch's fused layers stand back": (r"test_disable_fastpath|test_mask_check_fastpath", r"False is not true"),
}


NOT_BEGUN = "not begun in time"


class Recorder:
    """A pytest plugin: runs each test inside or outside of a block and keeps what became of it. Of several processes
    side by side each takes its share of the tests."""

    def __init__(self, inside: bool, process: int, processes: int, seconds: float) -> None:
        self.inside = inside
        self.share = slice(process, None, processes)
        self.end = time.monotonic() + seconds
        self.outcomes: dict[str, str] = {}
        self.errors: dict[str, str] = {}
        self.served = 0
        self.left: Counter[str] = Counter()

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        # Neighbours are of one size: dealt out in turn they make shares of about the same time.
        items[:] = items[self.share]

    def pytest_runtest_setup(self, item: Any) -> None:
        if time.monotonic() > self.end:
            pytest.skip(NOT_BEGUN)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: Any) -> Iterator[None]:
        if not self.inside:
            return (yield)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="no attention call arrived|.* left to PyTorch")
            with dspattn.use("dense", strict=False) as block:
                try:
                    return (yield)
                finally:
                    self.served += block.served
                    self.left += block.left

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "call" or report.failed or report.skipped:
            left_out = report.skipped and NOT_BEGUN in str(report.longrepr)
            self.outcomes[report.nodeid] = NOT_BEGUN if left_out else report.outcome
        if report.failed:
            self.errors[report.nodeid] = " ".join(report.longrepr.reprcrash.message.split())[:300]


def run(arguments: list[str], inside: bool, processes: int, seconds: float) -> dict[str, Any]:
    """The tests in processes of their own, which they leave much behind in, and what became of all of them."""
    together: dict[str, Any] = {"outcomes": {}, "errors": {}, "served": 0, "left": Counter()}
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder, f"{process}.json") for process in range(processes)]
        running = [
            subprocess.Popen(
                [sys.executable, __file__, "--worker", str(file), str(process), *(["--inside"] if inside else []),
                 "--processes", str(processes), "--seconds", str(seconds), "--", *arguments],
                env={**os.environ, "PYTORCH_PRINT_REPRO_ON_FAILURE": "0"},
            )
            for process, file in enumerate(files)
        ]  # fmt: skip
        for child in running:
            child.wait()
        for file in files:
            if not file.exists():
                raise SystemExit("pytorch_tests: a process of the tests ended without a result")
            result = json.loads(file.read_text())
            together["outcomes"] |= result["outcomes"]
            together["errors"] |= result["errors"]
            together["served"] += result["served"]
            together["left"] += Counter(result["left"])
    return together


def compare(tests: Path, chosen: str, processes: int, seconds: float) -> dict[str, Any]:
    """The comparison that the module's description tells of."""
    inside = run([str(tests), "-k", chosen], True, processes, seconds)
    counts = Counter(inside["outcomes"].values())
    failed = [name for name, outcome in inside["outcomes"].items() if outcome == "failed"]
    # Node names begin with a path that pytest makes relative to a root of its own choice.
    again = [f"{tests}::{name.partition('::')[2]}" for name in failed]
    plain = run(again, False, min(processes, len(again)), math.inf) if again else {"outcomes": {}}
    stock = {name.partition("::")[2]: outcome for name, outcome in plain["outcomes"].items()}
    ours = {name.partition("::")[2]: inside["errors"][name] for name in failed}
    alone = {name: error for name, error in ours.items() if stock.get(name) == "passed"}
    explained: dict[str, list[str]] = {}
    for name, error in alone.items():
        for difference, (names, words) in DIFFERENCES.items():
            if re.search(names, name) and re.search(words, error):
                explained.setdefault(difference, []).append(name)
                break
    known = {name for names in explained.values() for name in names}
    return {
        "torch": torch.__version__,
        "tests": str(tests.name),
        "chosen": chosen,
        "passed": counts["passed"],
        "skipped": counts["skipped"],
        "not_begun": counts[NOT_BEGUN],
        "fail_without_dspattn_too": sorted(name for name in ours if stock.get(name) != "passed"),
        "fail_by_a_documented_difference": explained,
        "fail_otherwise": {name: error for name, error in alone.items() if name not in known},
        "calls_served": inside["served"],
        "calls_left": inside["left"],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description="PyTorch's own tests of attention with dspattn in its place.")
    parser.add_argument("tests", nargs="*", help="the test file, of the installed version's sources")
    parser.add_argument(
        "--chosen",
        default="not mask_vs_math or (batch_size_2 and q_seq_len_11)",
        help="which tests, as pytest's -k; default: all, but of 3072 combinations of sizes and masks the 512 smallest",
    )
    parser.add_argument("--json", help="where the result goes, besides standard output")
    parser.add_argument("--processes", type=int, default=1, help="so many side by side; default: 1")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no test after this time; default: none")
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        torch.set_num_threads(max(1, torch.get_num_threads() // given.processes))
        recorder = Recorder(given.inside, int(given.worker[1]), given.processes, given.seconds)
        pytest.main(
            ["-q", "--tb=short", "--show-capture=no", "-p", "no:cacheprovider", *given.tests], plugins=[recorder]
        )
        kept = ("outcomes", "errors", "served", "left")
        Path(given.worker[0]).write_text(json.dumps({name: getattr(recorder, name) for name in kept}))
        return 0
    if len(given.tests) != 1 or not Path(given.tests[0]).is_file():
        parser.error(f"tests: expected one file, got {given.tests}")
    if given.processes < 1:
        parser.error(f"--processes: expected at least 1, got {given.processes}")
    result = compare(Path(given.tests[0]), given.chosen, given.processes, given.seconds)
    text = json.dumps(result, indent=2)
    print(text)
    if given.json:
        Path(given.json).write_text(text + "\n")
    return 1 if result["fail_otherwise"] or result["not_begun"] else 0


if __name__ == "__main__":
    sys.exit(main())
