"""The simulator of docs/parallel.md: what its numbers must obey, and that the page has the ones it computes."""

from __future__ import annotations

import importlib.util
import math
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def simulate():
    spec = importlib.util.spec_from_file_location("parallel_simulate", ROOT / "experiments/parallel/simulate.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look themselves up
    spec.loader.exec_module(module)
    return module


def test_links_that_cost_nothing_lose_nothing(simulate):
    machine = simulate.Machine({1024: 500.0}, math.inf, math.inf, 0.0, 8)
    model = simulate.Model(heads=32, kv_heads=8, d=128)
    for world in (8, 16, 32):
        for name, efficiency in simulate.efficiencies(1 << 20, world, model, machine).items():
            assert efficiency == pytest.approx(1.0), name
    # More ranks than heads: all-to-all leaves the others idle.
    assert simulate.efficiencies(1 << 20, 64, model, machine)["all_to_all"] == pytest.approx(0.5)


def test_slower_links_and_shorter_sequences_cost_more(simulate):
    model = simulate.Model(heads=32, kv_heads=8, d=128)
    fast, slow = (simulate.Machine({1024: 500.0}, 4e11, speed, 1e-5, 8) for speed in (5e10, 1e10))
    for world in (16, 128):
        for n in (1 << 17, 1 << 20):
            quick, late, longer = (
                simulate.efficiencies(*arguments)
                for arguments in ((n, world, model, fast), (n, world, model, slow), (2 * n, world, model, fast))
            )
            for name in quick:
                assert late[name] <= quick[name] <= longer[name] + 1e-9 <= 1 + 1e-6, name


def test_the_page_has_the_table(simulate):
    rates = simulate.measured_rates(ROOT / "bench/results/forward_h200.json", 128)
    machine = simulate.Machine(rates, 450e9, 50e9, 10e-6, 8)
    assert simulate.table(simulate.Model(32, 8, 128), machine) in (ROOT / "docs/parallel.md").read_text()


def test_measured_runs_of_processes_take_what_is_computed(simulate):
    """At least as long, and at most a fifth longer: the model leaves out what starting, agreeing and merging cost."""
    found = simulate.check(ROOT / "experiments/parallel/results/cpu_aarch64.json")
    assert found
    for case, measured, computed in found:
        assert 0.97 * computed <= measured <= 1.2 * computed, case
