"""What Ctrl-C leaves of blocks: nothing switched on that was not before, wherever it arrives.

CPython looks for signals where a Python function is entered, after a call of one in C, and in loops; a profiler is told
of those places, and may raise there. Only the entry of ``__exit__`` itself is out of reach of anything written in it.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import dspattn
from dspattn import _running, parallel
from dspattn.integrations import _redirect

sdpa = torch.nn.functional.scaled_dot_product_attention


@contextmanager
def interrupted_at(place: int) -> Iterator[list[str]]:
    """KeyboardInterrupt at one of the places where signals are looked for, counted from the block's start. Gives the
    places that were passed."""
    passed: list[str] = []

    def profile(frame: Any, event: str, argument: Any) -> None:
        code = frame.f_code
        if event not in ("call", "c_return") or code.co_name in ("interrupted_at", "nothing"):
            return
        if event == "call" and code.co_name in ("__exit__", "here"):
            return
        passed.append(f"{code.co_filename}:{frame.f_lineno} {event}")
        if len(passed) == place + 1:
            raise KeyboardInterrupt(passed[-1])

    sys.setprofile(profile)
    try:
        yield passed
    finally:
        sys.setprofile(None)


def nothing() -> None:
    pass


def what_is_on() -> tuple[Any, ...]:
    return _redirect._open.get(), torch._C._len_torch_function_stack(), list(_running.stand_ins)


BLOCKS: dict[str, Callable[[], Any]] = {
    "use": lambda: dspattn.use("2:4", strict=False),
    "as_in": lambda: _redirect.as_in(dspattn.use("2:4")),
    "context": lambda: parallel.context(),
}


@pytest.mark.parametrize("around", [None, "same", "use", "context"])
@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.filterwarnings("ignore:no attention call arrived")
def test_interrupted_blocks_leave_nothing_on(name: str, around: str | None) -> None:
    if name == around or (name, around) == ("as_in", "same"):
        pytest.skip("said by another")
    block = BLOCKS[name]()
    outer = None if around is None else block if around == "same" else BLOCKS[around]()
    if outer is not None:
        outer.__enter__()
    before, place, interruptions = what_is_on(), 0, 0
    try:
        while True:
            block = BLOCKS[name]() if outer is not block else block
            try:
                with interrupted_at(place) as passed, block:
                    nothing()
            except KeyboardInterrupt as interrupt:
                interruptions += 1
                assert what_is_on() == before, interrupt
            if len(passed) <= place:
                break
            place += 1
    finally:
        if outer is not None:
            outer.__exit__(None, None, None)
    assert interruptions > 4
    assert what_is_on() == ((), 0, [])
    assert not gc.callbacks
