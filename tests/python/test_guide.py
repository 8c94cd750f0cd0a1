"""The code of docs/pytorch.md runs, in order, as one program."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

GUIDE = Path(__file__).parents[2] / "docs" / "pytorch.md"


def test_the_guide_runs(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers", minversion="5.0")
    blocks = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    assert len(blocks) == 5
    scope: dict[str, object] = {}
    for block in blocks:
        exec(block, scope)
    printed = capsys.readouterr().out
    assert "2 attention calls ran with 2:4 interleaved; none was left to PyTorch" in printed
    assert "1 of 2 attention layers changed" in printed
