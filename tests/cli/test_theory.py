"""dspattn theory: tables, JSON, predictions, and errors that name what was wrong."""

import json
import math

import pytest


def rows_of(dspattn, *arguments):
    result = dspattn("theory", *arguments, "--json", "-")
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)["rows"]


def test_every_section_prints_a_table(dspattn):
    result = dspattn("theory", "--keys", 128, "--p", 1)
    assert result.returncode == 0
    for title in (
        "The paper's numbers",
        "Quality Q^p",
        "grouping",
        "Memory traffic",
        "Error of one kernel",
        "N:M inside",
    ):
        assert title in result.stdout


def test_the_papers_numbers(dspattn):
    rows = {row["quantity"]: row["ours"] for row in rows_of(dspattn, "--section", "paper")}
    assert rows["top-k density to win at all"] == pytest.approx(0.045, abs=5e-4)
    assert rows["fixed density as fast as 1:2"] == pytest.approx(0.63, abs=5e-3)
    assert rows["Q of 1:2 at p sigma = 1"] == pytest.approx(0.76, abs=5e-3)
    assert math.ceil(rows["Performer ahead of full from n"]) == 672


def test_options_reach_the_formulas(dspattn):
    rows = rows_of(
        dspattn, "--section", "quality", "--p", "2", "--sigma", "1.5", "--pattern", "1:2", "--density", "0.3"
    )
    one_of_two = next(row for row in rows if row["rule"] == "1:2")
    assert one_of_two["long_rows"] == pytest.approx((1 + math.erf(1.5)) / 2)
    assert {row["density"] for row in rows} == {0.5, 0.3}


def test_monte_carlo_agrees_and_repeats(dspattn):
    arguments = ("--section", "quality", "--p", 1, "--keys", 200, "--rows", 500, "--monte-carlo", "--seed", 7)
    rows = rows_of(dspattn, *arguments)
    for row in rows:
        # 200 keys: every default density is a whole number of keys, every group whole.
        # 4.9 standard errors: one false alarm in a million comparisons.
        assert abs(row["monte_carlo"] - row["finite_rows"]) <= 4.9 * row["standard_error"]
    assert rows == rows_of(dspattn, *arguments)


def test_predicts_measured_heads(dspattn, tmp_path):
    head = {"model": "m", "layer": 3, "head": 1, "sigma": 2.0, "sink": 0.25, "rho": {"1": 0.5, "64": 0.0}}
    (tmp_path / "maps.json").write_text(json.dumps({"rows": [head]}))
    (row,) = rows_of(dspattn, "--predict", "maps.json", "--pattern", "1:2")
    normal = lambda z: 0.5 * math.erfc(-z / math.sqrt(2))  # noqa: E731
    assert row["predicted"]["1:2 consecutive"] == pytest.approx(0.25 + 0.75 * normal(2 * math.sqrt(0.25)))
    assert row["predicted"]["1:2 interleaved"] == pytest.approx(0.25 + 0.75 * normal(2 * math.sqrt(0.5)))
    assert row["independent"]["1:2"] == row["predicted"]["1:2 interleaved"]


@pytest.mark.parametrize(
    "changed,message",
    [
        ({"sigma": "wide"}, 'sigma: expected a finite number > 0, got "wide"'),
        ({"sigma": -1}, "sigma: expected a finite number > 0, got -1"),
        ({"sink": 2}, "sink: expected a number in [0, 1], got 2"),
        ({"rho": [0.5]}, "rho: expected an object of lags, got [0.5]"),
        ({"rho": {"near": 0.5}}, 'rho: expected lags that are integers, got "near"'),
        ({"rho": {"3": None}}, "rho[3]: expected a number in [-1, 1], got null"),
    ],
)
def test_measured_heads_that_are_none(dspattn, tmp_path, changed, message):
    (tmp_path / "maps.json").write_text(json.dumps({"rows": [{"sigma": 2.0, "sink": 0.25, "rho": {}} | changed]}))
    result = dspattn("theory", "--predict", "maps.json")
    assert result.returncode == 2
    assert f"--predict: rows[0]: {message}" in result.stderr


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--density", "0"], ["density", "(0, 1]", "got 0"]),
        (["--density", "1.2"], ["density", "got 1.2"]),
        (["--p", "0"], ["p must be", "got 0"]),
        (["--sigma", "-1"], ["--sigma must be", "got -1"]),
        (["--sigma", "1e9", "--p", "1"], ["--p * --sigma must be at most 70, got 1e+09"]),
        (["--predict", "absent.json", "--section", "quality"], ["--section: expected without --predict"]),
        (["--json", "no/such/folder.json"], ['--json: expected a file that can be written, got "no/such/folder.json"']),
        (["--tile", "0"], ["tile", "got 0"]),
        (["--pattern", "5:4"], ["5:4"]),
        (["--pattern", "02:4"], ["--pattern: expected", "02:4"]),
        (["--keys", "0"], ["keys"]),
        (["--rows", "10"], ["--rows: expected none without --monte-carlo, got one"]),
        (["--seed", "1", "--section", "quality"], ["--seed: expected none without --monte-carlo"]),
        (["--block-density", "2"], ["--block-density must be in (0, 1], got 2"]),
        (["--rows", "0"], ["--rows: expected 2 to 134217728, got 0"]),
        (["--rows", "9223372036854775807"], ["--rows: expected 2 to 134217728, got 9223372036854775807"]),
        (["--rows", "1000000", "--keys", "1048576"], ["--rows: expected 2 to 131072, got 1000000"]),
        (["--section", "poetry"], ["section", "paper, quality", "poetry"]),
        (["--correlation", "0.5"], ["correlation", "weight:decay", "0.5"]),
        (["--correlation", "0.8:0.5,0.8:0.1"], ["correlation", "sum to at most 1"]),
        (["--predict", "absent.json"], ["predict", "absent.json"]),
    ],
)
def test_bad_parameters_are_named(dspattn, arguments, message):
    result = dspattn("theory", *arguments)
    assert result.returncode == 2
    for part in message:
        assert part in result.stderr


def test_scores_far_apart_in_long_rows(dspattn):
    """Of any spread: nothing is missed."""
    rows = rows_of(dspattn, "--section", "grouping", "--sigma", "1e9", "--p", "1")
    assert {row["independent"] for row in rows} == {1.0}


@pytest.mark.parametrize(
    "arguments,reason",
    [
        (["--keys", "9223372036854775807"], "--keys: expected 1 to 1048576"),
        (["--features", "9223372036854775807"], "--features: expected 0 to 134217728"),
        (["--features", "-1"], "--features: expected 0 to 134217728, got -1"),
        (["--head-dim", "9223372036854775807"], "--head-dim: expected 2 to 1048576"),
        (["--landmarks", "0"], "--landmarks must be >= 1, got 0"),
    ],
)
def test_refused_before_anything_is_printed_and_in_time(dspattn, arguments, reason):
    result = dspattn("theory", *arguments)
    assert result.returncode == 2
    assert reason in result.stderr and result.stdout == ""
