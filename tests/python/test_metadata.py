"""The library's sparse encoding against PyTorch's conversion to CUTLASS's layout, byte for byte.

Needs the test program metadata_tool of a build: in $DSPATTN_BUILD, or in build/release or build.
"""

import os
import pathlib
import subprocess

import pytest
import torch
from torch.sparse import _semi_structured_conversions as judge

ROOT = pathlib.Path(__file__).parents[2]


def find_tool() -> pathlib.Path:
    builds = (
        [os.environ["DSPATTN_BUILD"]] if "DSPATTN_BUILD" in os.environ else [ROOT / "build" / "release", ROOT / "build"]
    )
    tools = [pathlib.Path(build) / "tests" / "tools" / "metadata_tool" for build in builds]
    for tool in tools:
        if tool.exists():
            return tool
    raise FileNotFoundError("no metadata_tool at " + " or ".join(map(str, tools)) + ": build the project first")


TOOL = find_tool()

TYPES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}
SHAPES = [(32, 32), (32, 64), (64, 32), (96, 160), (128, 128), (32, 1024), (512, 64), (160, 288), (256, 512)]


def to_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def run(action: str, dtype: torch.dtype, shape, pattern: str, data: bytes) -> bytes:
    command = [str(TOOL), action, TYPES[dtype], *map(str, shape), pattern]
    done = subprocess.run(command, input=data, capture_output=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(done.stderr.decode())
    return done.stdout


def scores(shape, dtype, seed) -> torch.Tensor:
    """Random numbers, none of them zero: PyTorch's conversion takes a zero for an element that was dropped."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator).to(dtype)
    return torch.where(values == 0, torch.ones_like(values), values)


def keep_largest(dense: torch.Tensor, keep: int, group: int) -> torch.Tensor:
    rows, cols = dense.shape
    groups = dense.view(rows, cols // group, group)
    order = groups.float().sort(dim=-1, descending=True, stable=True).indices[..., :keep]
    mask = torch.zeros_like(groups, dtype=torch.bool).scatter_(-1, order, True)
    return torch.where(mask, groups, torch.zeros_like(groups)).view(rows, cols)


FORMATS = [
    (torch.float16, "2:4"),
    (torch.bfloat16, "2:4"),
    (torch.float32, "1:2"),
    (torch.float16, "1:2"),
    (torch.bfloat16, "1:2"),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype,pattern", FORMATS, ids=str)
def test_pruned_scores_are_encoded_as_pytorch_does(dtype, pattern, shape):
    dense = scores(shape, dtype, seed=shape[0] * 1000 + shape[1])
    keep, group = map(int, pattern.split(":"))
    nonzeros, metadata = judge.sparse_semi_structured_from_dense_cutlass(keep_largest(dense, keep, group))
    assert run("prune", dtype, shape, pattern, to_bytes(dense)) == to_bytes(nonzeros) + to_bytes(metadata)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype,pattern", FORMATS[:3], ids=str)
def test_any_sparse_matrix_is_encoded_as_pytorch_does(dtype, pattern, shape):
    """Groups with fewer nonzeros than the pattern keeps, down to none."""
    keep, group = map(int, pattern.split(":"))
    sparse = keep_largest(scores(shape, dtype, seed=7), keep, group)
    generator = torch.Generator().manual_seed(8)
    sparse = sparse * (torch.rand(shape, generator=generator) < 0.6).to(dtype)
    sparse = sparse + torch.zeros((), dtype=dtype)  # no negative zeros
    nonzeros, metadata = judge.sparse_semi_structured_from_dense_cutlass(sparse)
    encoded = run("compress", dtype, shape, pattern, to_bytes(sparse))
    assert encoded == to_bytes(nonzeros) + to_bytes(metadata)
    assert run("restore", dtype, shape, pattern, encoded) == to_bytes(sparse)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype,pattern", FORMATS, ids=str)
def test_pytorch_reads_what_the_library_writes(dtype, pattern, shape):
    keep, group = map(int, pattern.split(":"))
    # PyTorch moves the halves of an fp32 number as fp16 and alters those that look like a signalling NaN; the lower
    # halves of these numbers are zero.
    dense = scores(shape, torch.bfloat16, seed=9).to(dtype)
    encoded = bytearray(run("prune", dtype, shape, pattern, to_bytes(dense)))
    rows, cols = shape
    count = rows * cols // 2
    nonzeros = torch.frombuffer(encoded, dtype=dtype, count=count).view(rows, cols // 2)
    metadata = torch.frombuffer(encoded, dtype=torch.int16, offset=count * dtype.itemsize).view(rows, -1)
    restored = judge.sparse_semi_structured_to_dense_cutlass(nonzeros, metadata)
    assert torch.equal(restored, keep_largest(dense, keep, group))


def test_wrong_metadata_is_refused():
    shape, dtype = (32, 32), torch.float16
    encoded = bytearray(run("prune", dtype, shape, "2:4", to_bytes(scores(shape, dtype, seed=1))))
    encoded[-1] = 0x00  # indices 0 and 0, twice
    with pytest.raises(RuntimeError, match="ascending indices"):
        run("restore", dtype, shape, "2:4", bytes(encoded))
