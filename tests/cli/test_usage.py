"""Help, usage errors and exit codes."""

import json

import pytest

COMMANDS = ["info", "kernels", "run", "theory"]


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
    ],
)
def test_bad_usage_exits_with_2_and_names_the_value(dspattn, arguments, message):
    result = dspattn(*arguments)
    assert result.returncode == 2
    assert message in result.stderr
    assert result.stdout == ""


def test_info_as_json(dspattn):
    result = dspattn("info", "--json")
    assert result.returncode == 0
    info = json.loads(result.stdout)
    assert info["cpu"]["threads"] >= 1
    assert info["cpu"]["targets"]
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
