"""Which keys of a row of scores stay: N:M in both groupings, top-k, and patterns fixed beforehand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

INTERLEAVE_BLOCK = 128  # keys over which interleaved groups spread; include/dspattn/pattern.h

Kind = Literal["dense", "nm", "topk", "window", "strided", "truncated"]
# row: members as far apart as the row's own keys allow, every group full. Not a hardware grouping: it tells what
# distance alone does, without the groups of the last block of 128 that interleaving leaves unfilled.
Grouping = Literal["consecutive", "interleaved", "row"]


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
    grouping: Grouping = "consecutive"
    per_row: bool = True  # top-k and fixed: density of each row's own keys; False: k = density * the longest row's keys

    @property
    def name(self) -> str:
        if self.kind == "dense":
            return "dense"
        if self.kind == "nm":
            return f"{self.keep}:{self.group} {self.grouping}"
        return f"{self.kind} {self.density:g}"

    @property
    def family(self) -> str:
        """nm, topk or fixed."""
        return "fixed" if self.kind in ("window", "strided", "truncated") else self.kind


DENSE = Rule("dense", 1.0)


def nm(keep: int, group: int, grouping: Grouping) -> Rule:
    """An N:M rule.

    Example:
        >>> nm(2, 4, "interleaved").name
        '2:4 interleaved'
    """
    if not 1 <= keep <= group:
        raise ValueError(f"keep: expected 1 <= keep <= group = {group}, got {keep}")
    if grouping == "interleaved" and INTERLEAVE_BLOCK % group:
        raise ValueError(f"group: expected a divisor of {INTERLEAVE_BLOCK} for interleaved groups, got {group}")
    return Rule("nm", keep / group, keep, group, grouping)


def at_density(kind: Kind, density: float, *, per_row: bool = True) -> Rule:
    """A top-k or fixed rule of the given density: of every row, or (the paper's k = s n) of the whole map's length."""
    if not 0 < density <= 1:
        raise ValueError(f"density: expected in (0, 1], got {density}")
    return Rule(kind, density, per_row=per_row)


def _kept_members(members: Sequence[Tensor], keep: int) -> list[Tensor]:
    """For each member of a group, whether fewer than ``keep`` others are ahead of it; ties keep the lower key."""
    kept = []
    for i, own in enumerate(members):
        ahead = torch.zeros(own.shape, dtype=torch.uint8, device=own.device)
        for j, other in enumerate(members):
            if j != i:
                ahead += (other >= own) if j < i else (other > own)
        kept.append(ahead < keep)
    return kept


def _nm_kept(scores: Tensor, rule: Rule) -> Tensor:
    if rule.grouping == "row":
        return _row_spread_kept(scores, rule)
    keys = scores.shape[-1]
    block = INTERLEAVE_BLOCK if rule.grouping == "interleaved" else rule.group
    padded = torch.nn.functional.pad(scores, (0, -keys % block), value=float("-inf"))
    shape = padded.shape[:-1]
    # The members of a group lie along one axis: the last for consecutive keys, the one before for interleaved ones.
    if rule.grouping == "interleaved":
        members = padded.view(*shape, -1, rule.group, block // rule.group).unbind(-2)
        joined = torch.stack(_kept_members(members, rule.keep), -2)
    else:
        joined = torch.stack(_kept_members(padded.view(*shape, -1, rule.group).unbind(-1), rule.keep), -1)
    return joined.reshape(padded.shape)[..., :keys]


def _row_spread_kept(scores: Tensor, rule: Rule) -> Tensor:
    # Row by row: with L keys and stride t = ceil(L/M), group g holds keys g, g + t, g + 2t, ...
    keys = scores.shape[-1]
    present = (scores[..., :1, :, :] > float("-inf")).sum(-1, keepdim=True)  # [..., 1, queries, 1]: heads are alike
    stride = ((present + rule.group - 1) // rule.group).clamp(min=1)
    padded = torch.nn.functional.pad(scores, (0, 1), value=float("-inf"))
    kept = torch.zeros(padded.shape, dtype=torch.bool, device=scores.device)
    groups = torch.arange(int(stride.max()), device=scores.device)
    places = []
    for element in range(rule.group):
        place = groups + element * stride
        places.append(place.masked_fill((groups >= stride) | (place >= keys), keys))  # the padding takes the rest
    members = [padded.gather(-1, place.expand(*scores.shape[:-1], -1)) for place in places]
    for place, stays in zip(places, _kept_members(members, rule.keep), strict=True):
        kept.scatter_(-1, place.expand(*scores.shape[:-1], -1), stays)
    return kept[..., :keys]


def kept_keys(scores: Tensor, rule: Rule, places: Tensor | None = None, longest: int | None = None) -> Tensor:
    """True where a key stays; ``scores`` [..., heads, queries, keys], -inf where masked. Masked keys never stay.

    Heads share one mask. ``places`` [queries] are the queries' own positions among the keys, by default the last ones;
    ``longest`` is the number of keys of the map's longest row, by default the longest row given.

    Example:
        >>> kept_keys(torch.tensor([[[3.0, 1.0, 2.0, 0.0]]]), nm(1, 2, "consecutive")).tolist()
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
        budget = _budget(allowed, rule, longest)
        # Sorting bounds the cost by the largest budget only.
        largest = scores.topk(int(budget.max()), dim=-1).values
        return (scores >= largest.gather(-1, budget - 1)) & allowed
    # A fixed rule sees no score, so one head's mask serves all.
    return _fixed_kept(allowed[..., :1, :, :], rule, places, longest).expand_as(scores)


def _budget(allowed: Tensor, rule: Rule, longest: int | None) -> Tensor:
    """How many keys stay, per row: at least one, at most as many as there are."""
    present = allowed.sum(-1, keepdim=True)
    if rule.per_row:
        whole = present
    elif longest is None:
        whole = present.amax(-2, keepdim=True)
    else:
        whole = torch.full_like(present, longest)
    return (rule.density * whole).round().clamp(min=1).minimum(present.clamp(min=1)).long()


def _fixed_kept(allowed: Tensor, rule: Rule, places: Tensor | None, longest: int | None) -> Tensor:
    budget = _budget(allowed, rule, longest)
    place = allowed.cumsum(-1) - 1  # position among the row's unmasked keys
    if rule.kind == "truncated":
        return (place < budget) & allowed
    if rule.kind == "strided":
        # Keep position j when ceil((j+1) rate) moves: evenly spaced, the first key among them.
        rate = rule.density if not rule.per_row else budget / allowed.sum(-1, keepdim=True).clamp(min=1)
        return (((place + 1) * rate - 1e-4).ceil() > (place * rate - 1e-4).ceil()) & allowed
    # window: the first key and the keys nearest the query's own place, which in causal rows is the last one.
    queries, keys = allowed.shape[-2:]
    own = torch.arange(keys - queries, keys, device=allowed.device) if places is None else places
    distance = (torch.arange(keys, device=allowed.device) - own.view(-1, 1)).abs()
    distance = torch.where(place == 0, -1, distance).where(allowed, keys + 1).short()
    threshold = distance.sort(dim=-1).values.gather(-1, budget - 1)
    return (distance <= threshold) & allowed
