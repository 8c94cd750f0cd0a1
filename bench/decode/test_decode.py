"""The cells of few queries: bytes that must be read, bars, verdicts."""

import pytest

from bench.decode.cells import Cell, cells, row_of


def test_bytes_that_must_be_read():
    own = Cell("one", 2, 32, 8, 1, 1024, 128)
    assert own.dense_bytes == 2 * 8 * 1024 * 128 * 2 * 2
    assert own.needed_bytes == own.dense_bytes  # heads of a group keep different keys
    assert Cell("one", 2, 32, 32, 1, 1024, 128).needed_bytes == 4 * own.dense_bytes * 3 // 4
    assert Cell("shared", 2, 32, 8, 1, 1024, 128, choice="shared").needed_bytes == own.dense_bytes * 3 // 4
    assert Cell("several", 2, 32, 32, 2, 1024, 128).needed_bytes == 4 * own.dense_bytes


def test_every_cell_has_a_bar_and_none_comes_twice():
    assert len(set(cells())) == len(cells())
    for cell in cells():
        floor, goal = cell.bar()
        assert floor >= 0.95
        assert goal is None or goal > floor


@pytest.mark.parametrize(
    ("peer_us", "us", "verdict"),
    [(130.0, 100.0, "goal"), (118.0, 100.0, "floor"), (110.0, 100.0, "BELOW"), (1300.0, 1000.0, "BELOW")],
)
def test_verdicts(peer_us, us, verdict):
    cell = Cell("one", 16, 32, 32, 1, 8192, 64)  # 1.07 GB dense, 0.8 GB needed: at 1000 us far from the card's rate
    if us == 100.0:
        cell = Cell("one", 2, 32, 32, 1, 8192, 128)  # 0.2 GB needed: a rate of 4.2 TB/s in 48 us
        us, peer_us = us / 2.1, peer_us / 2.1
    row = row_of(
        cell, "1:2", {"median_us": us, "spread_us": 1.0}, {"cudnn": {"median_us": peer_us}, "flash2": None}, {}
    )
    assert row["verdict"] == verdict
    assert row["ratio"] == {"cudnn": pytest.approx(peer_us / us, abs=1e-3)}


def test_no_peer_no_verdict():
    row = row_of(cells()[0], "2:4", {"median_us": 10.0, "spread_us": 1.0}, {"cudnn": None}, {"cudnn": "refused"})
    assert row["verdict"] == ""
