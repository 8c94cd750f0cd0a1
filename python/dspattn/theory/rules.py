"""Which keys of a row of scores stay: N:M in both groupings, top-k, and patterns fixed beforehand."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

INTERLEAVE_BLOCK = 128  # keys over which interleaved groups spread; include/dspattn/pattern.h

Kind = Literal["dense", "nm", "topk", "window", "strided", "truncated"]


@dataclass(frozen=True)
class Rule:
    """A way to choose the kept keys of every row.

    ``window`` keeps the first key and those nearest the query, ``strided`` evenly spaced keys, ``truncated`` the first
    ones (the paper's fixed pattern); all three know the density only, never a score.
    """

    kind: Kind
    density: float
    keep: int = 0
    group: int = 0
    interleaved: bool = False

    @property
    def name(self) -> str:
        if self.kind == "dense":
            return "dense"
        if self.kind == "nm":
            return f"{self.keep}:{self.group} {'interleaved' if self.interleaved else 'consecutive'}"
        return f"{self.kind} {self.density:g}"

    @property
    def family(self) -> str:
        """nm, topk or fixed."""
        return "fixed" if self.kind in ("window", "strided", "truncated") else self.kind


DENSE = Rule("dense", 1.0)


def nm(keep: int, group: int, *, interleaved: bool) -> Rule:
    """An N:M rule.

    Example:
        >>> nm(2, 4, interleaved=True).name
        '2:4 interleaved'
    """
    if not 1 <= keep <= group:
        raise ValueError(f"keep: expected 1 <= keep <= group = {group}, got {keep}")
    if interleaved and INTERLEAVE_BLOCK % group:
        raise ValueError(f"group: expected a divisor of {INTERLEAVE_BLOCK} for interleaved groups, got {group}")
    return Rule("nm", keep / group, keep, group, interleaved)


def at_density(kind: Kind, density: float) -> Rule:
    """A top-k or fixed rule of the given density."""
    if not 0 < density <= 1:
        raise ValueError(f"density: expected in (0, 1], got {density}")
    return Rule(kind, density)


def _nm_kept(scores: Tensor, rule: Rule) -> Tensor:
    keys = scores.shape[-1]
    block = INTERLEAVE_BLOCK if rule.interleaved else rule.group
    padding = -keys % block
    padded = torch.nn.functional.pad(scores, (0, padding), value=float("-inf"))
    shape = padded.shape[:-1]
    # The members of a group lie along one axis: the last for consecutive keys, the one before for interleaved ones.
    if rule.interleaved:
        members = padded.view(*shape, -1, rule.group, block // rule.group).unbind(-2)
    else:
        members = padded.view(*shape, -1, rule.group).unbind(-1)
    kept = []
    for i, own in enumerate(members):
        ahead = torch.zeros(own.shape, dtype=torch.uint8)
        for j, other in enumerate(members):
            if j < i:
                ahead += other >= own  # ties keep the lower key
            elif j > i:
                ahead += other > own
        kept.append(ahead < rule.keep)
    joined = torch.stack(kept, -2 if rule.interleaved else -1).reshape(padded.shape)
    return joined[..., :keys]


def kept_keys(scores: Tensor, rule: Rule, places: Tensor | None = None) -> Tensor:
    """True where a key stays; ``scores`` [..., heads, queries, keys], -inf where masked. Masked keys never stay.

    Heads share one mask. ``places`` [queries] are the queries' own positions among the keys; by default the last ones.

    Example:
        >>> kept_keys(torch.tensor([[[3.0, 1.0, 2.0, 0.0]]]), nm(1, 2, interleaved=False)).tolist()
        [[[True, False, True, False]]]
        >>> kept_keys(torch.tensor([[[3.0, 1.0, 2.0, 0.0]]]), at_density("topk", 0.5)).tolist()
        [[[True, False, True, False]]]
    """
    allowed = scores > float("-inf")
    if rule.kind == "dense":
        return allowed
    if rule.kind == "nm":
        return _nm_kept(scores, rule) & allowed
    if rule.kind == "topk":
        budget = _budget(allowed, rule)
        # Sorting bounds the cost by the largest budget only.
        largest = scores.topk(int(budget.max()), dim=-1).values
        return (scores >= largest.gather(-1, budget - 1)) & allowed
    # A fixed rule sees no score, so one head's mask serves all.
    return _fixed_kept(allowed[..., :1, :, :], rule, places).expand_as(scores)


def _budget(allowed: Tensor, rule: Rule) -> Tensor:
    """How many keys stay, per row."""
    return (rule.density * allowed.sum(-1, keepdim=True)).round().clamp(min=1).long()


def _fixed_kept(allowed: Tensor, rule: Rule, places: Tensor | None) -> Tensor:
    budget = _budget(allowed, rule)
    place = allowed.cumsum(-1) - 1  # position among the row's unmasked keys
    if rule.kind == "truncated":
        return (place < budget) & allowed
    if rule.kind == "strided":
        # Keep position j when floor((j+1) b/n) moves: b keys evenly spaced over n.
        rate = budget / allowed.sum(-1, keepdim=True).clamp(min=1)
        return (((place + 1) * rate + 1e-4).floor() > (place * rate + 1e-4).floor()) & allowed
    # window: the first key and the keys nearest the query's own place, which in causal rows is the last one.
    queries, keys = allowed.shape[-2:]
    own = torch.arange(keys - queries, keys) if places is None else places
    distance = (torch.arange(keys) - own.view(-1, 1)).abs()
    distance = torch.where(place == 0, -1, distance).where(allowed, keys + 1).short()
    threshold = distance.sort(dim=-1).values.gather(-1, budget - 1)
    return (distance <= threshold) & allowed
