"""The quality experiment on a GPU: its arithmetic, and a whole run on the CPU with a small random model."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tiny_models

EXPERIMENT = Path(__file__).resolve().parents[2] / "experiments" / "quality"
pytest.importorskip("transformers")
if not EXPERIMENT.is_dir():
    pytest.skip("the experiments are not in this tree", allow_module_level=True)
sys.path.insert(0, str(EXPERIMENT))

import gpu_figures as figures  # noqa: E402
import gpu_perplexity as gpu  # noqa: E402


def test_windows_cover_the_text_once() -> None:
    ids = torch.arange(1000)
    found = list(gpu.batches(ids, 64, 256))
    assert torch.equal(torch.cat([part.flatten() for part in found]), ids)
    assert [tuple(part.shape) for part in found] == [(4, 64), (4, 64), (4, 64), (3, 64), (1, 40)]
    assert [tuple(part.shape) for part in gpu.batches(ids[:129], 64, 1)] == [
        (1, 64),
        (1, 64),
    ]  # one token predicts none


def test_the_change_is_that_of_the_perplexity_and_its_error_that_of_draws() -> None:
    """2,000 made-up texts: the stated error is the spread of the change over them."""
    random = np.random.default_rng(0)
    counts = np.array([99] * 30 + [40])
    found = []
    for _ in range(2000):
        dense = random.normal(3.0, 0.5, 31) * counts
        own = dense + random.normal(0.01, 0.02, 31) * counts
        found.append(gpu.paired_change(own, dense, counts))
    changes = np.array([one.change_percent for one in found])
    assert changes.mean() == pytest.approx(100 * (math.exp(0.01) - 1), abs=0.03)
    assert np.mean([one.two_se_percent for one in found]) == pytest.approx(2 * changes.std(), rel=0.08)
    one = gpu.paired_change(own, dense, counts)
    ratio = one.perplexity / math.exp(dense.sum() / counts.sum())
    assert one.change_percent == pytest.approx(100 * (ratio - 1))
    assert math.isnan(gpu.paired_change(own[:1], dense[:1], counts[:1]).two_se_percent)


def test_losses_are_those_of_the_whole_logits() -> None:
    model = tiny_models.decoder()
    windows = torch.randint(0, 64, (3, 50), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        logits = model(windows).logits[:, :-1]
        expected = torch.nn.functional.cross_entropy(logits.transpose(1, 2), windows[:, 1:], reduction="none").sum(1)
        torch.testing.assert_close(gpu.window_losses(model, windows), expected.double(), rtol=1e-5, atol=0)


def test_names_are_those_that_are_registered() -> None:
    from transformers.modeling_utils import AttentionInterface

    known = AttentionInterface().valid_keys()
    assert {mode.name for mode in gpu.MODES if mode.rest != "mean"} <= set(known)
    assert gpu.Mode("2:4", "consecutive", "mean").name == "dspattn_2_4_consecutive_mean"
    assert len({mode.label for mode in gpu.MODES}) == len(gpu.MODES) == 9


def test_a_run_on_the_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(gpu, "load_smollm2", lambda folder: (tiny_models.decoder(), tiny_models.tokenizer()))
    monkeypatch.setattr(gpu, "texts", lambda data: {name: tiny_models.text(700) for name in figures.TEXTS})
    monkeypatch.setattr(gpu, "IMDB_TOKENS", 600)
    tokens, out = tmp_path / "tokens.npz", tmp_path / "perplexity.json"
    assert gpu.main(["tokens", "--data", str(tmp_path), "--out", str(tokens)]) == 0
    assert "700 tokens of wikitext2, 600 tokens of imdb" in capsys.readouterr().out
    options = ["measure", "--tokens", str(tokens), "--device", "cpu", "--batch-tokens", "512", "--out", str(out)]
    modes = ["--modes", "2:4 interleaved drop,1:2 consecutive drop,2:4 interleaved drop shared"]
    assert gpu.main([*options, "--lengths", "128,256", *modes]) == 0
    content = json.loads(out.read_text())
    assert {"command", "commit", "date", "device", "versions", "rows", "left_out"} <= set(content)
    assert content["left_out"] == [] and len(content["rows"]) == 2 * 4 * 3
    losses = [row for row in content["rows"] if row["part"] == "perplexity"]
    assert not any("skipped" in row for row in content["rows"])
    for row in losses:
        assert (row["change_percent"] == 0) == (row["pattern"] == "dense")
        assert row["tokens"] == {"wikitext2": 700, "imdb": 600}[row["text"]] - row["windows"]

    rows = figures.read_rows(out)
    table = figures.losses_table(rows)
    assert "| WikiText-2, windows of | 128 | 256 |" in table and "| 2:4 interleaved, rest dropped | " in table
    assert figures.speed_table(rows).count("x") == 6
    own, together = (
        {(row["text"], row["n"]): row["change_percent"] for row in losses
         if (row["pattern"], row["selection"]) == ("2:4", selection)} for selection in ("own", "shared")
    )  # fmt: skip
    assert own.keys() == together.keys() and all(own[key] != together[key] for key in own)
    assert "2:4 interleaved, rest dropped, heads choose together" in table
    pytest.importorskip("matplotlib")
    assert figures.main(["--results", str(out), "--out", str(tmp_path)]) == 0
    assert all((tmp_path / f"quality_{name}.png").stat().st_size > 10_000 for name in ("context", "speed"))

    assert gpu.main([*options, "--lengths", "128", "--budget-seconds", "-1", *modes]) == 0
    assert len(json.loads(out.read_text())["left_out"]) == 4


def test_what_is_wrong_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def refuse() -> dict[str, Any]:
        raise RuntimeError("no kernel serves this\nand more")

    assert gpu.attempt("it", refuse) == {"skipped": "no kernel serves this"}
    assert gpu.main(["measure", "--tokens", str(tmp_path / "none.npz"), "--device", "cpu"]) == 2
    assert "none.npz does not exist" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        gpu.main(["measure", "--modes", "3:7"])
    assert "--modes: expected some of dense, 2:4 interleaved drop" in capsys.readouterr().err
    assert figures.main(["--results", str(tmp_path / "none.json")]) == 1
    assert figures.losses_table([]).startswith("Not measured yet")
