"""The list of the operator's arguments in Python is that of the operator as C++ registers it."""

from __future__ import annotations

from typing import Any, get_type_hints

import pytest
import torch
from torch import Tensor

import dspattn
from dspattn import _ops
from dspattn._schema import DIFFERENTIABLE, TENSORS, BackwardArguments, ProblemArguments

# What an argument of PyTorch's schema language is in Python.
PYTHON_TYPES: dict[str, Any] = {
    "Tensor": Tensor,
    "Optional[Tensor]": Tensor | None,
    "int": int,
    "Optional[int]": int | None,
    "bool": bool,
    "float": float,
    "Optional[float]": float | None,
    "str": str,
}


@pytest.mark.parametrize("operator,classes", [
    (_ops.attention, (ProblemArguments,)), (_ops.attention_backward, (BackwardArguments, ProblemArguments)),
])  # fmt: skip
def test_names_order_and_types_are_the_operators(operator: Any, classes: tuple[Any, ...]) -> None:
    registered = [(argument.name, PYTHON_TYPES[str(argument.type)]) for argument in operator._schema.arguments]
    listed = [pair for one in classes for pair in get_type_hints(one).items()]
    assert listed == registered


def test_tensors_come_first() -> None:
    types = list(get_type_hints(ProblemArguments).values())
    assert all(t in (Tensor, Tensor | None) for t in types[:TENSORS])
    assert not any(t in (Tensor, Tensor | None) for t in types[TENSORS:])
    assert set(DIFFERENTIABLE) <= set(ProblemArguments._fields[:TENSORS])
    gradients = [f"d_{name}" for name in DIFFERENTIABLE]
    assert [given.name for given in _ops.attention_backward._schema.returns] == gradients


class TookItError(Exception):
    """Stands for the result, so that nothing has to run."""


@pytest.mark.parametrize("packed", [False, True])
def test_every_argument_of_the_functions_reaches_its_name(packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[ProblemArguments] = []

    def run(problem: ProblemArguments) -> Any:
        seen.append(problem)
        raise TookItError

    monkeypatch.setattr(dspattn._running._autograd, "run", run)
    given: dict[str, Any] = {
        "is_causal": True, "scale": 0.25, "pattern": "3:8", "grouping": "consecutive", "window": (5, 6),
        "alignment": "bottom_right", "allow_tf32": False, "kernel": "name", "offset": 5, "out_dtype": torch.float32,
    }  # fmt: skip
    wanted = {
        "keep": 3, "group": 8, "interleaved": False, "causal": True, "top_left": False, "window_left": 5,
        "window_right": 6, "scale": 0.25, "full_fp32": True, "kernel": "name", "offset": 5, "fp32_results": True,
    }  # fmt: skip
    with pytest.raises(TookItError):
        if packed:
            tensors = [torch.randn(7, 2, 4), torch.randn(9, 2, 4), torch.randn(9, 2, 3)]
            mask, cu_q, cu_k = torch.ones(1, 1, 4, 6), torch.tensor([0, 3, 7]), torch.tensor([0, 6, 9])
            dspattn.varlen_attention(*tensors, cu_q, cu_k, 4, 6, attn_mask=mask, **given)
        else:
            tensors = [torch.randn(2, 3, 7, 4), torch.randn(2, 3, 9, 4), torch.randn(2, 3, 9, 5)]
            mask, lengths = torch.ones(7, 9, dtype=torch.bool), torch.tensor([9, 2])
            dspattn.attention(*tensors, mask, attn_bias=torch.ones(9), key_lengths=lengths, **given)
    (problem,) = seen
    assert problem._asdict().items() >= wanted.items()
    if packed:
        assert [problem.q.shape[2], problem.k.shape[2], problem.v.shape[3]] == [7, 9, 3]
        assert problem.bias is not None and problem.allowed is None and problem.key_lengths is None
        assert problem.cu_q.tolist() == [0, 3, 7] and problem.cu_k.tolist() == [0, 6, 9]
        assert (problem.max_q, problem.max_k) == (4, 6)
    else:
        assert [problem.q.shape[2], problem.k.shape[2], problem.v.shape[3]] == [7, 9, 5]
        assert problem.allowed.shape == (1, 1, 7, 9) and problem.bias.shape == (1, 1, 1, 9)
        assert problem.key_lengths.tolist() == [9, 2] and problem.cu_q is None and problem.cu_k is None
