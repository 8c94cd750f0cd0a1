"""The contract in plain PyTorch operations and float64: an implementation that shares nothing with the library.

Inputs of small integers make every score exact, so that what is kept can be compared without tolerance.
"""

from __future__ import annotations

import torch
from torch import Tensor


def groups_of_keys(n_k: int, group: int, grouping: str) -> Tensor:
    """For each key the number of its group."""
    key = torch.arange(n_k)
    if grouping == "consecutive":
        return key // group
    per_block = 128 // group
    return key // 128 * per_block + key % 128 % per_block


def kept(scores: Tensor, keep: int, group: int, grouping: str) -> Tensor:
    """True where a score (-inf: masked) is among the largest of its group; ties keep the lower key."""
    mask = torch.zeros_like(scores, dtype=torch.bool)
    number = groups_of_keys(scores.shape[-1], group, grouping)
    for g in number.unique().tolist():
        columns = (number == g).nonzero().squeeze(1)
        members = scores[..., columns]
        order = members.sort(dim=-1, descending=True, stable=True).indices[..., :keep]
        chosen = torch.zeros_like(members, dtype=torch.bool).scatter_(-1, order, True)
        mask[..., columns] = chosen
    return mask & (scores > float("-inf"))


def visible(
    n_q: int, n_k: int, *, causal: bool = False, window: tuple[int | None, int | None] = (None, None),
    bottom_right: bool = False,
) -> Tensor:
    """[n_q, n_k]: which keys the diagonal masks leave."""
    position = torch.arange(n_q)[:, None] + (n_k - n_q if bottom_right else 0)
    key = torch.arange(n_k)[None, :]
    mask = torch.ones(n_q, n_k, dtype=torch.bool)
    if causal:
        mask &= key <= position
    if window[0] is not None:
        mask &= key >= position - window[0]
    if window[1] is not None:
        mask &= key <= position + window[1]
    return mask


def attention(
    q: Tensor, k: Tensor, v: Tensor, pattern: str, grouping: str, *, mask: Tensor | None = None,
    bias: Tensor | None = None, scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """(out, lse) of 4-dimensional inputs in float64, differentiable with the selection held fixed."""
    q, k, v = (t.double() for t in (q, k, v))
    repeat = q.shape[1] // k.shape[1]
    k, v = (t.repeat_interleave(repeat, 1) for t in (k, v))
    scores = q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if bias is not None:
        scores = scores + bias.double()
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    if pattern != "dense":
        keep, group = map(int, pattern.split(":"))
        scores = scores.masked_fill(~kept(scores.detach(), keep, group, grouping), float("-inf"))
    hidden = (scores == float("-inf")).all(-1, keepdim=True)
    weights = torch.softmax(scores.masked_fill(hidden, 0), -1).masked_fill(hidden, 0)
    return weights @ v, torch.logsumexp(scores, -1)


def integers(*shape: int, low: int = -3, high: int = 3) -> Tensor:
    """Small whole numbers as float32."""
    return torch.randint(low, high + 1, shape).float()
