"""tools/gpu_check.sh on a GPU, a sanitizer and test programs that are scripts: what it calls passed, and what not."""

import os
import re
import subprocess
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PASSES = "echo '[==========] 2 tests ran.'; echo '[  PASSED  ] 2 tests.'"


def script(path, body):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)


def begun(folder, parts, program=PASSES, capability="9.0", sanitizer="2026.3.0.0 (build 38855100)", **variables):
    script(folder / "bin" / "nvidia-smi", f"echo {capability}")
    version = f'[ "$1" = --version ] && {{ echo "Version {sanitizer}"; exit; }}'
    script(folder / "bin" / "compute-sanitizer", f'{version}\nexport TOOL="$2"; shift 4; exec "$@"')
    script(folder / "build" / "tests" / "cuda" / "cuda_decode_gpu_tests", program)
    environment = (
        os.environ
        | {
            "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
            "DSPATTN_GPU_PARTS": parts,
            "DSPATTN_GPU_JOBS": "2",
        }
        | variables
    )
    command = ["timeout", "300", ROOT / "tools" / "gpu_check.sh", folder / "out", folder / "build"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def check(*arguments, **variables):
    with begun(*arguments, **variables) as process:
        stdout, stderr = process.communicate()
    return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)


@pytest.mark.parametrize("part", ["cuda_decode_gpu_tests", "sanitizers-few_queries"])
def test_passes_when_every_job_does(tmp_path, part):
    result = check(tmp_path, part)
    assert result.returncode == 0, result.stdout + result.stderr
    assert f"{part} " in result.stdout and "1 of 1 passed" in result.stdout


@pytest.mark.parametrize("part", ["cuda_decode_gpu_tests", "sanitizers-few_queries"])
@pytest.mark.parametrize(
    "program",
    [
        pytest.param(f"{PASSES}; exit 9", id="a failing job"),
        pytest.param("echo '[==========] 0 tests ran.'; echo '[  PASSED  ] 0 tests.'", id="no test at all"),
        pytest.param(f'case "$GTEST_SHARD_INDEX$TOOL" in 1 | 0race*) exit 3 ;; esac; {PASSES}', id="one of several"),
    ],
)
def test_fails_otherwise(tmp_path, part, program):
    result = check(tmp_path, part, program)
    assert result.returncode == 1
    assert "FAILED" in result.stdout and "0 of 1 passed" in result.stdout


def test_says_what_did_not_end_when_it_is_ended(tmp_path):
    with begun(tmp_path, "cuda_decode_gpu_tests", "sleep 100") as process:
        while not (tmp_path / "out" / "job0.txt").exists():
            time.sleep(0.1)
        process.terminate()
        stdout, _ = process.communicate()
    assert process.returncode != 0
    assert "unfinished" in stdout


def test_racecheck_of_a_version_that_reports_what_is_ordered_is_no_pass(tmp_path):
    result = check(tmp_path, "sanitizers-few_queries", sanitizer="2025.3.1.0 (build 36400806)")
    assert result.returncode == 1
    assert "racecheck needs compute-sanitizer 2026.3 or later (COMPUTE_SANITIZER), got 2025.3.1.0" in result.stdout
    jobs = [line.split() for line in (tmp_path / "out" / "jobs.txt").read_text().splitlines()]
    assert {job[2] for job in jobs if "racecheck" in job} == {"1"}
    assert {job[2] for job in jobs if "racecheck" not in job} == {"0"}


def test_the_sanitizer_may_lie_elsewhere(tmp_path):
    script(tmp_path / "other", '[ "$1" = --version ] && echo "Version 2027.1.0.0" || { shift 4; exec "$@"; }')
    part = "sanitizers-few_queries"
    assert check(tmp_path, part, sanitizer="2025.3.1.0", COMPUTE_SANITIZER=str(tmp_path / "other")).returncode == 0


@pytest.mark.parametrize("times, passes", [(2, True), (3, False)])
def test_a_sanitizer_that_fails_itself_is_run_again(tmp_path, times, passes):
    own_error = "echo '========= Internal Sanitizer Error: Detected a failure to track a kernel launch.'"
    count = f'n=$(cat "{tmp_path}/$TOOL" 2>/dev/null || echo 0); echo $((n + 1)) > "{tmp_path}/$TOOL"'
    fails = f"{count}; if [ $TOOL = memcheck ] && [ $n -lt {times} ]; then {own_error}; exit 9; fi; {PASSES}"
    result = check(tmp_path, "sanitizers-few_queries", fails)
    assert (result.returncode == 0) == passes, result.stdout
    assert (tmp_path / "memcheck").read_text().strip() == "3"
    assert (tmp_path / "synccheck").read_text().strip() == "1"


HANGS_ONCE = f'case "$GTEST_SHARD_INDEX$TOOL" in 1 | 0memcheck) sleep 100 ;; esac; {PASSES}'


@pytest.mark.parametrize("part", ["cuda_decode_gpu_tests", "sanitizers-few_queries"])
def test_a_job_that_hangs_takes_nothing_else_with_it(tmp_path, part):
    result = check(tmp_path, part, HANGS_ONCE, DSPATTN_GPU_JOB_SECONDS="5")
    assert result.returncode == 1
    assert "gpu_check: ended after 5 s" in result.stdout
    jobs = (tmp_path / "out" / "jobs.txt").read_text().splitlines()
    assert [line.split()[2] for line in jobs].count("124") == 1
    assert all(line.split()[2] in ("0", "124") for line in jobs)


def test_all_ends_when_its_time_is_over(tmp_path):
    parts = "cuda_decode_gpu_tests sanitizers-few_queries"
    result = check(tmp_path, parts, HANGS_ONCE, DSPATTN_GPU_SECONDS="2")
    assert result.returncode == 1
    assert result.stdout.count("unfinished") == 2
    assert "ended after the 2 s that were given" in result.stdout


def test_nothing_else_runs_where_the_build_fails(tmp_path):
    script(tmp_path / "bin" / "cmake", "exit 1")
    result = check(tmp_path, "build tests")
    assert result.returncode == 1
    assert "0 of 1 passed" in result.stdout


def reduced_sets():
    lines = re.findall(r"^  '(\S+) \d+ (\S+) (\S+)'$", (ROOT / "tools/gpu_check.sh").read_text(), re.MULTILINE)
    return [pytest.param(program, filters.split(":"), id=name) for name, program, filters in lines]


@pytest.mark.parametrize("program, filters", reduced_sets())
def test_sets_for_the_sanitizers_name_tests(program, filters):
    executable = ROOT / "build/release/tests/cuda" / program
    if not executable.exists():
        pytest.skip(f"{program} is not built here")
    for pattern in filters:
        command = [executable, "--gtest_list_tests", f"--gtest_filter={pattern}"]
        assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip(), pattern


def test_unknown_parts_and_other_cards_are_refused(tmp_path):
    result = check(tmp_path, "sanitisers")
    assert result.returncode == 2 and 'got "sanitisers"' in result.stderr
    result = check(tmp_path, "tests", capability="8.0")
    assert result.returncode == 2 and 'got "8.0"' in result.stderr
