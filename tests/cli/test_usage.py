"""Help, usage errors and exit codes."""

import json
import re
import subprocess

import pytest

COMMANDS = ["bench", "info", "kernels", "run", "theory", "verify"]


def test_help_lists_every_command_and_the_exit_codes(dspattn):
    result = dspattn("--help")
    assert result.returncode == 0
    for command in COMMANDS:
        assert f"\n  {command} " in result.stdout
    assert "Exit codes" in result.stdout


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_has_help(dspattn, command):
    result = dspattn(command, "--help")
    assert result.returncode == 0
    assert command in result.stdout
    assert result.stderr == ""


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([], "subcommand is required"),
        (["frobnicate"], "frobnicate"),
        (["kernels", "--n", "many"], "many"),
        (["kernels", "--pattern", "3:2"], '"3:2"'),
        (["kernels", "--grouping", "sideways"], '"sideways"'),
        (["kernels", "--dtype", "int4"], '"int4"'),
        (["kernels", "--device", "cuda:x"], '"cuda:x"'),
        (["kernels", "--d", "513"], "--d: expected a head dimension from 1 to 512, got 513"),
        (["kernels", "--d-v", "513"], "--d-v: expected a head dimension"),
        (["kernels", "--n-q", "-1"], "--n-q: expected an extent >= 0, got -1"),
        (["kernels", "--n", "-1"], "--n: expected an extent >= 0, got -1"),
        (["kernels", "--heads", "8", "--kv-heads", "3"], "--heads: expected heads a multiple of"),
        (["kernels", "--scale", "-1"], "--scale: "),
        (["kernels", "--window-left", "-4"], "--window-left: expected >= 0, got -4"),
        (["kernels", "--offset", "999999999999"], "--offset: expected from -2^39 to 2^39, got 999999999999"),
        (["kernels", "--dtype", ""], '--dtype: expected a value, got ""'),
        (["verify", "--count", "0"], "--count: expected at least 1, got 0"),
        (["verify", "--jobs", "-1"], "--jobs: expected 0 or more, got -1"),
        (["verify", "--case", "3"], "--seed"),
        (["verify", "--seed", "1", "--case", "-3"], "--case: expected 0 or more"),
        (["verify", "--pass", "sideways"], '--pass: expected forward or backward, got "sideways"'),
        (["verify", "--pass", ""], '--pass: expected a value, got ""'),
        (["verify", "--rest", "mean", "--pass", "backward"], "--rest: expected drop with --pass backward"),
        (["verify", "--selection", "shared", "--pass", "backward"], "--selection: expected own with --pass backward"),
        (["kernels", "--selection", "any"], '--selection: expected own or shared, got "any"'),
        (["verify", "--kernel", "imaginary"], '"imaginary"'),
        (["verify", "--max-n", str(2**62)], f"--max-n: expected 1 to {2**30}, got {2**62}"),
        (["verify", "--head-dim", "600"], "--head-dim: expected 1 to 512, got 600"),
        (["verify", "--pattern", "9:4"], '"9:4"'),
        (["bench", "--mask", "diagonal"], '"diagonal"'),
        (["bench", "--n", "0"], "--n: expected at least 1, got 0"),
        (["bench", "--n", "64,x"], "x"),
        (["bench", "--json", ""], '--json: expected a value, got ""'),
        (["bench", "--seconds", "0"], "seconds"),
        (["bench", "--kernel", "imaginary"], '"imaginary"'),
        (["bench", "--heads", "8", "--kv-heads", "3"], "heads"),
    ],
)
def test_bad_usage_exits_with_2_and_names_the_value(dspattn, arguments, message):
    result = dspattn(*arguments)
    assert result.returncode == 2
    assert message in result.stderr
    # bench prints its heading before the library sees a shape.
    assert result.stdout == "" or arguments[0] == "bench"


def test_info_as_json(dspattn):
    result = dspattn("info", "--json")
    assert result.returncode == 0
    info = json.loads(result.stdout)
    assert info["cpu"]["threads"] >= 1
    assert info["cpu"]["instruction_sets"]
    assert info["kernels"]["forward"] >= 1


def test_info_names_the_build(dspattn):
    result = dspattn("info")
    assert result.returncode == 0
    assert result.stdout.startswith("dspattn ")
    assert "Instructions" in result.stdout


def test_kernels_lists_both_passes(dspattn):
    result = dspattn("kernels")
    assert result.returncode == 0
    assert "forward, in order of preference" in result.stdout
    assert "backward, in order of preference" in result.stdout
    assert "cpu_reference" in result.stdout


def test_kernels_answers_first_and_says_the_rest_when_asked(dspattn):
    brief = dspattn("kernels", "--n", "64")
    assert brief.returncode == 0
    assert brief.stdout.startswith("would serve: cpu_2_4\ncould serve too: ")
    assert "cpu_1_2" not in brief.stdout and brief.stdout.endswith(" cannot serve (--all says why)\n")
    whole = dspattn("kernels", "--n", "64", "--all")
    assert whole.stdout.startswith("would serve: cpu_2_4\n")
    assert "\ncpu_1_2: cannot\n    --pattern: " in whole.stdout


def test_kernels_without_one_that_serves(dspattn):
    # No CPU kernel takes tensors on a GPU, with or without a GPU here; none anywhere takes gradients of this on a GPU.
    arguments = ("kernels", "--n", "64", "--device", "cuda", "--pattern", "3:7", "--grouping", "consecutive")
    result = dspattn(*arguments, "--backward")
    assert result.returncode == 1
    assert result.stdout.startswith("No kernel of this build serves the problem.\n")
    whole = dspattn(*arguments, "--backward", "--all")
    assert "cpu_reference: cannot\n    --device: runs on cpu, the tensors are on cuda" in whole.stdout


def test_version(dspattn):
    result = dspattn("--version")
    assert result.returncode == 0 and result.stderr == ""
    assert re.fullmatch(r"dspattn \d+\.\d+\.\d+ \(([0-9a-f]{40}(-dirty)?|unknown)\)\n", result.stdout)


def test_output_that_cannot_be_written_is_no_success(program):
    with open("/dev/full", "w") as full:
        result = subprocess.run([program, "info"], stdout=full, stderr=subprocess.PIPE, text=True)
    assert result.returncode == 3 and "standard output could not be written" in result.stderr


@pytest.mark.parametrize(
    "command,reason",
    [
        (["verify", "--count", "99999999999999999999"], "--count: expected an integer of 64 bits"),
        (["verify", "--seed", "18446744073709551616"], "--seed: expected an integer of 64 bits"),
        (["verify", "--seed", "-1"], "--seed: expected 0 or more, got -1"),
        (["bench", "--n", "64,-99999999999999999999"], "--n: expected an integer of 64 bits"),
        (["theory", "--seed", "-1"], "--seed: expected 0 or more, got -1"),
        (["bench", "--threads", "99999999999"], "--threads: expected an integer of 32 bits, got 99999999999"),
        (["bench", "--n", "64,0128"], "--n: expected an integer without zeros in front, got 0128"),
        (["bench", "--heads", "1e3"], '--heads: expected an integer, got "1e3"'),
        (["kernels", "--scale", "half"], '--scale: expected a number, got "half"'),
    ],
)
def test_numbers_that_do_not_fit_are_refused(dspattn, command, reason):
    """The nearest number that fits would be another run than was asked for."""
    result = dspattn(*command)
    assert result.returncode == 2 and reason in result.stderr + result.stdout
