"""What ``dspattn.use`` saw, counted and in words: calls served, those too short to be pruned, and that none came.

Attention that does not call ``scaled_dot_product_attention`` passes a block by without a trace: silence must not look
like success.
"""

from __future__ import annotations

import contextlib
import gc
import threading
from collections import Counter
from typing import Any

import torch

from ..patterns import kept_whole

WAYS_AROUND = (
    "attention that is not a call of scaled_dot_product_attention cannot be redirected: nn.MultiheadAttention with "
    "need_weights=True, a softmax of scores in a model's own code, flex_attention, fused layers"
)


class TracedCall:
    """A call that compiled code made with so many keys, and the one before it."""

    def __init__(self, before: TracedCall | None, n_k: Any) -> None:
        self.before = before
        self.n_k = n_k


class Tally:
    """The calls of a block.

    A compiler that traces ``count += 1`` makes code for that one count, and then code that takes the count as an input,
    for which CUDA graphs are recorded anew with each new one. So compiled code only hangs each served call on the one
    before, which a compiler need not look at; they are added up when somebody asks, and at garbage collections, so that
    they do not become too many. Calls left to PyTorch are counted as one would: there are compilers whose code asks the
    block again when it runs, and setting the number that was traced makes up for that.
    """

    def __init__(self, pattern: str, grouping: str) -> None:
        self.served = 0
        self.short = 0
        self.left: Counter[str] = Counter()
        # Of how many keys a call is dense although a pattern was asked for.
        self._short_up_to = -1 if pattern == "dense" else kept_whole(pattern, grouping)
        self._latest = TracedCall(None, 0)  # one without another before it was counted
        self._counting = threading.Lock()  # one block may be open in many threads

    def serve(self, n_k: Any) -> None:
        """Count a served call with so many keys."""
        if torch.compiler.is_compiling():
            self._latest = TracedCall(self._latest, n_k)
            return
        with self._counting:
            self._count(n_k)

    def leave(self, reason: str) -> None:
        """Count a call that was left to PyTorch."""
        if torch.compiler.is_compiling():  # one thread traces, and a compiler knows no locks
            self.left[reason] += 1
            return
        with self._counting:
            self.left[reason] += 1

    def settle(self) -> Tally:
        """The tally with the calls of compiled code added up."""
        with self._counting:
            self._settle()
        return self

    def watch_collections(self) -> None:
        """While a block is open. Watched twice, or not at all, the tally is right, only later or sooner."""
        gc.callbacks.append(self.at_collection)

    def unwatch_collections(self) -> None:
        with contextlib.suppress(ValueError):
            gc.callbacks.remove(self.at_collection)

    def at_collection(self, phase: str, info: dict[str, int]) -> None:
        """For gc.callbacks. A collection may come while this very thread counts: then the next one will do."""
        if phase == "start" and self._counting.acquire(blocking=False):
            try:
                self._settle()
            finally:
                self._counting.release()

    def _settle(self) -> None:
        # The latest call stays, counted: code that is running may be about to hang the next one on it.
        call = self._latest
        while (before := call.before) is not None:
            self._count(call.n_k)
            call.before = None
            call = before

    def _count(self, n_k: Any) -> None:
        self.served += 1
        self.short += isinstance(n_k, int) and n_k <= self._short_up_to  # exporting, n_k may be a symbol


def calls(count: int) -> str:
    """So many attention calls, in words."""
    return f"{count} attention call{'' if count == 1 else 's'}"


def summary(what: str, served: int, short: int, left: Counter[str]) -> str:
    """The report of a block.

    Example:
        >>> print(summary("2:4 interleaved", 3, 1, Counter()))
        3 attention calls ran with 2:4 interleaved, 1 of them with too few keys to prune any; none was left to PyTorch
        >>> print(summary("2:4 interleaved", 0, 0, Counter()).split(":")[0])
        no attention call arrived
    """
    if not served and not left:
        return f"no attention call arrived: {WAYS_AROUND}"
    ran = f"{calls(served)} ran with {what}"
    if short:
        ran += f", {short} of them with too few keys to prune any"
    if not left:
        return f"{ran}; none was left to PyTorch"
    lines = [f"{ran}; {calls(sum(left.values()))} left to PyTorch:"]
    return "\n".join(lines + [f"  {count} x {reason}" for reason, count in left.most_common()])


def is_worth_a_warning(served: int, left: Counter[str]) -> bool:
    """At a block's end: something was left to PyTorch, or nothing came at all."""
    return bool(left) or not served
