"""What every call of attention goes through: who answers it, its random numbers, and the operator itself with what
PyTorch's own attention does around it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from . import _autograd, _ops
from ._probe import require_served
from ._schema import ProblemArguments
from .errors import DspattnError


class StandIn:
    """A block of dspattn.parallel.context that a thread is in; None stands for "as if there were none". One context may
    be open several times, in many threads; each time is an object of its own."""

    def __init__(self, block: Any) -> None:
        self.block = block
        self.thread = threading.get_ident()

    def close(self) -> None:
        """Safe to call again."""
        if self in stand_ins:
            stand_ins.remove(self)


# What is open: the last one of this thread answers in the functions' place.
stand_ins: list[StandIn] = []


def dropout_state(query: Tensor) -> Tensor:
    """What the random numbers of one call's dropout are made of, from PyTorch's generator of the device: manual_seed,
    checkpointing, CUDA graphs and torch.compile treat it as they do any other use of that."""
    if hasattr(query, "device_mesh"):
        raise DspattnError(
            ["dropout_p: expected 0 for distributed tensors (each process has its own generator), got more"]
        )
    return torch.randint(-(2**31), 2**31, (4,), dtype=torch.int32, device=query.device)


def stand_in() -> Any:
    """The open block of dspattn.parallel.context that this thread is in, or None."""
    if not stand_ins:  # a compiler that traces this cannot ask for the thread
        return None
    thread = threading.get_ident()
    return next((other.block for other in reversed(stand_ins) if other.thread == thread), None)


def refuse_pieces(name: str) -> None:
    """Raise in a block of dspattn.parallel.context, where a function would see this rank's keys alone."""
    if stand_ins and (parallel := stand_in()) is not None and parallel.world > 1:
        parallel.refuse(DspattnError([f"{name}: expected no dspattn.parallel.context (it needs all keys), got one"]))


@contextlib.contextmanager
def as_in_parallel(block: Any) -> Iterator[None]:
    """Run what is inside as it would run in this block of dspattn.parallel.context, None: in none."""
    opened = StandIn(block)
    try:
        stand_ins.append(opened)
        yield
    finally:
        opened.close()


def run(problem: ProblemArguments) -> tuple[Tensor, Tensor]:
    """The operator on four-dimensional tensors, with what PyTorch's own attention does around it: autocast, and rows
    that are contiguous."""
    q, k, v, _, bias, *_ = problem
    device = "cpu" if q.is_cpu else "cuda" if q.is_cuda else None  # q.device.type takes a microsecond
    if device is not None and torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        q, k, v = (_autocast(t, dtype) for t in (q, k, v))
        problem = problem._replace(q=q, k=k, v=v, bias=None if bias is None else _autocast(bias, dtype))
    if not (q.is_contiguous() or q.stride(-1) == 1):  # asking for a stride takes twice as long
        problem = problem._replace(q=q.contiguous())
    if not (k.is_contiguous() or k.stride(-1) == 1):
        problem = problem._replace(k=k.contiguous())
    if not (v.is_contiguous() or v.stride(-1) == 1):
        problem = problem._replace(v=v.contiguous())
    if device == "cuda":
        problem = _autograd.repeatable(problem)
    if torch.compiler.is_compiling():
        if torch.compiler.is_dynamo_compiling():
            require_served(problem)
        return _ops.attention(*problem)
    return _autograd.run(problem)


def _autocast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """As autocast does: floating types are cast, except float64."""
    return tensor.to(dtype) if tensor.is_floating_point() and tensor.dtype != torch.float64 else tensor
