"""examples/finetune.py at a size that takes seconds: it learns, and an interrupted run ends as one that was not."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tqdm")
pytest.importorskip("matplotlib")

EXAMPLE = Path(__file__).parents[2] / "examples" / "finetune.py"
EXPERIMENT = EXAMPLE.parents[1] / "experiments" / "finetune" / "run.py"


@pytest.fixture(scope="module")
def finetune() -> Any:
    spec = importlib.util.spec_from_file_location("finetune", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look
    spec.loader.exec_module(module)
    return module


def test_learns_and_resumes(finetune: Any, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over seven lazy dogs; " * 150)
    arguments = [
        "--tiny", "--text", str(text), "--steps", "12", "--length", "160", "--batch", "2", "--micro", "1", "--rate",
        "1e-2", "--warm-up", "2", "--dropout", "0.1", "--checkpointing", "--device", "cpu", "--validation-windows", "2",
    ]  # fmt: skip
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert finetune.main([*arguments, "--out", str(whole), "--save-model"]) == 0
    content = json.loads((whole / "finetune.json").read_text())
    assert [run["attention"] for run in content["runs"]] == list(finetune.ATTENTIONS)
    for run in content["runs"]:
        assert len(run["losses"]) == 12 and run["losses"][-1] < 0.8 * run["losses"][0]
        assert run["validation_perplexity"]["after"] < run["validation_perplexity"]["before"]
    assert (whole / "finetune.png").stat().st_size > 0 and (whole / "sdpa-seed0" / "config.json").is_file()

    pruned = [*arguments, "--attention", "dspattn_2_4", "--out", str(parts)]
    assert finetune.main([*pruned, "--stop-after", "5"]) == 130
    assert not (parts / "finetune.json").exists()
    assert finetune.main([*pruned, "--resume"]) == 0
    (resumed,) = json.loads((parts / "finetune.json").read_text())["runs"]
    (wanted,) = [run for run in content["runs"] if run["attention"] == "dspattn_2_4"]
    assert resumed["losses"] == wanted["losses"]
    assert resumed["validation_perplexity"] == wanted["validation_perplexity"]


def test_experiment_trains_all_attentions_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """experiments/finetune/run.py on a small model: same texts and steps for each, judged beside dense attention."""
    monkeypatch.setattr(sys, "path", list(sys.path))  # the script adds folders
    spec = importlib.util.spec_from_file_location("finetune_run", EXPERIMENT)
    assert spec is not None and spec.loader is not None
    run = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, run)
    spec.loader.exec_module(run)
    out = tmp_path / "finetune.json"
    arguments = "measure --tiny --device cpu --steps 4 --length 100 --batch 2 --limit 300 --rate 1e-2 --seeds 3"
    assert run.main([*arguments.split(), "--budget-seconds", "60", "--out", str(out)]) == 0
    content = json.loads(out.read_text())
    assert content["training"]["steps"] == 4 and content["training"]["test_tokens"] == 300
    rows = content["rows"]
    assert [(row["attention"], row["seed"]) for row in rows] == [(name, 3) for name in run.ATTENTIONS]
    for row in rows:
        assert len(row["losses"]) == 4 and row["perplexity"] < row["perplexity_before"]
        assert row["seconds_per_step"] > 0 and row["speed_over_sdpa"] > 0
    dense, *pruned = rows
    assert dense["change_percent"] == 0 and dense["speed_over_sdpa"] == 1
    for row in pruned:  # the same windows: pruning alone tells the first losses apart, and it does
        assert 0 < abs(row["losses"][0] - dense["losses"][0]) < 0.05
        assert row["change_percent"] == pytest.approx(100 * (row["perplexity"] / dense["perplexity"] - 1), abs=1e-2)

    # Time for one step only: every run takes one.
    assert run.main([*arguments.split(), "--budget-seconds", "0.1", "--out", str(out)]) == 0
    assert [len(row["losses"]) for row in json.loads(out.read_text())["rows"]] == [1, 1, 1]
    assert run.main(["measure", "--device", "cpu", "--tokens", str(tmp_path / "none.npz")]) == 2


def test_profile_of_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """experiments/finetune/step_profile.py: each model runs its own attention, and all else is the same."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.syspath_prepend(str(EXPERIMENT.parent))
    for name in ("run", "step_profile"):  # other experiments have a run.py, too
        monkeypatch.setitem(sys.modules, name, sys)
        del sys.modules[name]
    step_profile = importlib.import_module("step_profile")
    out = tmp_path / "profile.json"
    arguments = "--tiny --device cpu --batch 2 --length 100 --seconds 0.1 --calls 2"
    assert step_profile.main([*arguments.split(), "--out", str(out)]) == 0
    calls, host, batch = json.loads(out.read_text())["rows"]
    assert [row["call"] for row in calls["rows"]] == ["sdpa"] * 3 + ["dspattn"] * 3
    names = ["sdpa", "dspattn_2_4", "dspattn_1_2"]
    for case in (host, batch):
        assert [row["attention"] for row in case["timed"]] == names
        assert all(row["ms_per_step"] > 0 and row["speed_over_sdpa"] > 0 for row in case["timed"])
    for name, row in zip(names, batch["profiled"], strict=True):
        ours = [kernel for kernel in row["totals_us"] if kernel.startswith("dspattn::")]
        assert row["attention"] == name and 0 < row["busy_ms"] <= row["span_ms"] and row["kernels"] > 0
        assert ours == [] if name == "sdpa" else len(ours) == 2
        assert any("scaled_dot_product" in kernel for kernel in row["totals_us"]) == (name == "sdpa")
