"""Names of patterns, groupings, rests and selections as the operators take them."""

from __future__ import annotations

import math
from typing import Literal

import torch

from .errors import DspattnError

Grouping = Literal["interleaved", "consecutive"]
Rest = Literal["drop", "mean"]
Selection = Literal["own", "shared"]
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
    if isinstance(pattern, str) and len(pattern) < 10 and pattern.isascii():  # other scripts have digits, too
        if pattern in _KNOWN:
            return _KNOWN[pattern]
        keep, colon, group = pattern.partition(":")
        plain = keep.isdecimal() and group.isdecimal() and keep[0] != "0" != group[0]  # no leading zeros
        if colon and plain and int(keep) <= int(group) <= MAX_GROUP:
            return int(keep), int(group)
    raise DspattnError([f'pattern: expected "dense" or "N:M" with 1 <= N <= M <= {MAX_GROUP}, got {pattern!r}'])


def default_pattern(dtype: torch.dtype) -> str:
    """What sparse tensor cores take: 1:2 for float32, 2:4 for 16-bit types.

    Example:
        >>> default_pattern(torch.float32), default_pattern(torch.bfloat16)
        ('1:2', '2:4')
    """
    if dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise DspattnError([f"dtype: expected float32, float16 or bfloat16, got {dtype}"])
    return "1:2" if dtype == torch.float32 else "2:4"


def parse_grouping(grouping: str) -> bool:
    """True for interleaved.

    Example:
        >>> parse_grouping("consecutive")
        False
    """
    if isinstance(grouping, str) and grouping in ("interleaved", "consecutive"):
        return grouping == "interleaved"
    raise DspattnError([f'grouping: expected "interleaved" or "consecutive", got {grouping!r}'])


def parse_rest(rest: str) -> bool:
    """True for mean.

    Example:
        >>> parse_rest("drop")
        False
    """
    if isinstance(rest, str) and rest in ("drop", "mean"):
        return rest == "mean"
    raise DspattnError([f'rest: expected "drop" or "mean", got {rest!r}'])


def parse_selection(selection: str) -> bool:
    """True for shared.

    Example:
        >>> parse_selection("own")
        False
    """
    if isinstance(selection, str) and selection in ("own", "shared"):
        return selection == "shared"
    raise DspattnError([f'selection: expected "own" or "shared", got {selection!r}'])


def group_period(pattern: str, grouping: str, rest: str = "drop") -> int:
    """After how many keys the groups, and the blocks that the mean is over, repeat: sequences cut at multiples of it
    keep them.

    Example:
        >>> group_period("2:4", "interleaved"), group_period("2:4", "consecutive"), group_period("dense", "interleaved")
        (128, 4, 1)
        >>> group_period("2:4", "consecutive", "mean")
        128
    """
    keep, group = parse_pattern(pattern)
    if keep == group:
        return 1
    period = INTERLEAVE_BLOCK if parse_grouping(grouping) else group
    return math.lcm(period, INTERLEAVE_BLOCK) if parse_rest(rest) else period


def prunes(n_k: int, pattern: str, grouping: str) -> bool:
    """Whether a row of so many visible keys has a group with more of them than it keeps: shorter ones stay dense.

    Example:
        >>> prunes(64, "2:4", "interleaved"), prunes(65, "2:4", "interleaved"), prunes(3, "2:4", "consecutive")
        (False, True, True)
    """
    return n_k > kept_whole(pattern, grouping)


def kept_whole(pattern: str, grouping: str) -> float:
    """The most visible keys of which a row keeps all.

    Example:
        >>> kept_whole("2:4", "interleaved"), kept_whole("2:4", "consecutive"), kept_whole("dense", "interleaved")
        (64, 2, inf)
    """
    keep, group = parse_pattern(pattern)
    if keep == group:
        return math.inf
    return keep * (INTERLEAVE_BLOCK // group) if parse_grouping(grouping) else keep
