"""The demo with small random models: its table, its pictures and what it says when it cannot run."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

pytest.importorskip("transformers")
import tiny_models
from dspattn import demo
from dspattn.pretrained import PretrainedError


@pytest.fixture
def small_models(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "load_minilm", lambda folder: (tiny_models.encoder(), tiny_models.tokenizer()))
    monkeypatch.setattr(demo, "load_smollm2", lambda folder: (tiny_models.decoder(12, 8), tiny_models.tokenizer()))
    monkeypatch.setattr(demo, "CONTEXT", 256)


@pytest.mark.usefixtures("small_models")
def test_table_and_pictures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    assert demo.main(["--out", str(tmp_path), "--windows", "1", "--threads", "2"]) == 0
    printed = capsys.readouterr().out
    lines = [line.split()[:2] for line in printed.splitlines() if line.startswith(("MiniLM ", "SmolLM2-135M "))]
    assert lines == [[model, name] for model in ("MiniLM", "SmolLM2-135M") for name in ("dense", "2:4", "1:2")]
    assert "perplexity" in printed and "same next token 100.0 %" in printed and "cosine 1.0000" in printed
    for name in ("attention_maps.png", "kept_weight.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
        assert str(tmp_path / name) in printed


def test_texts_are_long_enough_to_be_pruned() -> None:
    texts = demo.load_texts()
    assert (len(texts.passages), len(texts.questions), len(texts.about)) == (20, 60, 60)
    assert min(len(passage.split()) for passage in texts.passages) > 110
    assert len(texts.running.split()) > 2500


def test_missing_network_is_told_not_thrown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def no_network(folder: object) -> None:
        raise PretrainedError("MiniLM: could not download: is the network reachable?")

    monkeypatch.setattr(demo, "load_minilm", no_network)
    assert demo.main(["--no-pictures"]) == 1
    assert capsys.readouterr().err == "error: MiniLM: could not download: is the network reachable?\n"


def test_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "matplotlib" else real(name))
    assert demo.main([]) == 1
    assert "the demo needs matplotlib: run `python -m pip install matplotlib`" in capsys.readouterr().err


def test_bad_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        demo.main(["--windows", "0"])
    assert "--windows: expected at least 1, got 0" in capsys.readouterr().err
