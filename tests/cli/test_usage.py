"""Help, usage errors and exit codes."""

import json

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
        (["kernels", "--d", "257"], "257"),
        (["kernels", "--heads", "8", "--kv-heads", "3"], "heads"),
        (["kernels", "--scale", "-1"], "scale"),
        (["kernels", "--window-left", "-4"], "window_left"),
        (["verify", "--count", "0"], "count: expected at least 1, got 0"),
        (["verify", "--case", "3"], "--seed"),
        (["verify", "--seed", "1", "--case", "-3"], "case: expected 0 or more"),
        (["verify", "--pass", "sideways"], '"sideways"'),
        (["verify", "--kernel", "imaginary"], '"imaginary"'),
        (["verify", "--head-dim", "300"], "head-dim: expected 1 to 256, got 300"),
        (["verify", "--pattern", "9:4"], '"9:4"'),
        (["bench", "--mask", "diagonal"], '"diagonal"'),
        (["bench", "--n", "0"], "n: expected at least 1, got 0"),
        (["bench", "--n", "64,x"], "x"),
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


def test_kernels_with_a_shape_says_who_serves_and_why_others_do_not(dspattn):
    result = dspattn("kernels", "--n", "64", "--device", "cuda")
    # No CPU kernel takes tensors on a GPU, with or without a GPU here.
    assert "cpu_reference: cannot\n    device: runs on cpu, the tensors are on cuda" in result.stdout
    served = dspattn("kernels", "--n", "64")
    assert served.returncode == 0
    assert "would serve" in served.stdout
