"""The backward's bars tell right from wrong, and bursts in turn favour nobody."""

import itertools

import pytest

from bench.backward import bars


def row(ratio, **changes):
    facts = {
        "part": "table",
        "mode": "burst",
        "pass": "backward",
        "pattern": "2:4",
        "d": 64,
        "n_q": 4096,
        "mask": "full",
    }
    return facts | {"ratio": ratio} | changes


@pytest.mark.parametrize(
    "measured, verdict",
    [
        (row({"cudnn": 0.94}), "BELOW"),
        (row({"cudnn": 0.95}), "floor"),
        (row({"cudnn": 1.08}), "goal"),
        (row({"cudnn": 0.91}, n_q=512), "goal"),
        (row({"cudnn": 0.89}, n_q=512), "BELOW"),
        (row({"cudnn": 1.0}, mode="sustained"), ""),
        (row({"cudnn": 1.04}, **{"pass": "both"}), "BELOW"),
        (row({"cudnn": 1.06}, mode="sustained", **{"pass": "both"}), "floor"),
        (row({"cudnn": 0.91}, part="dims", d=192), "goal"),
        (row({"dense batch": 0.84}, part="varlen"), "BELOW"),
        (row({"flash2": 2.0}), ""),
    ],
)
def test_verdicts(measured, verdict):
    assert bars.verdict(measured) == verdict


def test_operations_are_counted_as_everybody_does():
    assert bars.flop(2, 3, 100, 64, False, "backward") == 2.5 * 4 * 2 * 3 * 100 * 100 * 64
    assert bars.flop(2, 3, 100, 64, True, "both") == 3.5 * 2 * 2 * 3 * 100 * 100 * 64


def test_a_card_that_slows_down_is_nobodys_advantage(monkeypatch):
    measure = pytest.importorskip("bench.backward.measure")  # where there is torch
    clock = itertools.count(100)  # every burst takes longer than the one before
    monkeypatch.setattr(measure.timing, "burst_times", lambda graph, idle: [next(clock)] * 30)
    found = measure.in_turn({"cudnn": None, "2:4": None, "1:2": None}, "burst", 0.0)
    assert {figures["median_us"] for figures in found.values()} == {102.5}


def test_a_row_says_what_it_was_timed_beside(monkeypatch, capsys):
    measure = pytest.importorskip("bench.backward.measure")
    bench = measure.Bench(type("Arguments", (), {"idle": 0.0, "peers": [], "only": ["n=1024", "d=64"]}))
    assert bench.wanted(n=1024, d=64, mask="full") and not bench.wanted(n=4096, d=64, mask="full")
    cell = type("Cell", (), {"facts": lambda self: {"n_q": 1024, "d": 64, "mask": "full"}})()
    figures, peer = {"median_us": 100.0, "tflops": 400.0}, {"median_us": 120.0, "tflops": 330.0}
    bench.add("table", cell, "backward", "burst", "2:4", figures, {"cudnn": peer}, {})
    assert bench.rows[0]["ratio"] == {"cudnn": 1.2}
    assert "1.200x" in capsys.readouterr().out
