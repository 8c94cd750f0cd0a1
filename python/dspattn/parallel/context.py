"""``context``: a block inside which ``dspattn.attention`` and what calls it run on pieces of longer sequences."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from .. import _running
from .._flags import as_flags
from .._inputs import parse_alignment, require_kinds
from ..errors import DspattnError
from .attention import Method, Request, attention, packed_request, refuse, run
from .layout import Layout
from .sharding import read_lengths
from .transfers import Ranks


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
        # Not checked here: raised on one rank alone, an error would leave the others waiting in their first call.
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

    @property
    def world(self) -> int:
        return Ranks(self.options["group"]).world

    def refuse(self, error: DspattnError) -> NoReturn:
        """Raise here, and in the other ranks' next call of attention."""
        refuse(self.options["group"], error)

    @torch.compiler.disable
    def attention(self, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Any:
        if self.cu_seqlens is None:
            return attention(query, key, value, **options, **self.options)
        return_lse = options["return_lse"]
        out, lse = self._run(lambda: self._of_one_row(query, key, value, **options), query)
        return (out, lse) if return_lse else out

    def _run(self, request: Callable[[], Request], query: Any) -> tuple[Tensor, Tensor]:
        return run(request, self.options["group"], self.options["method"], query)

    def _of_one_row(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        attn_mask: Tensor | None,
        enable_gqa: bool,
        attn_bias: Tensor | None,
        key_lengths: Tensor | None,
        alignment: str,
        **options: Any,
    ) -> Request:
        """A call for one long row of sequences as the call of a packed batch."""
        given = {"attn_mask": attn_mask, "attn_bias": attn_bias, "key_lengths": key_lengths}
        reasons = [f"{name}: expected none in a packed batch" for name, mask in given.items() if mask is not None]
        parse_alignment(alignment)
        (gqa,) = as_flags(enable_gqa=enable_gqa)
        tensors = {"query": query, "key": key, "value": value}
        require_kinds(tensors)
        reasons += [
            f"{name}: expected [1, heads, rows, d] in a packed batch, got {list(tensor.shape)}"
            for name, tensor in tensors.items()
            if tensor.dim() != 4 or tensor.shape[0] != 1
        ]
        if not reasons and not gqa and query.shape[1] != key.shape[1]:
            heads = f"{query.shape[1]} heads of the query and {key.shape[1]} of the key"
            reasons.append(f"enable_gqa: expected True for {heads}, got False")
        if reasons:
            raise DspattnError(reasons)
        q, k, v = (tensor.squeeze(0).transpose(0, 1) for tensor in (query, key, value))
        assert self.cu_seqlens is not None
        return packed_request(q, k, v, self.cu_seqlens, layout=self.options["layout"], **options)

    @torch.compiler.disable
    def varlen_attention(self, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Any:
        return_lse = options["return_lse"]
        out, lse = self._run(lambda: self._of_packed(query, key, value, **options), query)
        out = out.squeeze(0).transpose(0, 1)
        return (out, lse.squeeze(0)) if return_lse else out

    def _of_packed(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int | None,
        max_seqlen_k: int | None,
        attn_mask: Tensor | None,
        alignment: str,
        **options: Any,
    ) -> Request:
        if attn_mask is not None:
            raise DspattnError(["attn_mask: expected none for a packed batch cut over ranks, got a tensor"])
        if cu_seqlens_q is not cu_seqlens_k and read_lengths(cu_seqlens_q) != read_lengths(cu_seqlens_k):
            raise DspattnError(["cu_seqlens_k: expected cu_seqlens_q's, for queries and keys are cut together"])
        parse_alignment(alignment)  # queries are as many as keys: either means the same
        # Lengths are read here: the longest of them, given, is a hint that is not needed.
        require_kinds({"max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k})
        whole = cu_seqlens_q if self.cu_seqlens is None else self.cu_seqlens
        return packed_request(query, key, value, whole, layout=self.options["layout"], **options)
