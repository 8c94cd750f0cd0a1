"""The pipeline's committed results: the docs say what they say."""

import importlib
import json
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parents[2] / "bench"


@pytest.fixture
def tables(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))
    yield importlib.import_module("pipeline_tables")
    sys.modules.pop("pipeline_tables", None)


def test_the_page_says_what_the_results_say(tables, capsys):
    assert tables.main(["--check"]) == 0, capsys.readouterr().err


def test_a_missed_aim_is_said_to_be_one(tables):
    rows = json.loads((BENCH / "results" / "pipeline_h200.json").read_text(encoding="utf-8"))["rows"]
    for row in rows:
        if row["stage"] == "pv_sparse" and row["dtype"] == "fp32" and row["n_k"] == 2048:
            row["ratio"]["unfused"] = 1.41
    line = next(line for line in tables.bar_lines(rows) if "`pv_sparse`" in line)
    assert line.endswith("1.41 (missed) |") and "1.5 |" in line
