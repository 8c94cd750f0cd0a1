"""Blocked-ELL masks: which blocks of keys a block of queries may see at all, with N:M pruning inside the blocks.

    blocks = dspattn.block_masks.bigbird(4096, window=1, global_blocks=1, random=3)
    out = dspattn.block_attention(query, key, value, blocks, pattern="2:4")

The attention is the paper's three kernels, which compute, store and read only the blocks of the mask; a mask tensor of
the same content in :func:`dspattn.attention` gives the same result.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from . import _ops
from ._flags import as_flag, as_flags, refuse_flags
from ._inputs import Alignment, explained, lengths_as_int32, parse_alignment, require_known
from ._not_offered import not_scriptable
from ._registered import register_gradient
from ._running import refuse_pieces
from ._schema import BackwardArguments, ProblemArguments
from .errors import DspattnError
from .patterns import Grouping, parse_grouping, parse_pattern

_block_mask = torch.ops.dspattn.block_mask.default
_block_attention = torch.ops.dspattn.block_attention.default


@dataclass(frozen=True, eq=False)
class BlockMask:
    """Block row r (queries r * block ...) sees the key blocks ``columns[r, : counts[r]]``, ascending; -1 follows."""

    n_q: int
    n_k: int
    block: int
    counts: Tensor  # int32 [block rows]
    columns: Tensor  # int32 [block rows, width]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, BlockMask):
            return NotImplemented
        same = (self.n_q, self.n_k, self.block) == (other.n_q, other.n_k, other.block)
        return same and torch.equal(self.counts, other.counts) and torch.equal(self.columns, other.columns)

    def __hash__(self) -> int:
        return hash((self.n_q, self.n_k, self.block))

    @property
    def density(self) -> float:
        """Blocks kept over all blocks."""
        everything = self.counts.numel() * -(-self.n_k // self.block)
        return float(self.counts.sum()) / everything if everything else 0.0

    def to(self, device: torch.device | str) -> BlockMask:
        """The same mask on another device, where the attention that takes it runs."""
        return BlockMask(self.n_q, self.n_k, self.block, self.counts.to(device), self.columns.to(device))

    def block_map(self) -> Tensor:
        """Boolean [block rows, block columns], True for blocks that are seen."""
        rows, width = self.columns.shape
        seen = torch.zeros(rows, -(-self.n_k // self.block) + 1, dtype=torch.bool, device=self.columns.device)
        used = torch.arange(width, device=self.columns.device) < self.counts.unsqueeze(1)
        # What is unused goes to a column past the end.
        seen.scatter_(1, self.columns.long().masked_fill(~used, seen.shape[1] - 1), True)
        return seen[:, :-1]

    def to_dense(self) -> Tensor:
        """Boolean [n_q, n_k], True for keys that are seen: an ``attn_mask`` of the same content.

        Example:
            >>> sliding_window(128, window=0).to_dense().float().mean().item()
            0.5
        """
        wide = self.block_map().repeat_interleave(self.block, 0).repeat_interleave(self.block, 1)
        return wide[: self.n_q, : self.n_k]


def from_block_map(seen: Tensor, n_q: int, n_k: int, *, block: int = 64) -> BlockMask:
    """A mask from a boolean map of blocks.

    Args:
        seen: boolean ``[block rows, block columns]``, True for blocks that are seen.
        n_q: number of queries; the last block row may be partial.
        n_k: number of keys.
        block: 64 or 128.

    Example:
        >>> from_block_map(torch.eye(2, dtype=torch.bool), 128, 128).columns.tolist()
        [[0], [1]]
    """
    _check_sizes(n_q, n_k, block)
    require_known("seen", seen)
    shape = [-(-n_q // block), -(-n_k // block)]
    if seen.dtype != torch.bool or list(seen.shape) != shape:
        raise DspattnError([f"seen: expected a boolean tensor {shape}, got {seen.dtype} {list(seen.shape)}"])
    if seen.is_meta:  # its elements say how many columns there are
        raise DspattnError(["seen: expected a tensor that can be read, got one on meta"])
    counts = seen.sum(1, dtype=torch.int32)
    width = int(counts.max()) if counts.numel() else 0
    first = seen.to(torch.int8).argsort(dim=1, descending=True, stable=True)[:, :width].to(torch.int32)
    used = torch.arange(width, device=seen.device) < counts.unsqueeze(1)
    return BlockMask(n_q, n_k, block, counts, first.masked_fill(~used, -1).contiguous())


def sliding_window(
    n: int, n_k: int | None = None, *, block: int = 64, window: int = 1, causal: bool = False
) -> BlockMask:
    """Every block row sees ``window`` blocks to either side of its own.

    Example:
        >>> sliding_window(256, window=1).counts.tolist()
        [2, 3, 3, 2]
    """
    return _build(n, n_k, block, window, 0, 0, 0, causal)


def longformer(
    n: int, n_k: int | None = None, *, block: int = 64, window: int = 1, global_blocks: int = 1, causal: bool = False
) -> BlockMask:
    """A window, and first blocks that see and are seen by all (Beltagy et al. 2020).

    Example:
        >>> longformer(256, window=0).counts.tolist()
        [4, 2, 2, 2]
    """
    return _build(n, n_k, block, window, global_blocks, 0, 0, causal)


def bigbird(
    n: int,
    n_k: int | None = None,
    *,
    block: int = 64,
    window: int = 1,
    global_blocks: int = 1,
    random: int = 3,
    seed: int = 0,
    causal: bool = False,
) -> BlockMask:
    """A window, global blocks, and further blocks drawn for each row (Zaheer et al. 2020).

    Args:
        n: number of queries.
        n_k: number of keys, by default as many; the diagonal ends at the last block of both.
        block: 64 or 128; 128 for interleaved groups.
        window: blocks to either side of the diagonal one.
        global_blocks: first blocks that every row sees, and first block rows that see every block.
        random: further blocks of each row.
        seed: of the random blocks; the same seed gives the same mask on every machine.
        causal: leave out blocks right of the diagonal one.

    Example:
        >>> bigbird(1024).counts.tolist()[:3]
        [16, 6, 7]
    """
    return _build(n, n_k, block, window, global_blocks, random, seed, causal)


def _build(
    n: int, n_k: int | None, block: int, window: int, global_blocks: int, random: int, seed: int, causal: bool
) -> BlockMask:
    n_k = n if n_k is None else n_k
    causal = as_flag("causal", causal)
    _require_integers(n=n, n_k=n_k, block=block, window=window, global_blocks=global_blocks, random=random, seed=seed)
    try:
        counts, columns = _block_mask(
            torch.empty(0, dtype=torch.int32, device="cpu"), n, n_k, block, window, global_blocks, random, seed, causal
        )
    except RuntimeError as error:
        raise _ops.translated(error) from None
    return BlockMask(n, n_k, block, counts, columns)


def _require_integers(**sizes: Any) -> None:
    wrong = {
        name: size
        for name, size in sizes.items()
        if not isinstance(size, int) or isinstance(size, bool) or not abs(size) < 2**63
    }
    if wrong:
        raise DspattnError(f"{name}: expected a 64-bit integer, got {size!r}" for name, size in wrong.items())


def _check_sizes(n_q: int, n_k: int, block: int) -> None:
    _require_integers(n_q=n_q, n_k=n_k, block=block)
    reasons = []
    if block not in (64, 128):
        reasons.append(f"block: expected 64 or 128, got {block}")
    for name, value in (("n_q", n_q), ("n_k", n_k)):
        if value < 0:
            reasons.append(f"{name}: expected a length >= 0, got {value}")
    if reasons:
        raise DspattnError(reasons)


@not_scriptable
def block_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    blocks: BlockMask,
    attn_mask: Tensor | None = None,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    pattern: str = "2:4",
    grouping: Grouping = "consecutive",
    alignment: Alignment = "top_left",
    key_lengths: Tensor | None = None,
    allow_tf32: bool = True,
) -> Tensor:
    """Attention over the blocks of a mask, pruned to ``pattern`` inside them.

    Args:
        query: ``[batch, heads, n_q, d]``, float32, float16 or bfloat16.
        key: ``[batch, kv_heads, n_k, d]``; heads a multiple of kv_heads.
        value: ``[batch, kv_heads, n_k, d_v]``.
        blocks: on the query's device (:meth:`BlockMask.to`).
        attn_mask: as in :func:`dspattn.attention`, ``[batch or 1, heads or 1, n_q or 1, n_k]``.
        is_causal: as in :func:`dspattn.attention`.
        scale: as in :func:`dspattn.attention`.
        pattern: ``"2:4"`` or ``"1:2"`` for 16-bit types, ``"1:2"`` for float32 (any that the pipeline takes).
        grouping: ``"consecutive"``, or ``"interleaved"`` with blocks of 128, which its groups span.
        alignment: as in :func:`dspattn.attention`.
        key_lengths: as in :func:`dspattn.attention`.
        allow_tf32: as in :func:`dspattn.attention`.

    Returns:
        ``[batch, heads, n_q, d_v]``. Differentiable with respect to query, key and value, by the gradient of
        :func:`dspattn.attention` under the same mask in dense form (one byte a score).

    Example:
        >>> q = k = v = torch.randn(1, 2, 256, 64)
        >>> block_attention(q, k, v, sliding_window(256), pattern="1:2").shape
        torch.Size([1, 2, 256, 64])
    """
    refuse_pieces("block_attention")
    keep, group = parse_pattern(pattern)
    is_causal, allow_tf32 = as_flags(is_causal=is_causal, allow_tf32=allow_tf32)
    refuse_flags(scale=scale)
    reasons = []
    lengths = None if key_lengths is None else lengths_as_int32("key_lengths", key_lengths)
    if not isinstance(blocks, BlockMask):
        raise DspattnError([f"blocks: expected a BlockMask, got {type(blocks).__name__}"])
    if attn_mask is not None:
        require_known("attn_mask", attn_mask)
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        require_known(name, tensor)
        if tensor.dim() != 4:
            reasons.append(f"{name}: expected 4 dimensions [batch, heads, n, d], got {list(tensor.shape)}")
    if not reasons and (query.shape[2], key.shape[2]) != (blocks.n_q, blocks.n_k):
        reasons.append(
            f"blocks: expected a mask of {query.shape[2]} queries and {key.shape[2]} keys, "
            f"got one of {blocks.n_q} and {blocks.n_k}"
        )
    if attn_mask is not None and attn_mask.dim() != 4:
        reasons.append(f"attn_mask: expected 4 dimensions, got {list(attn_mask.shape)}")
    if attn_mask is not None and attn_mask.requires_grad:
        reasons.append("attn_mask: expected a mask or bias with requires_grad=False, its gradient is not computed")
    if reasons:
        raise DspattnError(reasons)
    boolean = attn_mask is not None and attn_mask.dtype == torch.bool
    allowed, bias = (attn_mask, None) if boolean else (None, attn_mask)
    options = (
        blocks.block, keep, group, parse_grouping(grouping), is_causal, parse_alignment(alignment), scale,
        not allow_tf32,
    )  # fmt: skip
    query, key, value = (t if t.stride(-1) == 1 else t.contiguous() for t in (query, key, value))
    columns = blocks.columns
    if columns.dim() == 2 and columns.shape[1] == 0:  # nothing is seen
        columns = columns.new_full((columns.shape[0], 1), -1)
    try:
        out: Tensor = _block_attention(query, key, value, blocks.counts, columns, allowed, bias, lengths, *options)[0]
    except RuntimeError as error:
        raise explained(error, {"is_causal": is_causal, "scale": scale}) from None
    return out


@torch.library.register_fake("dspattn::block_attention")
def _block_attention_meta(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    counts: Tensor,
    columns: Tensor,
    allowed: Tensor | None,
    bias: Tensor | None,
    key_lengths: Tensor | None,
    *rest: Any,
) -> tuple[Tensor, Tensor]:
    tensors = {"q": q, "k": k, "v": v, "blocks": counts, "allowed": allowed, "bias": bias, "key_lengths": key_lengths}
    _ops._require_one_device(tensors)
    return q.new_empty((*q.shape[:3], v.shape[3])), q.new_empty(q.shape[:3], dtype=torch.float32)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:8], *output)
    ctx.options = inputs[8:]


def _gradients(ctx: Any, d_out: Tensor, d_lse: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, v, counts, columns, allowed, bias, key_lengths, out, lse = ctx.saved_tensors
    block, keep, group, interleaved, causal, top_left, scale, full_fp32 = ctx.options
    seen = BlockMask(q.shape[2], k.shape[2], block, counts, columns).to_dense()[None, None]
    if allowed is not None:
        seen = seen & allowed
    problem = ProblemArguments(
        q, k, v, seen, bias, key_lengths, keep=keep, group=group, interleaved=interleaved, causal=causal,
        top_left=top_left, scale=scale, full_fp32=full_fp32,
    )  # fmt: skip
    results = BackwardArguments(d_out.contiguous(), out, lse, d_lse, False, False)
    d_q, d_k, d_v, *_ = _ops.attention_backward(*results, *problem)
    return d_q, d_k, d_v, *(None,) * (5 + len(ctx.options))


register_gradient(_block_attention, _gradients, _save)
