"""Names of patterns and groupings as the operators take them."""

from __future__ import annotations

from typing import Literal

from .errors import DspattnError

Grouping = Literal["interleaved", "consecutive"]
MAX_GROUP = 32  # of the C++ library
INTERLEAVE_BLOCK = 128  # keys over which the interleaved groups spread


# The usual ones without parsing: it would be a tenth of what a small call costs.
_KNOWN = {"dense": (1, 1), "2:4": (2, 4), "1:2": (1, 2)}


def parse_pattern(pattern: str) -> tuple[int, int]:
    """(keep, group) of ``"N:M"`` or ``"dense"``.

    Example:
        >>> parse_pattern("2:4"), parse_pattern("dense")
        ((2, 4), (1, 1))
    """
    if pattern in _KNOWN:
        return _KNOWN[pattern]
    keep, colon, group = pattern.partition(":") if isinstance(pattern, str) else ("", "", "")
    if colon and keep.isdecimal() and group.isdecimal() and 1 <= int(keep) <= int(group) <= MAX_GROUP:
        return int(keep), int(group)
    raise DspattnError([f'pattern: expected "dense" or "N:M" with 1 <= N <= M <= {MAX_GROUP}, got {pattern!r}'])


def parse_grouping(grouping: str) -> bool:
    """True for interleaved.

    Example:
        >>> parse_grouping("consecutive")
        False
    """
    if grouping == "interleaved":
        return True
    if grouping == "consecutive":
        return False
    raise DspattnError([f'grouping: expected "interleaved" or "consecutive", got {grouping!r}'])


def group_period(pattern: str, grouping: str) -> int:
    """After how many keys the groups repeat: sequences cut at multiples of it keep their groups.

    Example:
        >>> group_period("2:4", "interleaved"), group_period("2:4", "consecutive"), group_period("dense", "interleaved")
        (128, 4, 1)
    """
    keep, group = parse_pattern(pattern)
    if keep == group:
        return 1
    return INTERLEAVE_BLOCK if parse_grouping(grouping) else group


def prunes(n_k: int, pattern: str, grouping: str) -> bool:
    """Whether a row of so many visible keys has a group with more of them than it keeps: shorter ones stay dense.

    Example:
        >>> prunes(64, "2:4", "interleaved"), prunes(65, "2:4", "interleaved"), prunes(3, "2:4", "consecutive")
        (False, True, True)
    """
    keep, group = parse_pattern(pattern)
    if keep == group:
        return False
    return n_k > (keep * (INTERLEAVE_BLOCK // group) if parse_grouping(grouping) else keep)
