"""The fused forward's committed results: the docs say what they say, and the bars tell right from wrong."""

import argparse
import itertools

import pytest

from bench.common import results
from bench.forward import bars, tables


def row(ratio, **changes):
    facts = {"part": "table", "mode": "burst", "pattern": "2:4", "d": 64, "n_q": 4096, "mask": "full"}
    return facts | {"ratio": ratio} | changes


@pytest.mark.parametrize(
    "measured, verdict",
    [
        (row({"cudnn": 1.26}), "BELOW"),
        (row({"cudnn": 1.27}), "floor"),
        (row({"cudnn": 1.48}), "goal"),
        (row({"cudnn": 1.3}, pattern="1:2", mask="causal", n_q=1024), "floor"),
        (row({}), ""),
        (row({"cudnn": 1.1}, mode="sustained"), "BELOW"),
        (row({"cudnn": 1.16}, mode="sustained"), "goal"),
        (row({"cudnn": 0.9}, mode="sustained", n_q=512), ""),
        (row({"interleaved": 0.97}, part="grouping"), "BELOW"),
        (row({"bf16": 0.95}, part="fp16"), "goal"),
        (row({"cudnn": 1.19}, part="d256", d=256), "BELOW"),
        (row({"dense batch": 0.96}, part="varlen"), "goal"),
        (row({"cudnn": 3.0, "efficient": 0.9}, part="mask"), "BELOW"),
        (row({"cudnn": 3.0, "efficient": 1.1}, part="mask"), "goal"),
    ],
)
def test_verdicts(measured, verdict):
    assert bars.verdict(measured) == verdict


@pytest.mark.parametrize(
    "ratios, hold",
    [
        ([1.27, 1.5], True),
        ([1.27, 1.26], False),
        ([1.27, None], False),  # cuDNN did not run
        ([], False),
    ],
)
def test_every_bar_is_judged(ratios, hold):
    rows = [row({"cudnn": ratio} if ratio else {}) for ratio in ratios]
    others = [row({}, part="memory", mode="memory")]
    assert bars.all_hold(bars.counts(rows + others)) == hold


def test_the_tables_of_the_docs_say_what_the_results_say(capsys):
    assert tables.main(["--check"]) == 0, capsys.readouterr().err


def test_another_result_gives_another_table():
    result = results.read(results.FOLDER / "forward_h200.json")
    before = tables.tables(result)
    result["rows"][0]["tflops"] += 100
    assert tables.tables(result) != before


def test_a_card_that_slows_down_is_nobodys_advantage(monkeypatch, capsys):
    forward = pytest.importorskip("bench.forward.measure")  # where there is torch
    clock = itertools.count(100)  # every burst takes longer than the one before
    monkeypatch.setattr(forward.timing, "Graphed", lambda calls: calls)
    monkeypatch.setattr(forward.timing, "burst_times", lambda graphed, idle: [next(clock)] * 30)
    monkeypatch.setattr(forward, "tensors", lambda shapes, dtype: [[None, None, None]])
    monkeypatch.setattr(forward.native, "prepare", lambda *qkv, **options: (None, None, None))
    arguments = argparse.Namespace(library=[], idle=0.0, peers=["cudnn"], only=["n=4096", "d=64"], seconds=60)
    bench = forward.Bench(arguments)
    bench.table()
    assert [(row["mask"], row["pattern"], row["ratio"]) for row in bench.rows] == [
        (mask, pattern, {"cudnn": 1.0}) for mask in ("full", "causal") for pattern in ("2:4", "1:2")
    ]
    assert capsys.readouterr().out.count("cudnn") == 4


def test_cells_without_time_are_counted():
    forward = pytest.importorskip("bench.forward.measure")
    arguments = argparse.Namespace(library=[], idle=0.0, peers=["cudnn"], only=["n=4096", "d=64"], seconds=-1)
    bench = forward.Bench(arguments)
    assert not list(bench.cells(bars.LENGTHS))
    assert bench.left_out == 2
