"""``merge``: joins the results of attention over parts of the keys, exactly, by their log-sum-exp."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ._not_offered import not_scriptable
from .errors import DspattnError


@not_scriptable
def merge(outs: Sequence[Tensor], lses: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """The attention over all keys from that over parts of them.

    Pruning is local to groups of keys, so where every part starts at a multiple of 128 keys (grouping
    ``"consecutive"``: of M), the parts kept what one pass over all keys keeps: ``lse = log sum exp(lse_p)`` and
    ``out = sum exp(lse_p - lse) out_p``. Differentiable; on any device.

    Args:
        outs: of each part ``[..., n_q, d_v]``; ``out_dtype=torch.float32`` loses nothing.
        lses: of each part ``[..., n_q]``, float32, from ``return_lse=True``.

    Returns:
        ``out`` in the type of ``outs`` and ``lse``. A query that no part has a key for gives 0 and -inf.

    Example:
        >>> import dspattn
        >>> q, k, v = (torch.randn(1, 1, 256, 8) for _ in range(3))
        >>> halves = [slice(0, 128), slice(128, 256)]
        >>> parts = [
        ...     dspattn.attention(q, k[..., s, :], v[..., s, :], is_causal=True, offset=-s.start, return_lse=True)
        ...     for s in halves
        ... ]
        >>> out, lse = merge(*zip(*parts, strict=True))
        >>> torch.allclose(out, dspattn.attention(q, k, v, is_causal=True), atol=1e-5)
        True
    """
    if not outs or len(outs) != len(lses):
        raise DspattnError([f"outs, lses: expected one or more of each, as many, got {len(outs)} and {len(lses)}"])
    reasons = []
    for i, (out, lse) in enumerate(zip(outs, lses, strict=True)):
        if out.shape != outs[0].shape or out.dtype != outs[0].dtype:
            reasons.append(f"outs[{i}]: expected outs[0]'s {_kind(outs[0])}, got {_kind(out)}")
        if lse.shape != outs[0].shape[:-1] or lse.dtype != torch.float32:
            reasons.append(f"lses[{i}]: expected {list(outs[0].shape[:-1])} of float32, got {_kind(lse)}")
    if reasons:
        raise DspattnError(reasons)
    stacked = torch.stack(tuple(lses))
    lse = stacked.logsumexp(0)
    # A row that no part has a key for: -inf minus -inf; any finite number in its place gives weights of 0.
    base = lse.masked_fill(lse == float("-inf"), 0.0)
    weights = (stacked - base).exp().unsqueeze(-1)
    total = outs[0].float() * weights[0]
    for out, weight in zip(outs[1:], weights[1:], strict=True):
        total = total + out.float() * weight
    return total.to(outs[0].dtype), lse


def _kind(tensor: Tensor) -> str:
    return f"{list(tensor.shape)} of {str(tensor.dtype).removeprefix('torch.')}"
