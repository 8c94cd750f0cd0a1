"""The general kernel's cells and bars: every cell that must be measured is there, and bars tell right from wrong."""

import pytest

from bench.general import cells


def cell(**changes):
    return {"dtype": "bf16", "n": 4096, "d": 64, "mask": "full", "pattern": "2:4"} | changes


@pytest.mark.parametrize(
    "of, ratio, verdict",
    [
        (cell(), 1.04, "BELOW"),
        (cell(), 1.05, "floor"),
        (cell(), 1.25, "goal"),
        (cell(n=512), 0.99, "BELOW"),
        (cell(n=512, pattern="1:2"), 1.0, "goal"),
        (cell(pattern="dense"), 0.89, "BELOW"),
        (cell(pattern="dense"), 0.9, "goal"),
        (cell(pattern="1:4"), 0.5, "goal"),
        (cell(dtype="fp32"), 1.19, "BELOW"),
        (cell(), None, ""),
    ],
)
def test_verdicts(of, ratio, verdict):
    assert cells.verdict(of, ratio) == verdict


@pytest.mark.parametrize(
    "of, ratio, verdict",
    [
        (cell(), 0.84, "BELOW"),
        (cell(pattern="1:4"), 0.85, "floor"),
        (cell(n=512), 1.0, "goal"),
        (cell(dtype="fp32"), 0.99, "BELOW"),
        (cell(dtype="fp32"), 1.0, "goal"),
    ],
)
def test_verdicts_of_backward(of, ratio, verdict):
    assert cells.verdict(of, ratio, "backward") == verdict
    assert cells.flop(of, "backward") == 2.5 * cells.flop(of)


def test_every_cell_has_a_shape_of_as_many_tokens():
    for of in cells.cells():
        batch, heads = cells.shape(of)
        if of["dtype"] == "bf16":
            assert batch * of["n"] == cells.TOKENS
            assert heads * of["d"] == cells.HIDDEN
    assert cells.flop(cell(mask="causal")) * 2 == cells.flop(cell())


def test_the_cells_are_those_of_the_bars():
    all_cells = cells.cells()
    assert len(all_cells) == 2 * 2 * 7 * 4 + 2 * 4 * 3
    assert len(cells.cells("backward")) == 2 * 2 * 7 * 4 + 4 * 3
    assert cells.chosen({"n": "4096", "d": "128", "pattern": "2:4,1:2", "mask": "full"}) == [
        cell(d=128),
        cell(d=128, pattern="1:2"),
    ]
