"""What tensor work does to other instructions: the docs say what the committed results say."""

from bench.common import results
from bench.forward import contention


def test_the_table_of_the_docs_says_what_the_results_say(capsys):
    assert contention.main(["--table", "--check"]) == 0, capsys.readouterr().err


def test_another_result_gives_another_table():
    result = results.read(results.FOLDER / contention.TABLE.result)
    before = contention.table(result)
    result["rows"][0]["cycles_beside"] += 1
    assert contention.table(result) != before


def test_wrong_arguments_are_told(capsys):
    assert contention.main(["one"]) == 2
    assert "bench.forward.contention" in capsys.readouterr().err
