"""dspattn verify on a fixed seed, and the shape of what dspattn bench prints and writes."""

import json
import os
import re

import pytest


def test_verify_on_a_fixed_seed(dspattn):
    result = dspattn("verify", "--seed", "20", "--count", "400", timeout=600)
    assert result.returncode == 0, result.stdout
    assert "seed 20\n" in result.stdout
    assert "400 passed, 0 failed" in result.stdout
    # Not on a terminal: plain lines, no control characters.
    assert "verify 400/400, 0 failed\n" in result.stderr
    assert "\r" not in result.stderr and "\x1b" not in result.stderr


def test_verify_prints_the_seed_it_drew(dspattn):
    first = dspattn("verify", "--count", "1")
    second = dspattn("verify", "--count", "1")
    seeds = [re.match(r"seed (\d+)\n", result.stdout).group(1) for result in (first, second)]
    assert seeds[0] != seeds[1]


def test_verify_one_case_says_what_it_is(dspattn):
    result = dspattn("verify", "--seed", "20", "--case", "3")
    assert result.returncode == 0
    assert len(result.stdout.splitlines()) >= 3
    assert "1 passed, 0 failed" in result.stdout
    assert dspattn("verify", "--seed", "20", "--case", "3").stdout == result.stdout


def test_verify_narrowed_to_a_kernel(dspattn):
    result = dspattn("verify", "--seed", "1", "--count", "20", "--kernel", "cpu_reference", "--dtype", "fp16")
    assert result.returncode == 0, result.stdout
    assert "cpu_reference: 20 problems" in result.stdout


def test_verify_narrowed_to_a_rest(dspattn):
    result = dspattn("verify", "--seed", "20", "--case", "3", "--rest", "mean")
    assert result.returncode == 0, result.stdout
    assert " mean " in result.stdout.splitlines()[1]


ROW = {
    "kernel": str,
    "pattern": str,
    "grouping": str,
    "rest": str,
    "dtype": str,
    "batch": int,
    "heads": int,
    "kv_heads": int,
    "n_q": int,
    "n_k": int,
    "d": int,
    "mask": str,
    "pass": str,
    "median_us": float,
    "spread_us": float,
    "tflops": float,
}


def test_bench_table_and_json(dspattn, tmp_path):
    arguments = [
        "bench",
        "--n",
        "32,48",
        "--d",
        "16",
        "--heads",
        "2",
        "--pattern",
        "dense,2:4",
        "--mask",
        "full,causal",
        "--pass",
        "forward,backward",
        "--seconds",
        "0.001",
        "--json",
        "times.json",
    ]
    result = dspattn(*arguments)
    assert result.returncode == 0, result.stderr
    content = json.loads((tmp_path / "times.json").read_text())
    assert content["command"] == "dspattn " + " ".join(arguments)
    assert set(content) == {"command", "commit", "date", "device", "versions", "rows"}
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", content["date"])
    assert re.fullmatch(r"([0-9a-f]{40}(-dirty)?|unknown)", content["commit"])
    assert content["device"]["cores"] >= 1 and content["device"]["name"]
    assert len(content["rows"]) == 16
    assert len(result.stdout.splitlines()) == 17
    for row in content["rows"]:
        for name, kind in ROW.items():
            assert isinstance(row[name], kind), name
        work = 4 * row["batch"] * row["heads"] * row["n_q"] * row["n_k"] * row["d"]
        work *= (0.5 if row["mask"] == "causal" else 1) * (2.5 if row["pass"] == "backward" else 1)
        assert row["tflops"] == pytest.approx(work / row["median_us"] * 1e-6)
        if row["pattern"] == "2:4":
            assert row["ratio"]["dense"] == pytest.approx(row["peers"]["dense"]["median_us"] / row["median_us"])
        else:
            assert "peers" not in row


BRIEF = ["bench", "--n", "16", "--pattern", "dense", "--seconds", "0.001"]


def test_bench_of_both_rests(dspattn, tmp_path):
    result = dspattn(
        "bench", "--n", "16", "--pattern", "dense,2:4", "--rest", "drop,mean", "--seconds", "0.001", "--json", "-"
    )
    assert result.returncode == 0, result.stderr
    assert [row["rest"] for row in json.loads(result.stdout)["rows"]] == ["drop", "drop", "mean"]


def test_bench_to_standard_output(dspattn, tmp_path):
    result = dspattn(*BRIEF, "--json", "-")
    assert result.returncode == 0, result.stderr
    assert [row["n_k"] for row in json.loads(result.stdout)["rows"]] == [16]
    assert not list(tmp_path.iterdir())


def test_bench_writes_whatever_bytes_its_command_has(dspattn, tmp_path):
    place = os.fsdecode(b"zeiten_\xe4.json")  # Latin-1
    assert dspattn(*BRIEF, "--json", place).returncode == 0
    content = json.loads((tmp_path / place).read_text())
    assert content["command"].endswith("--json zeiten_\ufffd.json") and len(content["rows"]) == 1


def test_bench_that_cannot_write_does_not_begin(dspattn, tmp_path):
    (tmp_path / "folder").mkdir()
    for place in "no/such/folder.json", "folder":
        result = dspattn(*BRIEF, "--json", place)
        assert result.returncode == 2 and result.stdout == ""
        assert result.stderr.startswith(f'dspattn: --json: expected a file that can be written, got "{place}": ')
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def test_bench_that_fails_leaves_the_file_it_had(dspattn, tmp_path):
    (tmp_path / "times.json").write_text("before")
    assert dspattn(*BRIEF, "--kernel", "imaginary", "--json", "times.json").returncode == 2
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"times.json": "before"}


LARGEST = str(2**63 - 1)


@pytest.mark.parametrize("option", ["--batch", "--heads", "--kv-heads", "--n", "--n-q", "--d"])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_bench_of_what_no_machine_holds(dspattn, option, device):
    """Also where the number of bytes overflows: not a lack of memory found halfway."""
    other = ["--d", str(2**40)] if option == "--batch" else ["--batch", str(2**40)]
    for arguments in ([option, LARGEST], [option, str(2**58)], [*other, option, str(2**40)]):
        result = dspattn("bench", "--device", device, *arguments)
        assert result.returncode == 2 and result.stdout == "", result.stderr
        assert re.match(rf"dspattn: ({other[0]}|{option}): expected tensors of at most .* GB together", result.stderr)
        assert f"{option[2:]} {arguments[-1]}" in result.stderr


@pytest.mark.parametrize("option", ["--batch", "--heads", "--kv-heads", "--n-q", "--n-k", "--d", "--d-v"])
def test_kernels_of_sizes_that_overflow(dspattn, option):
    result = dspattn("kernels", option, LARGEST)
    assert result.returncode == 2
    assert result.stderr.startswith(f"dspattn: {option}: expected tensors of less than 2^60 elements"), result.stderr
