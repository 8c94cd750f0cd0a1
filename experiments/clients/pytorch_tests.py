"""PyTorch's own tests of attention with dspattn in its place: which of them fail that pass without it.

    python experiments/clients/pytorch_tests.py SOURCES/test/test_transformers.py --json result.json

The file is not in PyTorch's wheels: take it from the sources of the installed version. Every test runs inside
``dspattn.use("dense", strict=False)``; those that fail there run once more without it, and count only if they then
pass. Attention left to PyTorch is as good as served here: what matters is that nothing becomes wrong.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import dspattn


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
            self.errors[report.nodeid] = str(report.longrepr).strip().splitlines()[-1]


def run(arguments: list[str], inside: bool) -> dict[str, Any]:
    """One pytest run in a process of its own: the tests leave much behind."""
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        command = [sys.executable, __file__, "--worker", file.name, *(["--inside"] if inside else []), "--", *arguments]
        subprocess.run(command, check=False)
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
    return {
        "tests": str(tests.name),
        "chosen": chosen,
        "passed": counts["passed"],
        "skipped": counts["skipped"],
        "fail_without_dspattn_too": sorted(name for name in ours if stock.get(name) != "passed"),
        "fail_with_dspattn_alone": {name: error for name, error in ours.items() if stock.get(name) == "passed"},
        "calls_served": inside["served"],
        "calls_left": inside["left"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="PyTorch's own tests of attention with dspattn in its place.")
    parser.add_argument("tests", nargs="*", help="the test file, of the installed version's sources")
    parser.add_argument("--chosen", default="SDPA or AttnBias", help="which tests, as pytest's -k")
    parser.add_argument("--json", help="where the result goes, besides standard output")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        recorder = Recorder(given.inside)
        pytest.main(["-q", "--tb=line", "-p", "no:cacheprovider", *given.tests], plugins=[recorder])
        kept = ("outcomes", "errors", "served", "left")
        Path(given.worker).write_text(json.dumps({name: getattr(recorder, name) for name in kept}))
        return
    if len(given.tests) != 1 or not Path(given.tests[0]).is_file():
        parser.error(f"tests: expected one file, got {given.tests}")
    text = json.dumps(compare(Path(given.tests[0]), given.chosen), indent=2)
    print(text)
    if given.json:
        Path(given.json).write_text(text + "\n")


if __name__ == "__main__":
    main()
