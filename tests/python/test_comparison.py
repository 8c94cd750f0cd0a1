"""The comparison's scripts in small: rows in the common shape, pictures from them, a page that says what they say."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "experiments" / "comparison"
DOCS = ROOT / "docs"


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
        "training": figures.training("cpu", 64, ["fp32"], 1, clock),
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
    whole = tables.rewritten("log/comparison.md", (DOCS / "log" / "comparison.md").read_text())
    assert whole.count("| fused |") >= 3
    # Where lines cross is told of a GPU alone, and these rows are of a CPU.
    assert [line.split("`")[1] for line in whole.splitlines() if "Not measured" in line] == [
        "python experiments/comparison/run.py latency"
    ]
    assert "Not measured on a GPU" in tables.rewritten("comparison.md", (DOCS / "comparison.md").read_text())
    for figure, found in rows.items():  # as if a GPU had measured them
        (tmp_path / f"{figure}_h200.json").write_text(json.dumps({"device": {"name": "GPU"}, "rows": found}))
    page = tables.rewritten("comparison.md", (DOCS / "comparison.md").read_text())
    for figure in rows:
        assert f"images/comparison/{figure}_h200.png" in page


def test_crossings() -> None:
    import tables

    line = {256: 100.0, 512: 200.0, 1024: 400.0}
    assert tables.crossing(line, {256: 141.4214, 512: 141.4214, 1024: 141.4214}) == "400"
    assert tables.crossing(line, {256: 50.0, 512: 50.0, 1024: 50.0}) == "below 256"
    assert tables.crossing(line, {256: 500.0, 512: 500.0, 1024: 500.0}) == "not up to 1,024"
    assert tables.crossing(line, {2048: 1.0}) == tables.DASH


def test_what_cannot_run_is_a_row_with_its_reason() -> None:
    from measuring import NO_TIME, Clock, attempt

    def refuse() -> dict[str, Any]:
        raise RuntimeError("too long\nand more")

    clock = Clock("cpu", repeats=1)
    assert attempt("it", refuse, clock) == {"median_us": None, "skipped": "too long"}
    clock.until = 0.0
    assert attempt("it", lambda: {"median_us": 1.0}, clock)["skipped"] == NO_TIME


def test_a_bounded_run_times_fewer_calls_and_ends_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import measuring
    import run

    calls = 0

    def slow() -> None:
        nonlocal calls
        calls += 1
        time.sleep(0.01)

    measuring.Clock("cpu", repeats=50, warmup=3, case_seconds=0.05).times(slow)
    assert 6 <= calls <= 8
    calls = 0
    measuring.Clock("cpu", repeats=50, warmup=3, case_seconds=0.001).times(slow)
    assert calls == 4  # one shows how slow it is

    ends = run.ends_of(run.FIGURES, 100.0)
    assert list(ends.values()) == sorted(ends.values())
    assert ends["training"] - time.monotonic() == pytest.approx(100.0, abs=1.0)
    monkeypatch.setattr(measuring, "RESULTS", tmp_path)
    sizes = {**run.SIZES["cpu"], "lengths": [64], "density_n": 64, "model_lengths": [64]}
    monkeypatch.setitem(run.SIZES, "cpu", sizes)
    assert run.main(["all", "--device", "cpu", "--tokens", "64", "--budget-seconds", "1e-9"]) == 0
    assert capsys.readouterr().out.count("there was no time for any case") == len(run.FIGURES)
    assert not list(tmp_path.iterdir())
    row = {"kernel": "full", "dtype": "bf16", "n_k": 64, "median_us": 1.0}
    path = measuring.write("latency", "cpu", [row, {**row, "n_k": 128, "skipped": measuring.NO_TIME}])
    assert path is not None
    content = json.loads(path.read_text())
    assert content["rows"] == [row] and content["left_out"] == ["dtype bf16, n_k 128, kernel full"]
    with pytest.raises(SystemExit):
        run.main(["all", "--budget-seconds", "0"])
    assert "--budget-seconds: expected more than 0, got 0" in capsys.readouterr().err


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


def test_the_pages_say_what_the_zoo_and_the_results_say() -> None:
    import tables

    assert tables.main(["--check"]) == 0


def test_the_page_runs(capsys: pytest.CaptureFixture[str]) -> None:
    scope: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", (DOCS / "zoo.md").read_text(), re.DOTALL):
        exec(block, scope)
    torch.testing.assert_close(scope["out"], scope["same"], rtol=0, atol=1e-5)
    assert "nystromformer" in capsys.readouterr().out
