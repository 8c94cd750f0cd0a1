"""The code of docs/pytorch.md and docs/models.md runs, in order, as one program."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"


def test_the_guide_runs(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers", minversion="5.0")
    text = "".join((DOCS / page).read_text() for page in ("pytorch.md", "models.md"))
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(blocks) == 6
    scope: dict[str, object] = {}
    for block in blocks:
        exec(block, scope)
    printed = capsys.readouterr().out
    assert "2 attention calls ran with 2:4 interleaved; none was left to PyTorch" in printed
    assert "1 of 2 attention layers changed" in printed
