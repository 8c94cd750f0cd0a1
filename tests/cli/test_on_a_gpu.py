"""The program on a GPU, an emulated one: the program with its kernels compiled for the emulated multiprocessor.

DSPATTN_EMULATED_CLI names it, by default that of the release build.
"""

import json
import re

import numpy
import pytest
from programs import built


@pytest.fixture(scope="session")
def program():
    return built("tests/emulator/emulated_dspattn", "DSPATTN_EMULATED_CLI")


def test_kernels_names_the_fused_one_on_a_gpu(dspattn):
    result = dspattn("kernels", "--device", "cuda", "--dtype", "bf16", "--n", 4096, "--d", 128)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("would serve: sm90_fused_2_4_bf16_d128\n")


def test_verify_on_a_gpu(dspattn):
    result = dspattn(
        "verify", "--device", "cuda", "--pass", "forward", "--dtype", "fp16", "--pattern", "2:4", "--head-dim", 32,
        "--max-n", 70, "--max-work", 200000, "--count", 6, "--seed", 3,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr
    assert re.search(r"sm90_fused_2_4_fp16_d32: [1-9]", result.stdout)


def test_bench_on_a_gpu_beside_the_general_kernel_s_dense_attention(dspattn, tmp_path):
    result = dspattn(
        "bench", "--device", "cuda", "--dtype", "bf16", "--n", 64, "--d", 32, "--heads", 2, "--seconds", 0.001,
        "--json", "times.json",
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    table = result.stdout.splitlines()
    assert [line.split()[-1] for line in table[1:3]] == ["sm90_fused_2_4_bf16_d32", "sm90_fused_1_2_bf16_d32"]
    assert all(re.fullmatch(r"\d+\.\d\dx", line.split()[-2]) for line in table[1:3]) and len(table) == 3
    rows = json.loads((tmp_path / "times.json").read_text())["rows"]
    assert [row["pattern"] for row in rows] == ["2:4", "1:2"]
    for row in rows:
        assert row["median_us"] > 0 and row["peers"]["dense"]["kernel"] == "general_bf16"


@pytest.mark.parametrize("pattern", ["dense", "3:7"])
def test_kernels_names_the_general_one_for_other_patterns(dspattn, pattern):
    arguments = ("--device", "cuda", "--dtype", "bf16", "--n", 300, "--pattern", pattern, "--grouping", "consecutive")
    result = dspattn("kernels", *arguments)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("would serve: general_bf16\n")
    assert "tensor cores, pruned weights are zeros" in result.stdout


def test_run_on_a_gpu(dspattn, tmp_path):
    random = numpy.random.default_rng(0)
    for name in "qkv":
        numpy.save(tmp_path / f"{name}.npy", random.integers(-2, 3, (1, 2, 40, 32)).astype(numpy.float32))
    outputs = []
    for device in ("cpu", "cuda"):
        result = dspattn(
            "run", "q.npy", "k.npy", "v.npy", "--pattern", "1:2", "--device", device, "--out", f"{device}.npy"
        )
        assert result.returncode == 0, result.stderr
        outputs.append(numpy.load(tmp_path / f"{device}.npy"))
    assert numpy.abs(outputs[0] - outputs[1]).max() < 5e-3


@pytest.mark.parametrize("device,expected", [("cuda:7", "cuda:7"), ("gpu", '"gpu"')])
def test_a_device_that_is_not_there_on_a_gpu_machine(dspattn, device, expected):
    result = dspattn("bench", "--device", device, "--n", 64)
    assert result.returncode == 2 and expected in result.stderr
