"""The package's exception."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from ._tracing import raise_from_the_tracer


class DspattnError(RuntimeError, ValueError):
    """A call that cannot be served.

    ``reasons`` has every reason, each a sentence that names the argument, what was expected and what was given. It may
    be made of its text alone, as PyTorch does with an error that comes from another process.

    Example:
        >>> raise DspattnError(["scale: expected a finite positive number, got -1"])
        Traceback (most recent call last):
        dspattn.errors.DspattnError: scale: expected a finite positive number, got -1
    """

    reasons: tuple[str, ...]

    def __init__(self, reasons: str | Iterable[str] = ()) -> None:
        self.reasons = (reasons,) if isinstance(reasons, str) else tuple(reasons)
        if torch.compiler.is_dynamo_compiling():  # torch.compile follows no __init__ of the classes above this one
            raise_from_the_tracer(DspattnError, *self.reasons)
        else:
            super().__init__("\n".join(self.reasons))

    def __str__(self) -> str:
        return "\n".join(self.reasons)

    def __reduce__(self) -> tuple[Any, ...]:
        notes = getattr(self, "__notes__", None)
        return DspattnError, (self.reasons,), None if notes is None else {"__notes__": notes}
