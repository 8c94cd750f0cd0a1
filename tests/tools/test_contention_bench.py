"""What tensor work does to other instructions: the docs say what the committed results say."""

import importlib
import json
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parents[2] / "bench"


@pytest.fixture
def module(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))
    yield importlib.import_module("contention")
    sys.modules.pop("contention", None)


def test_the_table_of_the_docs_says_what_the_results_say(module, capsys):
    assert module.main(["--table", "--check"]) == 0, capsys.readouterr().err


def test_another_result_gives_another_table(module):
    result = json.loads(module.RESULTS.read_text(encoding="utf-8"))
    before = module.table(result)
    result["rows"][0]["cycles_beside"] += 1
    assert module.table(result) != before


def test_wrong_arguments_are_told(module, capsys):
    assert module.main(["one"]) == 2
    assert "contention.py" in capsys.readouterr().err
