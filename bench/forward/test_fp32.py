"""The fp32 forward's committed results: the docs say what they say."""

from bench.common import results
from bench.forward import fp32_table


def test_the_table_of_the_docs_says_what_the_results_say(capsys):
    assert fp32_table.main(["--check"]) == 0, capsys.readouterr().err


def test_another_result_gives_another_table():
    result = results.read(results.FOLDER / fp32_table.TABLE.result)
    before = fp32_table.table(result)
    barred = next(row for row in result["rows"] if row["bar"] is not None)
    barred["best_ratio"] = barred["bar"] - 0.1
    assert "missed" in fp32_table.table(result)
    assert fp32_table.table(result) != before
