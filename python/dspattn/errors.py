"""The package's exception."""

from __future__ import annotations

from collections.abc import Iterable


class DspattnError(RuntimeError, ValueError):
    """A call that cannot be served.

    ``reasons`` has every reason, each a sentence that names the argument, what was expected and what was given.

    Example:
        >>> raise DspattnError(["scale: expected a finite positive number, got -1"])
        Traceback (most recent call last):
        dspattn.errors.DspattnError: scale: expected a finite positive number, got -1
    """

    reasons: tuple[str, ...]

    def __init__(self, reasons: Iterable[str]) -> None:
        self.reasons = tuple(reasons)
        super().__init__("\n".join(self.reasons))
