"""Versions of other packages outside the served range: a clear word, and nothing of theirs breaks."""

from __future__ import annotations

import pytest

from dspattn import versions
from dspattn.integrations import _on_import, huggingface

pytest.importorskip("transformers")


def test_an_old_torch_is_named() -> None:
    with pytest.raises(ImportError, match=r"expected torch 2.10 or later, got torch 2.9.1\+cu128"):
        versions.require_torch("2.9.1+cu128")
    versions.require_torch("2.10.0")
    versions.require_torch("3.0.0a0+git1234")


def test_an_old_transformers_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_on_import, "_transformers_version", lambda: "4.46.3")
    monkeypatch.setattr(huggingface, "register", lambda: pytest.fail("registered"))
    with pytest.warns(UserWarning, match=r"not registered with transformers 4.46.3; expected 5.0 or later"):
        _on_import._register()


def test_a_transformers_that_changed_does_not_break_its_import(monkeypatch: pytest.MonkeyPatch) -> None:
    def register() -> None:
        raise ImportError("cannot import name 'AttentionMaskInterface'")

    monkeypatch.setattr(huggingface, "register", register)
    with pytest.warns(UserWarning, match=r"could not be registered .*AttentionMaskInterface.*tested are 5\."):
        _on_import._register()
