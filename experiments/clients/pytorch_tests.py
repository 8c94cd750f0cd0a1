"""PyTorch's own tests of attention with dspattn in its place: which of them fail that pass without it.

    python experiments/clients/pytorch_tests.py SOURCES/test/test_transformers.py --json result.json

The file is not in PyTorch's wheels: take it from the sources of the installed version (it needs the packages expecttest
and hypothesis). Every test runs inside ``dspattn.use("dense", strict=False)``; those that fail there run once more
without it, and count only if they then pass. Attention left to PyTorch is as good as served here: what matters is that
nothing becomes wrong. Exits 1 when a test fails that no difference in DIFFERENCES explains.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
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


class Recorder:
    """A pytest plugin: runs each test inside or outside of a block and keeps what became of it."""

    def __init__(self, inside: bool) -> None:
        self.inside = inside
        self.outcomes: dict[str, str] = {}
        self.errors: dict[str, str] = {}
        self.served = 0
        self.left: Counter[str] = Counter()

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
            self.outcomes[report.nodeid] = report.outcome
        if report.failed:
            self.errors[report.nodeid] = " ".join(report.longrepr.reprcrash.message.split())[:300]


def run(arguments: list[str], inside: bool) -> dict[str, Any]:
    """One pytest run in a process of its own: the tests leave much behind."""
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        command = [sys.executable, __file__, "--worker", file.name, *(["--inside"] if inside else []), "--", *arguments]
        subprocess.run(command, check=False, env={**os.environ, "PYTORCH_PRINT_REPRO_ON_FAILURE": "0"})
        try:
            return dict(json.loads(Path(file.name).read_text()))
        except json.JSONDecodeError:
            raise SystemExit("pytorch_tests: the tests' process ended without a result") from None


def compare(tests: Path, chosen: str) -> dict[str, Any]:
    """The comparison that the module's description tells of."""
    inside = run([str(tests), "-k", chosen], inside=True)
    counts = Counter(inside["outcomes"].values())
    failed = [name for name, outcome in inside["outcomes"].items() if outcome == "failed"]
    # Node names begin with a path that pytest makes relative to a root of its own choice.
    plain = (
        run([f"{tests}::{name.partition('::')[2]}" for name in failed], inside=False) if failed else {"outcomes": {}}
    )
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
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        recorder = Recorder(given.inside)
        pytest.main(
            ["-q", "--tb=short", "--show-capture=no", "-p", "no:cacheprovider", *given.tests], plugins=[recorder]
        )
        kept = ("outcomes", "errors", "served", "left")
        Path(given.worker).write_text(json.dumps({name: getattr(recorder, name) for name in kept}))
        return 0
    if len(given.tests) != 1 or not Path(given.tests[0]).is_file():
        parser.error(f"tests: expected one file, got {given.tests}")
    result = compare(Path(given.tests[0]), given.chosen)
    text = json.dumps(result, indent=2)
    print(text)
    if given.json:
        Path(given.json).write_text(text + "\n")
    return 1 if result["fail_otherwise"] else 0


if __name__ == "__main__":
    sys.exit(main())
