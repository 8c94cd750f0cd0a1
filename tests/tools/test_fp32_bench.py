"""The fp32 forward's committed results: the docs say what they say."""

import importlib
import json
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parents[2] / "bench"


@pytest.fixture
def module(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))
    yield importlib.import_module("fp32_table")
    sys.modules.pop("fp32_table", None)


def test_the_table_of_the_docs_says_what_the_results_say(module, capsys):
    assert module.main(["--check"]) == 0, capsys.readouterr().err


def test_another_result_gives_another_table(module):
    result = json.loads(module.RESULTS.read_text(encoding="utf-8"))
    before = module.table(result)
    barred = next(row for row in result["rows"] if row["bar"] is not None)
    barred["best_ratio"] = barred["bar"] - 0.1
    assert "missed" in module.table(result)
    assert module.table(result) != before
    assert module.page_table.replaced("no markers", module.BEGIN, module.END, before) is None
