"""Random calls of the operators (random_problems.py): of views, and on a GPU beside the CPU.

DSPATTN_RANDOM_CASES: how many of each kind (default 60, on a GPU 1000).
"""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import dspattn
import random_problems
from random_problems import Problem

DRAWN = (random_problems.drawn_attention, random_problems.drawn_packed)
# The share of the largest number that rounding to the type, and products in tf32, may make of a result's error.
ROUNDING = {torch.bfloat16: 2.5e-2, torch.float16: 6e-3, torch.float32: 4e-3}


def problems(draw: Callable[[], Problem], default: int) -> list[Problem]:
    random_problems.seeded(7)
    return [draw() for _ in range(int(os.environ.get("DSPATTN_RANDOM_CASES", default)))]


def differences(found: dict[str, Tensor], wanted: dict[str, Tensor], dtype: torch.dtype) -> list[str]:
    """What is further off than rounding may take it. A gradient's terms may be larger than the gradient itself."""
    said = []
    for name, tensor in wanted.items():
        x, y = found[name].float(), tensor.float()
        finite = y.isfinite()
        if x.shape != y.shape or not torch.equal(x[~finite].nan_to_num(), y[~finite].nan_to_num()):
            said.append(f"{name}: what is not finite differs, or the shape")
            continue
        off = (x - y)[finite].abs().max().item() if finite.any() else 0.0
        size = y[finite].abs().max().item() if finite.any() else 0.0
        allowed = ROUNDING[dtype] * (6 * max(size, 1) if name[0] == "d" else 1.5 + 2 * size)
        if not off <= allowed:
            said.append(f"{name}: {off:.3g} off, {allowed:.3g} allowed")
    return said


@pytest.mark.parametrize("draw", DRAWN)
def test_views_of_every_kind_are_drawn(draw: Callable[[], Problem]) -> None:
    """In the type of the call: converted, a view would be a copy."""
    inputs = [t for problem in problems(draw, 60) for t in problem.inputs if min(t.shape) > 1]
    assert any(t.stride(-1) > 1 for t in inputs) and any(t.storage_offset() % 8 == 4 for t in inputs)
    assert any(t.storage_offset() * t.element_size() % 4 for t in inputs)
    assert any(0 in t.stride() for t in inputs)
    assert any(t.is_contiguous() for t in inputs)


@pytest.mark.parametrize("draw", DRAWN)
def test_views_give_what_copies_give(draw: Callable[[], Problem]) -> None:
    for problem in problems(draw, 60):
        try:
            wanted = problem.results(change=Tensor.contiguous)
        except dspattn.DspattnError:
            with pytest.raises(dspattn.DspattnError):
                problem.results()
            continue
        found = problem.results()
        assert found.keys() == wanted.keys()
        for name, tensor in wanted.items():
            # An input's own gradient counts every use of what is expanded; the copy's does too.
            assert torch.equal(found[name].nan_to_num(7), tensor.nan_to_num(7)), f"{name}: {problem}"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU that PyTorch can use")
@pytest.mark.parametrize("draw", DRAWN)
def test_the_gpu_agrees_with_the_cpu(draw: Callable[[], Problem]) -> None:
    """On a side stream, and where memory that is given out holds NaN."""
    garbage = torch.full((64 << 20,), float("nan"), device="cuda")
    del garbage
    torch.cuda.synchronize()
    for problem in problems(draw, 1000):
        try:
            wanted = problem.results()
        except dspattn.DspattnError:
            with pytest.raises(dspattn.DspattnError):
                problem.results("cuda")
            continue
        with torch.cuda.stream(torch.cuda.Stream()):
            found = problem.results("cuda")
        assert not (said := differences(found, wanted, problem.inputs[0].dtype)), f"{said}: {problem}"
