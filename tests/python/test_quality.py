"""The quality experiment: its committed results, and a whole run on made-up data with small random models."""

from __future__ import annotations

import importlib.util
import json
import lzma
import sys
from pathlib import Path
from typing import Any

import pytest

import tiny_models

ROOT = Path(__file__).resolve().parents[2]
EXPERIMENT = ROOT / "experiments" / "quality"
pytest.importorskip("transformers")
pytest.importorskip("tqdm")
if not EXPERIMENT.is_dir():
    pytest.skip("the experiments are not in this tree", allow_module_level=True)


def module(name: str) -> Any:
    """A file of the experiment as a module, under a name that no other experiment's file has."""
    unique = name if name.startswith("quality_") else f"quality_{name}"
    if unique not in sys.modules:
        spec = importlib.util.spec_from_file_location(unique, EXPERIMENT / f"{name}.py")
        assert spec is not None and spec.loader is not None
        sys.modules[unique] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[unique])
    return sys.modules[unique]


tasks, expected, plot, run = (module(name) for name in ("quality_tasks", "quality_expected", "plot", "run"))


def write_xz(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with lzma.open(path, "wt", encoding="utf-8", newline="") as stream:
        stream.write(text)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A data folder in the layout of the real one, with 12 pairs and a text of 1,300 words."""
    folder = tmp_path / "data"
    pairs = [f"{tiny_models.text(70 + i)},{tiny_models.text(75 + 3 * i)},{i % 6}.0" for i in range(12)]
    write_xz(folder / "stsb" / "stsb-en-test.csv.xz", "\r\n".join(pairs) + "\r\n")
    write_xz(folder / "wikitext2" / "wiki.test.raw.xz", tiny_models.text(1300))
    return folder


@pytest.fixture
def small_models(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "load_minilm", lambda folder: (tiny_models.encoder(), tiny_models.tokenizer()))
    monkeypatch.setattr(run, "load_smollm2", lambda folder: (tiny_models.decoder(), tiny_models.tokenizer()))
    short = lambda folder: tasks.LanguageModel(folder, "wikitext2", 512, 1024)  # noqa: E731
    monkeypatch.setitem(run.TASKS, "wikitext2_512", short)


def arguments(data: Path, tmp_path: Path, *more: str) -> list[str]:
    folders = ["--results", str(tmp_path / "results"), "--work", str(tmp_path / "work"), "--threads", "2"]
    return ["--data", str(data), "--tasks", "stsb", "wikitext2_512", "--patterns", "2:4", *folders, *more]


def results(tmp_path: Path, task: str) -> dict[str, Any]:
    return json.loads((tmp_path / "results" / f"{task}.json").read_text())


def test_committed_results_meet_the_expectations(capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main(["--check"]) == 0, capsys.readouterr().out


def test_committed_results_have_one_shape() -> None:
    files = sorted((EXPERIMENT / "results").glob("*.json"))
    assert files
    for path in files:
        content = json.loads(path.read_text())
        assert {"command", "commit", "date", "device", "versions", "rows"} <= set(content)
        for row in content["rows"]:
            assert {"model", "task", "metric", "pattern", "grouping", "value", "low", "high", "count"} <= set(row)
            assert row["low"] <= row["value"] <= row["high"]
            assert row["implementation"] == ("torch sdpa" if row["pattern"] == "dense" else "dspattn")


@pytest.mark.usefixtures("small_models")
def test_a_run_agrees_with_the_emulation_and_resumes(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run.main(arguments(data, tmp_path)) == 0
    own = {task: results(tmp_path, task)["rows"] for task in ("stsb", "wikitext2_512")}
    assert [(row["pattern"], row["grouping"]) for row in own["stsb"]] == [
        ("dense", "none"),
        ("2:4", "interleaved"),
        ("2:4", "consecutive"),
    ]
    assert any(row["change"] != 0.0 for row in own["wikitext2_512"])
    for row in own["stsb"] + own["wikitext2_512"]:
        assert row["low"] <= row["value"] <= row["high"]
        assert row["pattern"] != "dense" or row["change"] == row["change_low"] == row["change_high"] == 0.0

    assert run.main(arguments(data, tmp_path, "--implementation", "emulation")) == 0
    for task, rows in own.items():
        for row, other in zip(rows, results(tmp_path, task)["rows"], strict=True):
            assert row["value"] == pytest.approx(other["value"], rel=2e-3)

    def refuse(*_: Any) -> None:
        raise AssertionError("computed again what was there")

    monkeypatch.setattr(run, "compute", refuse)
    assert run.main(arguments(data, tmp_path)) == 0
    assert results(tmp_path, "stsb")["rows"] == own["stsb"]


@pytest.mark.usefixtures("small_models")
def test_a_stopped_language_model_cell_goes_on(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = tasks.evaluate.token_losses
    calls = 0

    def stop_at_the_second(model: Any, window: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise KeyboardInterrupt
        return real(model, window)

    monkeypatch.setattr(tasks.evaluate, "token_losses", stop_at_the_second)
    command = [*arguments(data, tmp_path), "--only-dense", "--tasks", "wikitext2_512"]
    with pytest.raises(KeyboardInterrupt):
        run.main(command)
    assert run.main(command) == 0
    assert calls == 3  # two windows, one of them begun twice


def test_missing_data_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main(["--data", str(tmp_path), "--tasks", "stsb"]) == 2
    assert "stsb-en-test.csv.xz, which does not exist" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        run.main(["--tasks", "stsb"])
    assert "--data: expected a folder" in capsys.readouterr().err


@pytest.mark.parametrize(("shift", "verdict"), [(0.0, 0), (0.04, 0), (0.06, 1)])
def test_check_knows_in_from_out(tmp_path: Path, shift: float, verdict: int) -> None:
    rows = [
        {
            "task": cell.task,
            "metric": cell.metric,
            "pattern": cell.pattern,
            "grouping": cell.grouping,
            "value": cell.value,
        }
        for cell in expected.EXPECTATIONS
        if cell.task == "stsb"
    ]
    rows[-1]["value"] += shift  # the tolerance of STS-B is 0.05
    (tmp_path / "stsb.json").write_text(json.dumps({"rows": rows}))
    assert run.main(["--check", "--tasks", "stsb", "--results", str(tmp_path)]) == verdict


def test_check_misses_what_is_not_there(tmp_path: Path) -> None:
    assert run.main(["--check", "--tasks", "stsb", "--results", str(tmp_path)]) == 1


def test_the_plot_is_drawn_from_the_committed_results(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert plot.main(["--out", str(tmp_path)]) == 0
    assert (tmp_path / "quality.png").stat().st_size > 10_000
    assert plot.main(["--out", str(tmp_path), "--results", str(tmp_path)]) == 1


def test_the_tables_of_the_docs_say_what_the_results_say(capsys: pytest.CaptureFixture[str]) -> None:
    assert module("tables").main(["--check"]) == 0, capsys.readouterr().err


def test_table_cells() -> None:
    tables = module("tables")
    row = {"metric": "perplexity", "value": 27.136, "change": 0.382, "change_low": -0.04, "change_high": 0.8}
    assert (tables.number(row), tables.change(row), tables.interval(row)) == (
        "27.14",
        "+0.4 %",
        "\N{MINUS SIGN}0.0 … 0.8",
    )
    row = {"metric": "recall_at_1", "value": 64.0, "change": 0.0, "change_low": 0.0, "change_high": 0.0}
    assert (tables.number(row), tables.change(row)) == ("64.00", "±0")
    assert tables.replaced("no markers", "table") is None


def test_cost_is_more_when_worse() -> None:
    row = {"metric": "cosine_to_dense", "change": -0.01, "change_low": -0.02, "change_high": -0.005}
    assert plot.cost(row) == pytest.approx((1.0, 0.5, 2.0))
    row = {"metric": "perplexity", "change": 3.0, "change_low": 2.0, "change_high": 4.0}
    assert plot.cost(row) == (3.0, 2.0, 4.0)
