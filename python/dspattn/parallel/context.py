"""``context``: a block inside which ``dspattn.attention`` and what calls it run on pieces of longer sequences."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from .. import _running
from .._flags import as_flags
from ..errors import DspattnError
from .attention import METHODS, Method, attention, varlen_attention
from .layout import Layout
from .sharding import read_lengths


class context:  # noqa: N801 - reads as the thing it makes: with dspattn.parallel.context(): ...
    """Inside the block, calls of :func:`dspattn.attention` and :func:`dspattn.varlen_attention` in this thread are
    calls of :func:`attention` and :func:`varlen_attention` here: their tensors are this rank's pieces. Hugging Face
    models with a dspattn name, and PyTorch's own attention under :class:`dspattn.use`, run unchanged. One object may be
    open several times, in one thread or in many.

    Args:
        group: as in :func:`attention`.
        method: ``"ring"`` or ``"all_to_all"``.
        layout: as in :func:`attention`.
        cu_seqlens: of a packed batch: where each of its sequences starts, and the end. Calls of
            :func:`dspattn.attention` then have a batch of 1, whose rows are those of all sequences.

    Example:
        >>> import torch, dspattn
        >>> q = k = v = torch.randn(1, 2, 256, 16)
        >>> with context():  # without torch.distributed, a group of one
        ...     out = dspattn.attention(q, k, v, is_causal=True)
        >>> torch.equal(out, dspattn.attention(q, k, v, is_causal=True))
        True
    """

    def __init__(
        self,
        group: Any = None,
        method: Method = "ring",
        *,
        layout: Layout | None = None,
        cu_seqlens: Tensor | Sequence[int] | None = None,
    ) -> None:
        if method not in METHODS:
            raise DspattnError([f'method: expected "ring" or "all_to_all", got {method!r}'])
        self.options: dict[str, Any] = {"group": group, "method": method, "layout": layout}
        self.cu_seqlens = cu_seqlens

    # Interrupted, as by Ctrl-C, the one leaves nothing open, for no __exit__ follows, and the other closes the block
    # first.

    def __enter__(self) -> context:
        opened = _running.StandIn(self)
        try:
            _running.stand_ins.append(opened)
            return self
        except BaseException:
            opened.close()
            raise

    def __exit__(self, *exception: object) -> None:
        latest = None
        try:
            latest = self._latest()
            latest.close()
        except BaseException:
            (latest or self._latest()).close()
            raise

    def _latest(self) -> _running.StandIn:
        thread = threading.get_ident()
        return [o for o in _running.stand_ins if o.block is self and o.thread == thread][-1]

    def attention(self, query: Tensor, key: Tensor, value: Tensor, *masks: Any, **options: Any) -> Any:
        if self.cu_seqlens is None:
            return attention(query, key, value, *masks, **options, **self.options)
        return self._packed(query, key, value, **options)

    def _packed(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        enable_gqa: bool = False,
        attn_bias: Tensor | None = None,
        key_lengths: Tensor | None = None,
        alignment: str = "top_left",
        return_lse: bool = False,
        **options: Any,
    ) -> Any:
        """A call for one long row of sequences as the call of a packed batch."""
        given = {"attn_mask": attn_mask, "attn_bias": attn_bias, "key_lengths": key_lengths}
        reasons = [f"{name}: expected none in a packed batch" for name, mask in given.items() if mask is not None]
        enable_gqa, return_lse = as_flags(enable_gqa=enable_gqa, return_lse=return_lse)
        options["dropout_p"] = dropout_p
        if query.dim() != 4 or query.shape[0] != 1:
            reasons.append(f"query: expected [1, heads, rows, d] in a packed batch, got {list(query.shape)}")
        elif not enable_gqa and key.dim() == 4 and query.shape[1] != key.shape[1]:
            heads = f"{query.shape[1]} heads of the query and {key.shape[1]} of the key"
            reasons.append(f"enable_gqa: expected True for {heads}, got False")
        if reasons:
            raise DspattnError(reasons)
        q, k, v = (tensor.squeeze(0).transpose(0, 1) for tensor in (query, key, value))
        out, lse = varlen_attention(q, k, v, self.cu_seqlens, return_lse=True, **options, **self.options)
        out, lse = out.transpose(0, 1).unsqueeze(0), lse.unsqueeze(0)
        return (out, lse) if return_lse else out

    def varlen_attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cu_q: Tensor,
        cu_k: Tensor,
        *,
        attn_mask: Tensor | None,
        **options: Any,
    ) -> Any:
        if attn_mask is not None:
            raise DspattnError(["attn_mask: expected none for a packed batch cut over ranks, got a tensor"])
        if cu_q is not cu_k and read_lengths(cu_q) != read_lengths(cu_k):
            raise DspattnError(["cu_seqlens_k: expected cu_seqlens_q's, for queries and keys are cut together"])
        whole = cu_q if self.cu_seqlens is None else self.cu_seqlens
        return varlen_attention(query, key, value, whole, **options, **self.options)
