"""What one attention layer of a switched model computes: a pattern, for all of its heads or for some."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from .errors import DspattnError
from .functional import attention
from .patterns import Grouping, Rest, Selection


@dataclass(frozen=True)
class Plan:
    """What one attention layer computes."""

    pattern: str
    grouping: Grouping
    heads: tuple[int, ...] | None = None  # the query heads that are pruned; None: all
    rest: Rest = "drop"
    selection: Selection = "own"

    def options(self) -> dict[str, Any]:
        """The arguments of :func:`dspattn.attention` that it stands for, but for the heads."""
        return {
            "pattern": self.pattern, "grouping": self.grouping, "rest": self.rest, "selection": self.selection
        }  # fmt: skip

    def __str__(self) -> str:
        rest = "" if self.rest == "drop" else f", rest {self.rest}"
        selection = "" if self.selection == "own" else f", {self.selection} selection"
        heads = "" if self.heads is None else f", heads {', '.join(map(str, self.heads))} only"
        return f"{self.pattern} {self.grouping}{rest}{selection}{heads}"


def by_heads(plan: Plan, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any) -> Tensor:
    """Attention with the plan's pattern in its heads and dense in the others, [batch, heads, n_q, d_v]."""
    if plan.heads is None:
        return attention(query, key, value, mask, **plan.options(), **options)
    if plan.selection == "shared":
        raise DspattnError(['selection: expected "own" where only some heads are pruned, got "shared"'])
    count, shared = query.shape[1], query.shape[1] // key.shape[1]
    if any(not 0 <= head < count for head in plan.heads):
        raise DspattnError([f"heads: expected numbers below {count}, got {list(plan.heads)}"])
    bias, sinks = options.pop("attn_bias", None), options.pop("sinks", None)
    out: Tensor | None = None
    others = [head for head in range(count) if head not in plan.heads]
    for pattern, heads in ((plan.pattern, list(plan.heads)), ("dense", others)):
        if not heads:
            continue
        keys = [head // shared for head in heads]
        part = attention(
            query[:, heads],
            key[:, keys],
            value[:, keys],
            _some_heads(mask, heads),
            attn_bias=_some_heads(bias, heads),
            sinks=None if sinks is None else sinks[heads],
            pattern=pattern,
            grouping=plan.grouping,
            rest=plan.rest,
            **options,
        )
        out = part.new_empty((*query.shape[:3], value.shape[-1])) if out is None else out
        out[:, heads] = part
    assert out is not None
    return out


def _some_heads(tensor: Tensor | None, heads: list[int]) -> Tensor | None:
    return tensor if tensor is None or tensor.dim() < 4 or tensor.shape[1] == 1 else tensor[:, heads]
