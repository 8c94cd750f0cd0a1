"""What ``dspattn.use`` saw, in words: calls served, those too short for anything to be pruned, and that none came.

Attention that does not call ``scaled_dot_product_attention`` passes a block by without a trace: silence must not look
like success.
"""

from __future__ import annotations

from collections import Counter

from ..patterns import prunes

WAYS_AROUND = (
    "attention that is not a call of scaled_dot_product_attention cannot be redirected: nn.MultiheadAttention with "
    "need_weights=True, a softmax of scores in a model's own code, flex_attention, fused layers"
)


def is_short(n_k: int, pattern: str, grouping: str) -> bool:
    """Whether a call with so many keys is dense although a pattern was asked for."""
    return pattern != "dense" and not prunes(n_k, pattern, grouping)


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
