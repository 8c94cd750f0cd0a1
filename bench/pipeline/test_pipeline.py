"""The pipeline's committed results: the docs say what they say."""

from bench.common import results
from bench.pipeline import tables


def test_the_page_says_what_the_results_say(capsys):
    assert tables.main(["--check"]) == 0, capsys.readouterr().err


def test_a_missed_aim_is_said_to_be_one():
    rows = results.read(results.FOLDER / "pipeline_h200.json")["rows"]
    for row in rows:
        if row["stage"] == "pv_sparse" and row["dtype"] == "fp32" and row["n_k"] == 2048:
            row["ratio"]["unfused"] = 1.41
    line = next(line for line in tables.bar_lines(rows) if "`pv_sparse`" in line)
    assert line.endswith("1.41 (missed) |") and "1.5 |" in line
