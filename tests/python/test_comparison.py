"""The comparison's scripts in small: rows in the common shape, pictures from them, a page that says what they say."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "experiments" / "comparison"
PAGE = ROOT / "docs" / "comparison.md"


@pytest.fixture(autouse=True)
def scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS))


@pytest.fixture
def rows() -> dict[str, list[dict[str, Any]]]:
    """Every figure at the smallest sizes."""
    import figures
    import text_model
    from measuring import Clock

    clock = Clock("cpu", repeats=1, warmup=0)
    names = ["full", "sdpa", "fused", "linear_transformer"]
    return {
        "latency": figures.latency("cpu", [64, 128], ["fp32"], 64, clock, False),
        "overhead": figures.overhead("cpu", [64, 128], ["fp32"], 64, clock),
        "density": figures.density("cpu", 64, ["fp32"], 64, [0.5, 1.0], clock),
        "model": text_model.end_to_end("cpu", [64], [2], [32], ["fp32"], 64, clock, names),
        "memory": figures.memory("cpu", [256, 512], ["fp32"], 1, clock),
    }


def test_every_figure(rows: dict[str, list[dict[str, Any]]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for figure, found in rows.items():
        for row in found:
            assert {"kernel", "pattern", "grouping", "dtype", "batch", "heads", "n_k", "d", "mask"} <= set(row), figure
            assert "skipped" not in row, row
    assert {row["kernel"] for row in rows["latency"]} >= {"full", "sdpa", "pipeline", "fused", "bigbird + 1:2"}
    for row in rows["latency"]:
        assert row["ratio"]["unfused"] > 0
        if row["kind"] == "zoo":
            assert set(row["stages"]) == {"scores", "softmax", "product", "overhead"}
    for row in rows["model"]:
        assert 0 < row["attention_us"] <= row["median_us"]
    peaks = {(row["kernel"], row["n_k"]): row["peak_bytes"] for row in rows["memory"]}
    # Two matrices of 4 heads beside the output: memory is counted, and grows as it should.
    assert peaks["full", 512] >= 2 * 4 * 512 * 512 * 4
    assert peaks["full", 512] > 3 * peaks["full", 256]
    assert peaks["linear_transformer", 512] < 2.2 * peaks["linear_transformer", 256]
    assert peaks["fused", 512] < peaks["full", 512] / 2

    pytest.importorskip("matplotlib")
    import measuring
    import plot
    import tables

    monkeypatch.setattr(measuring, "RESULTS", tmp_path)
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    for figure, found in rows.items():
        path = measuring.write(figure, "cpu", found)
        assert {"command", "commit", "date", "device", "versions", "rows"} == set(json.loads(path.read_text()))
        drawn = plot.DRAWINGS[figure](found)
        drawn.savefig(tmp_path / f"{figure}.png")
        plot.plt.close(drawn)
    page = tables.rewritten(PAGE.read_text())
    for figure in rows:
        assert f"images/comparison/{figure}_" in page


def test_what_cannot_run_is_a_row_with_its_reason() -> None:
    from measuring import attempt

    def refuse() -> dict[str, Any]:
        raise RuntimeError("too long\nand more")

    assert attempt("it", refuse) == {"median_us": None, "skipped": "too long"}


def test_the_separate_pruning_keeps_what_the_epilogue_keeps() -> None:
    import figures

    import dspattn

    q, k = (torch.randn(1, 1, 32, 16, generator=torch.Generator().manual_seed(i)) for i in range(2))
    scores = (q * 0.25) @ k.transpose(-1, -2)
    kept, codes = figures.prune_separately(scores, "1:2")
    torch.testing.assert_close(kept, dspattn.sddmm(q, k, pattern="1:2")[0])
    assert codes.dtype == torch.uint8
    kept, codes = figures.prune_separately(scores, "2:4")
    largest = scores.unflatten(-1, (-1, 4)).topk(2, -1).values.sum(-1)
    torch.testing.assert_close(kept.unflatten(-1, (-1, 2)).sum(-1), largest)
    assert set(codes.flatten().tolist()) <= {4, 8, 9, 12, 13, 14}


def test_the_page_says_what_the_zoo_and_the_results_say() -> None:
    import tables

    assert tables.rewritten(PAGE.read_text()) == PAGE.read_text()


def test_the_page_runs(capsys: pytest.CaptureFixture[str]) -> None:
    scope: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL):
        exec(block, scope)
    torch.testing.assert_close(scope["out"], scope["same"], rtol=0, atol=1e-5)
    assert "nystromformer" in capsys.readouterr().out
