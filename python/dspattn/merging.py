"""``merge``: joins the results of attention over parts of the keys, exactly, by their log-sum-exp."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ._inputs import require_known
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
    for name, given in (("outs", outs), ("lses", lses)):
        if isinstance(given, str) or not hasattr(given, "__len__"):
            raise DspattnError([f"{name}: expected a sequence of tensors, got {type(given).__name__}"])
    if len(outs) == 0 or len(outs) != len(lses):
        raise DspattnError([f"outs, lses: expected one or more of each, as many, got {len(outs)} and {len(lses)}"])
    reasons = []
    for i, (out, lse) in enumerate(zip(outs, lses, strict=True)):
        require_known(f"outs[{i}]", out)
        require_known(f"lses[{i}]", lse)
        if out.dtype not in (torch.float32, torch.float16, torch.bfloat16) or out.dim() == 0:
            reasons.append(f"outs[{i}]: expected [..., n_q, d_v] of float32, float16 or bfloat16, got {_kind(out)}")
        elif out.shape != outs[0].shape or out.dtype != outs[0].dtype:
            reasons.append(f"outs[{i}]: expected outs[0]'s {_kind(outs[0])}, got {_kind(out)}")
        if lse.shape != outs[0].shape[:-1] or lse.dtype != torch.float32:
            reasons.append(f"lses[{i}]: expected {list(outs[0].shape[:-1])} of float32, got {_kind(lse)}")
        for name, tensor in (("outs", out), ("lses", lse)):
            if tensor.device != outs[0].device:
                reasons.append(
                    f"{name}[{i}]: expected a tensor on {outs[0].device} as outs[0] is, got one on {tensor.device}"
                )
    if reasons:
        raise DspattnError(reasons)
    stacked = torch.stack(tuple(lses))
    # A row that no part has a key for: -inf minus -inf; any finite number in its place gives weights of 0, and no NaN
    # back.
    empty = (stacked == float("-inf")).all(0)
    base = stacked.masked_fill(empty, 0.0).logsumexp(0).masked_fill(empty, 0.0)
    lse = base.masked_fill(empty, float("-inf"))
    weights = (stacked - base).exp().unsqueeze(-1)
    total = outs[0].float() * weights[0]
    for out, weight in zip(outs[1:], weights[1:], strict=True):
        total = total + out.float() * weight
    return total.to(outs[0].dtype), lse


def _kind(tensor: Tensor) -> str:
    return f"{list(tensor.shape)} of {str(tensor.dtype).removeprefix('torch.')}"
