"""The contract in plain PyTorch operations and float64: an implementation that shares nothing with the library.

Inputs of small integers make every score exact, so that what is kept can be compared without tolerance.
"""

from __future__ import annotations

import torch
from torch import Tensor


def keys_of_groups(n_k: int, group: int, grouping: str) -> Tensor:
    """[groups, group]: the keys of each group in ascending order; n_k stands for one past the end of the row."""
    if grouping == "consecutive":
        keys = torch.arange(-(-n_k // group) * group).view(-1, group)
    else:
        blocks = torch.arange(-(-n_k // 128) * 128).view(-1, group, 128 // group)
        keys = blocks.transpose(1, 2).reshape(-1, group)
    return keys.clamp(max=n_k)


def kept(scores: Tensor, keep: int, group: int, grouping: str) -> Tensor:
    """True where a score (-inf: masked) is among the largest of its group; ties keep the lower key."""
    n_k = scores.shape[-1]
    keys = keys_of_groups(n_k, group, grouping)
    padded = torch.nn.functional.pad(scores, (0, 1), value=float("-inf"))
    members = padded[..., keys]
    order = members.sort(dim=-1, descending=True, stable=True).indices[..., :keep]
    chosen = keys.expand_as(members).gather(-1, order).flatten(-2)
    mask = torch.zeros_like(padded, dtype=torch.bool).scatter_(-1, chosen, True)[..., :n_k]
    return mask & (scores > float("-inf"))


def visible(
    n_q: int,
    n_k: int,
    *,
    causal: bool = False,
    window: tuple[int | None, int | None] = (None, None),
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


def means(v: Tensor, interval: Tensor, seen: Tensor) -> Tensor:
    """[..., n_q, d_v]: of each row, the mean of v over the whole blocks of 128 keys of its interval, or over the
    interval, without the keys that are not seen."""
    n_k = v.shape[-2]
    blocks = torch.nn.functional.pad(interval, (0, -n_k % 128)).unflatten(-1, (-1, 128)).all(-1)
    whole = blocks.repeat_interleave(128, -1)[..., :n_k] & seen
    keys = torch.where(whole.any(-1, keepdim=True), whole, seen).double()
    return keys @ v / keys.sum(-1, keepdim=True).clamp(min=1)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pattern: str,
    grouping: str,
    *,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    scale: float | None = None,
    rest: str = "drop",
    interval: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(out, lse) of 4-dimensional inputs in float64, differentiable with the selection held fixed.

    With rest "mean", `interval` is [n_q, n_k], what diagonal and lengths leave, and `mask` what is visible of it.
    """
    q, k, v = (t.double() for t in (q, k, v))
    repeat = q.shape[1] // k.shape[1]
    k, v = (t.repeat_interleave(repeat, 1) for t in (k, v))
    scores = q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if bias is not None:
        scores = scores + bias.double()
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    seen, pruned = scores, torch.zeros_like(scores, dtype=torch.bool)
    if pattern != "dense":
        keep, group = map(int, pattern.split(":"))
        pruned = ~kept(scores.detach(), keep, group, grouping)
        scores = scores.masked_fill(pruned, float("-inf"))
    if rest == "mean":
        full = torch.ones(scores.shape[-2:], dtype=torch.bool) if interval is None else interval
        lost = torch.softmax(seen, -1).masked_fill(~pruned, 0)
        given = torch.softmax(seen, -1).masked_fill(pruned, 0) @ v
        return given + lost.sum(-1, keepdim=True) * means(v, full, seen > float("-inf")), torch.logsumexp(seen, -1)
    hidden = (scores == float("-inf")).all(-1, keepdim=True)
    weights = torch.softmax(scores.masked_fill(hidden, 0), -1).masked_fill(hidden, 0)
    return weights @ v, torch.logsumexp(scores, -1)


def integers(*shape: int, low: int = -3, high: int = 3) -> Tensor:
    """Small whole numbers as float32."""
    return torch.randint(low, high + 1, shape).float()
