"""Versions of other packages outside the served range: a clear word, and nothing of theirs breaks."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dspattn import versions
from dspattn.integrations import _on_import, huggingface

pytest.importorskip("transformers")

ROOT = Path(__file__).parents[2]


def test_an_old_torch_is_named() -> None:
    with pytest.raises(ImportError, match=r"expected torch 2.10 or later, got torch 2.9.1\+cu128"):
        versions.require_torch("2.9.1+cu128")
    versions.require_torch("2.10.0")
    versions.require_torch("3.0.0a0+git1234")


@pytest.mark.parametrize("version", ["4.46.3", "5.3.0"])
def test_an_old_transformers_is_left_alone(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_on_import, "_transformers_version", lambda: version)
    monkeypatch.setattr(huggingface, "register", lambda: pytest.fail("registered"))
    with pytest.warns(UserWarning, match=rf"not registered with transformers {version}; expected 5.4 or later"):
        _on_import._register()


def test_a_transformers_that_changed_does_not_break_its_import(monkeypatch: pytest.MonkeyPatch) -> None:
    def register() -> None:
        raise ImportError("cannot import name 'AttentionMaskInterface'")

    monkeypatch.setattr(huggingface, "register", register)
    with pytest.warns(UserWarning, match=r"could not be registered .*AttentionMaskInterface.*tested are 5\."):
        _on_import._register()


@pytest.mark.parametrize("file", ["pyproject.toml", "requirements/python.txt"])
def test_what_is_installed_is_what_is_served(file: str) -> None:
    """pip keeps an older transformers that a looser bound admits, and its names would not be registered."""
    bounds = dict(re.findall(r"\b(torch|transformers)[>=]=([\d.]+)", (ROOT / file).read_text()))
    assert versions.release(bounds["transformers"]) == versions.OLDEST_TRANSFORMERS
    assert versions.release(bounds["torch"]) >= versions.OLDEST_TORCH
