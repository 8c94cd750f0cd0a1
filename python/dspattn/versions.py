"""Which versions of other packages are served, and a clear word about those that are not."""

from __future__ import annotations

import re

OLDEST_TORCH = (2, 10)  # whose stable ABI the shared object uses
# The first in which models such as GPT-2 record what attention returns: before, output_attentions gave none in silence.
OLDEST_TRANSFORMERS = (5, 4)
TESTED_TRANSFORMERS = "5.4 and 5.23"


def release(version: str) -> tuple[int, ...]:
    """The leading numbers of a version.

    Example:
        >>> release("2.13.0+cpu"), release("5.0.0rc1")
        ((2, 13, 0), (5, 0, 0))
    """
    match = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(int(number) for number in match[0].split(".")) if match else ()


def require_torch(version: str) -> None:
    """Raise ImportError for a PyTorch that the operators cannot be loaded into."""
    if release(version) < OLDEST_TORCH:
        wanted = ".".join(map(str, OLDEST_TORCH))
        raise ImportError(f"dspattn: expected torch {wanted} or later, got torch {version}")
