"""``attention_weights``: what was kept, to be looked at."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ._flags import as_flag
from ._not_offered import not_scriptable
from ._running import refuse_pieces
from .errors import DspattnError
from .functional import attention

WIDEST_VALUE = 256  # elements of a value head that the library takes


@not_scriptable
def attention_weights(query: Tensor, key: Tensor, attn_mask: Tensor | None = None, **options: Any) -> Tensor:
    """The weights :func:`attention` gives each key: rows sum to 1 over the kept keys and are 0 where pruned or masked.

    With ``rest="mean"`` a row is what the values are multiplied with: the keys that the mean is over share the weight
    of the pruned ones.

    For looking at maps and for modules that must return weights; of whole sequences, not of pieces inside
    ``dspattn.parallel.context``. It runs the attention itself, on columns of the
    identity matrix as values, so it shows exactly what the kernel kept; it takes n_k / 256 passes and memory of
    n_k * (n_q + 256), where gradients are wanted of n_k * (n_q + n_k).

    Args:
        query: ``[..., heads, n_q, d]``.
        key: ``[..., kv_heads, n_k, d]``.
        attn_mask: as in :func:`attention`.
        options: the other arguments of :func:`attention`.

    Returns:
        ``[..., heads, n_q, n_k]`` in the query's type.

    Example:
        >>> q = k = torch.randn(1, 1, 4, 8)
        >>> weights = attention_weights(q, k, pattern="1:2", grouping="consecutive")
        >>> (weights > 0).sum(-1).tolist()
        [[[2, 2, 2, 2]]]
    """
    if as_flag("return_lse", options.pop("return_lse", False)):
        raise DspattnError(["return_lse: expected False for attention_weights, got True"])
    refuse_pieces("attention_weights")
    n_k = key.shape[-2]
    value_lead = key.shape[:-2]
    parts = []
    for start in range(0, n_k, WIDEST_VALUE):
        width = min(WIDEST_VALUE, n_k - start)
        ones = torch.eye(width, dtype=query.dtype, device=query.device)
        columns = torch.nn.functional.pad(ones, (0, 0, start, n_k - start - width))  # [n_k, width] of the identity
        parts.append(attention(query, key, columns.expand(*value_lead, -1, -1), attn_mask, **options))
    if not parts:  # no keys: the call says what it says to any, and how the leading dimensions join
        return attention(query, key, key.new_empty((*value_lead, 0, 1)), attn_mask, **options)[..., :0]
    return torch.cat(parts, -1)
