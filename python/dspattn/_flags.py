"""Arguments that are true or false. Python takes nearly anything for one: a misplaced argument would mean yes."""

from __future__ import annotations

import sys
from typing import Any

import torch

from .errors import DspattnError


def as_flag(name: str, given: Any) -> bool:
    """The flag as a plain one; raises unless it is a bool, of Python, of NumPy or of a shape that is being traced."""
    return as_flags(**{name: given})[0]


def as_flags(**given: Any) -> list[bool]:
    """The same of several, by their names, with all reasons at once.

    Example:
        >>> as_flags(is_causal=True, return_lse=2)
        Traceback (most recent call last):
        dspattn.errors.DspattnError: return_lse: expected a bool, got 2
    """
    flags = list(given.values())
    if all([type(flag) is bool for flag in flags]):
        # A compiler shows a comparison of sizes that it leaves open as a bool, too; a branch settles it.
        return [True if flag else False for flag in flags] if torch.compiler.is_compiling() else flags  # noqa: SIM210
    reasons = [
        f"{name}: expected a bool, got {flag if isinstance(flag, int) else _kind_name(type(flag))}"
        for name, flag in given.items()
        if not _is_flag(flag)
    ]
    if reasons:
        raise DspattnError(reasons)
    return [bool(flag) for flag in flags]


def refuse_flags(**given: Any) -> None:
    """Raise for numbers that are flags: to Python True is 1, and an argument that slipped by a place would be one."""
    reasons = [f"{name}: expected a number, got {number}" for name, number in given.items() if _is_flag(number)]
    if reasons:
        raise DspattnError(reasons)


def _is_flag(given: Any) -> bool:
    if isinstance(given, (bool, torch.SymBool)):
        return True
    numpy = sys.modules.get("numpy")  # who has one of its flags has loaded it
    return numpy is not None and isinstance(given, numpy.bool_)


def _kind_name(kind: type) -> str:
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"
