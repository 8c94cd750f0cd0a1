"""The parts of bench.forward.rest that need no GPU."""

import pytest

from bench.forward import rest


def figures(us):
    return {"median_us": us, "spread_us": 0.0, "tflops": 1e3 / us}


def test_cells_are_those_asked_for():
    assert list(rest.cells({"n": "1024,512", "d": "64", "mask": "full"})) == [(1024, 64, "full"), (512, 64, "full")]
    assert len(list(rest.cells({}))) == len(rest.LENGTHS) * 4


def test_rows_stand_beside_drop_and_cudnn():
    timed = {"cudnn": figures(130), ("2:4", "drop"): figures(95), ("2:4", "mean"): figures(100)}
    drop, mean = rest.rows_of((1024, 64, "full"), ["2:4"], timed)
    assert drop["ratio"] == {"cudnn": pytest.approx(1.368)}
    assert mean["ratio"] == {"drop": 0.95, "cudnn": 1.3}
    assert "0.950 of drop" in rest.line_of(mean)


def test_bars():
    rows = [
        {"n": n, "d": 64, "mask": "full", "pattern": "2:4", "rest": "mean", "ratio": {"drop": drop, "cudnn": cudnn}}
        for n, drop, cudnn in ((512, 0.5, 1.0), (1024, 0.91, 1.44))
    ]
    found = rest.judged(rows)
    assert [(value, rest.verdict(value, bar)) for _, value, bar in found] == [
        (0.91, "BELOW"),  # n = 512 has no bar beside drop
        (pytest.approx(1.2), "floor"),
    ]
    assert rest.verdict(0.97, rest.BESIDE_DROP) == "goal"
    assert rest.judged([{**rows[0], "rest": "drop"}]) == []
