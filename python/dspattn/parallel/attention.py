"""``dspattn.parallel.attention`` and ``varlen_attention``: the package's functions on pieces of longer sequences."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NoReturn

import torch
from torch import Tensor

from .._flags import as_flags, refuse_flags
from .._inputs import (
    Alignment,
    Window,
    lengths_as_int32,
    parse_alignment,
    parse_window,
    require_kinds,
    require_known,
    wants_fp32,
)
from ..errors import DspattnError
from ..patterns import Grouping, Rest, Selection, group_period, parse_grouping, parse_pattern, parse_rest
from .call import Call, Masks, Plan, Rule, repeatable, require_served
from .heads import Heads, repeats_heads
from .layout import Layout, layout_of
from .ring import Ring
from .sharding import brief, check_rows, read_lengths, require_pieces, resolve
from .transfers import Ranks

Method = Literal["ring", "all_to_all"]
METHODS: dict[str, Any] = {"ring": Ring, "all_to_all": Heads}
FARTHEST = 2**39  # of an offset, in the C++ library


@dataclass(frozen=True)
class Request:
    """One rank's call, as far as the rank can tell by itself that it can be served."""

    tensors: tuple[Tensor, Tensor, Tensor]  # [batch, heads, rows, d]
    rule: Rule
    masks: Masks
    pattern: str
    grouping: str
    layout: Layout | None
    out_dtype: torch.dtype | None
    cu_seqlens: tuple[int, ...] | None = None  # of a packed batch


@torch.compiler.disable
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    group: Any = None,
    method: Method = "ring",
    layout: Layout | None = None,
    pattern: str = "2:4",
    grouping: Grouping = "interleaved",
    rest: Rest = "drop",
    selection: Selection = "own",
    return_lse: bool = False,
    attn_bias: Tensor | None = None,
    window: Window = None,
    alignment: Alignment = "top_left",
    offset: int = 0,
    key_lengths: Tensor | None = None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
    allow_tf32: bool = True,
    out_dtype: torch.dtype | None = None,
    kernel: str = "",
) -> Tensor | tuple[Tensor, Tensor]:
    """:func:`dspattn.attention` of a sequence that is cut over the ranks of a process group: each gives its pieces, as
    :func:`shard` cuts them, and gets its rows of the result. The function computed is that of one process.

    Every rank of the group calls it, with the same arguments but for the pieces. Differentiable; the gradients of the
    pieces are complete.

    Args:
        query: this rank's ``[..., heads, rows, d]``, four dimensions or three.
        key: this rank's ``[..., kv_heads, rows, d]``. Keys may be more or fewer than queries; both are cut alike.
        value: this rank's ``[..., kv_heads, rows, d_v]``.
        attn_mask: boolean or additive, this rank's rows (or 1) by *all* keys (or 1), in the order of the sequence.
        attn_bias: likewise, beside a boolean ``attn_mask``.
        key_lengths: ``[batch]``: keys of the whole sequence that count.
        group: a process group, a ``DeviceMesh`` of one dimension, or None for the default group.
        method: ``"ring"`` sends keys and values around; ``"all_to_all"`` exchanges heads for rows.
        layout: how the queries were cut, where not as :func:`shard` does by default; the keys are cut by its rule.

    The other arguments are those of :func:`dspattn.attention` and speak of the whole sequence; ``selection`` is
    ``"own"``, and there are neither dropout nor sinks. ``rest="mean"`` has no gradients.

    Raises:
        DspattnError: on every rank, where a rank's arguments cannot be served or differ from the others'; where a
            transfer fails, on each rank that sees it fail, at the latest after the group's timeout.
    """

    def request() -> Request:
        _require_parts(selection, dropout_p, sinks)
        causal, gqa, _, tf32 = as_flags(
            is_causal=is_causal, enable_gqa=enable_gqa, return_lse=return_lse, allow_tf32=allow_tf32
        )
        tensors = []
        for name, tensor in (("query", query), ("key", key), ("value", value)):
            require_known(name, tensor)
            if tensor.dim() not in (3, 4) or tensor.dim() != query.dim():
                raise DspattnError(
                    [f"{name}: expected [batch, heads, rows, d] or three dimensions, got {list(tensor.shape)}"]
                )
            tensors.append(tensor if tensor.dim() == 4 else tensor.unsqueeze(0))
        if not gqa and query.shape[-3] != key.shape[-3]:
            heads = f"{query.shape[-3]} heads of the query and {key.shape[-3]} of the key"
            raise DspattnError([f"enable_gqa: expected True for {heads}, got False"])
        rule = _rule(
            pattern, grouping, rest, causal, parse_alignment(alignment), window, scale, tf32, kernel, offset, soft_cap
        )
        allowed, bias = _masks(attn_mask, attn_bias)
        if rule.rest_mean and any(mask is not None and mask.shape[2] > 1 for mask in (allowed, bias)):
            raise DspattnError(['attn_mask: expected one row for rest="mean", which serves every query, got several'])
        lengths = None if key_lengths is None else lengths_as_int32("key_lengths", key_lengths)
        masks = Masks(allowed, bias, lengths)
        return Request((tensors[0], tensors[1], tensors[2]), rule, masks, pattern, grouping, layout, out_dtype)

    out, lse = run(request, group, method, query)
    if query.dim() == 3:
        out, lse = out.squeeze(0), lse.squeeze(0)
    return (out, lse) if return_lse else out


@torch.compiler.disable
def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Tensor | Sequence[int],
    *,
    group: Any = None,
    method: Method = "ring",
    layout: Layout | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    pattern: str = "2:4",
    grouping: Grouping = "interleaved",
    rest: Rest = "drop",
    selection: Selection = "own",
    return_lse: bool = False,
    window: Window = None,
    offset: int = 0,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
    allow_tf32: bool = True,
    out_dtype: torch.dtype | None = None,
    kernel: str = "",
) -> Tensor | tuple[Tensor, Tensor]:
    """:func:`dspattn.varlen_attention` of a packed batch that is cut over ranks, sequence by sequence.

    Args:
        query: this rank's ``[rows, heads, d]``, as ``shard(x, 0, cu_seqlens=cu_seqlens)`` cuts them.
        key: this rank's ``[rows, kv_heads, d]``.
        value: this rank's ``[rows, kv_heads, d_v]``.
        cu_seqlens: of the *whole* batch, where each sequence starts, and the end; the same on every rank.

    The other arguments are those of :func:`attention`; queries and keys are of the same sequences.

    Returns:
        ``[rows, heads, d_v]`` and, with ``return_lse``, float32 ``[heads, rows]``.
    """

    options: dict[str, Any] = {
        "layout": layout, "dropout_p": dropout_p, "is_causal": is_causal, "scale": scale, "pattern": pattern,
        "grouping": grouping, "rest": rest, "selection": selection, "return_lse": return_lse, "window": window,
        "offset": offset, "soft_cap": soft_cap, "sinks": sinks, "allow_tf32": allow_tf32, "out_dtype": out_dtype,
        "kernel": kernel,
    }  # fmt: skip
    out, lse = run(lambda: packed_request(query, key, value, cu_seqlens, **options), group, method, query)
    out = out.squeeze(0).transpose(0, 1)
    return (out, lse.squeeze(0)) if return_lse else out


def packed_request(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Tensor | Sequence[int],
    *,
    layout: Layout | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    pattern: str,
    grouping: Grouping,
    rest: Rest,
    selection: Selection,
    return_lse: bool,
    window: Window,
    offset: int,
    soft_cap: float | None,
    sinks: Tensor | None,
    allow_tf32: bool,
    out_dtype: torch.dtype | None,
    kernel: str,
) -> Request:
    """What a rank makes of the arguments of varlen_attention."""
    _require_parts(selection, dropout_p, sinks)
    read_lengths(cu_seqlens)
    causal, _, tf32 = as_flags(is_causal=is_causal, return_lse=return_lse, allow_tf32=allow_tf32)
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        require_known(name, tensor)
        if tensor.dim() != 3:
            raise DspattnError([f"{name}: expected 3 dimensions [rows, heads, d], got {list(tensor.shape)}"])
    rule = _rule(pattern, grouping, rest, causal, True, window, scale, tf32, kernel, offset, soft_cap)
    q, k, v = (t.unsqueeze(0).transpose(1, 2) for t in (query, key, value))
    given = tuple(read_lengths(cu_seqlens))
    return Request((q, k, v), rule, Masks(), pattern, grouping, layout, out_dtype, given)


def _rule(
    pattern: str,
    grouping: str,
    rest: str,
    causal: bool,
    top_left: bool,
    window: Window,
    scale: float | None,
    tf32: bool,
    kernel: str,
    offset: int,
    soft_cap: float | None,
) -> Rule:
    numbers: dict[str, Any] = {"scale": scale, "offset": offset, "soft_cap": soft_cap}
    refuse_flags(**numbers)
    require_kinds({**numbers, "kernel": kernel})
    left, right = parse_window(window)
    return Rule(
        *parse_pattern(pattern), parse_grouping(grouping), causal, top_left, left, right, scale, not tf32, kernel,
        offset, soft_cap, parse_rest(rest) and pattern != "dense",
    )  # fmt: skip


def _require_parts(selection: str, dropout_p: float, sinks: Tensor | None) -> None:
    """Raise for what a rank cannot compute from a part of the keys."""
    refuse_flags(dropout_p=dropout_p)
    require_kinds({"dropout_p": dropout_p})
    reasons = []
    if dropout_p != 0.0:
        reasons.append(f"dropout_p: expected 0 for a sequence cut over ranks, got {dropout_p}")
    if sinks is not None:
        reasons.append("sinks: expected None for a sequence cut over ranks (every part would count them), got some")
    if not isinstance(selection, str) or selection != "own":
        reasons.append(
            f'selection: expected "own" for a sequence cut over ranks (others ask for whole rows), got {selection!r}'
        )
    if reasons:
        raise DspattnError(reasons)


CALL = "attention"  # by which ranks know that they are in the same one


def refuse(group: Any, error: DspattnError) -> NoReturn:
    """Take part in the comparison that the other ranks' next call of attention begins with, and raise there."""
    Ranks(group).agree(CALL, error, {})
    raise AssertionError("unreachable: ranks agree on no call that one refuses")


def run(request: Callable[[], Request], group: Any, method: Any, query: Any) -> tuple[Tensor, Tensor]:
    """Checks on this rank, agrees with the others, runs.

    Whatever can be wrong on one rank alone is found inside ``request()`` and the block around it: raised elsewhere it
    would leave the other ranks waiting. What is checked after the agreement follows from what all ranks have alike.
    """
    ranks = Ranks(group)
    error: Exception | None = None
    rows = [0, 0, -1, -1]  # of queries, keys, the boolean mask and the bias
    found: dict[str, Any] = {}
    try:
        if not isinstance(method, str) or method not in METHODS:
            raise DspattnError([f'method: expected "ring" or "all_to_all", got {method!r}'])
        asked = request()
        named = dict(zip(("query", "key", "value"), asked.tensors, strict=True))
        require_pieces(named)
        q, k, v = _autocast(asked.tensors)
        rule, masks = asked.rule, asked.masks
        _check_pieces(q, k, v)
        dtype = torch.float32 if asked.out_dtype is not None and wants_fp32(q, asked.out_dtype) else q.dtype
        # A ring merges parts in fp32; where heads are exchanged, only sums over ranks are.
        fp32 = method == "ring" or dtype == torch.float32
        wide = fp32 or repeats_heads(q.shape[1], k.shape[1], ranks.world)
        wanted = torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v))
        plan = Plan(fp32, wide, wanted and not rule.rest_mean, method == "ring")
        rule = repeatable(rule, plan, q)
        require_served(rule, masks, (q, k, v), asked.cu_seqlens is not None, plan)
        period = group_period(asked.pattern, asked.grouping)
        found = {
            "query.shape": [*q.shape[:2], q.shape[3]],
            "key.shape": [*k.shape[:2], k.shape[3]],
            "value.shape": [*v.shape[:2], v.shape[3]],
            "query.dtype": q.dtype,
            "query.device": ranks.route(q),
            "out_dtype": dtype,
            "method": method,
            "rule": rule,
            "requires_grad": wanted,
            "masks": [_kind(mask) for mask in (masks.allowed, masks.bias, masks.key_lengths)],
            "key_lengths": _readable(masks.key_lengths),
            "cu_seqlens": asked.cu_seqlens,
            "layout": brief(asked.layout),
        }
        rows = [q.shape[2], k.shape[2], *(-1 if t is None else t.shape[2] for t in (masks.allowed, masks.bias))]
    except Exception as refusal:  # whatever it is, the other ranks wait for this one
        error = refusal
    every = ranks.agree(CALL, error, found, rows, query.device if isinstance(query, Tensor) else None)
    queries, keys = _layouts(ranks, every, asked)
    if ranks.world > 1 and keys.block % period != 0:
        pattern = f"{asked.pattern} {asked.grouping}"
        raise DspattnError([f"layout: expected a block that is a multiple of {period} for {pattern}, got {keys.block}"])
    reach = FARTHEST - max((*queries.lengths, *keys.lengths), default=0)  # pieces have offsets of their own
    if abs(rule.offset) > reach:
        raise DspattnError([f"offset: expected from {-reach} to {reach} for rows cut over ranks, got {rule.offset}"])
    masks = replace(masks, own_rows=(_own_rows(every, 2), _own_rows(every, 3)))
    call = Call(ranks, queries, keys, rule, masks)
    _check_masks(call, q)
    out, lse = METHODS[method].apply(call, dtype, *(_rows(t) for t in (q, k, v)))
    return out, lse


def _layouts(ranks: Ranks, rows: Tensor, asked: Request) -> tuple[Layout, Layout]:
    """How queries and keys are cut, of the rows that each rank has of both."""
    total_q, total_k = rows[:, :2].sum(0).tolist()
    queries = keys = resolve(ranks, total_q, asked.cu_seqlens, asked.layout)
    if asked.cu_seqlens is None:
        keys = layout_of(total_k, ranks.world, block=queries.block, balanced=queries.balanced)
    check_rows("query", rows[:, 0].tolist(), queries)
    check_rows("key", rows[:, 1].tolist(), keys)
    return queries, keys


def _autocast(tensors: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Under autocast, the types that dspattn.attention would compute in."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    q, k, v = (t.to(dtype) for t in tensors)
    return q, k, v


def _kind(mask: Tensor | None) -> list[Any] | None:
    """What ranks must have alike of a mask tensor: all but its rows."""
    if mask is None:
        return None
    return [mask.dtype, [extent for dim, extent in enumerate(mask.shape) if dim != 2]]


def _own_rows(every: Tensor, column: int) -> bool:
    """Whether a mask has a row for each query, of the rows of every rank's queries and masks."""
    queries, masks = every[:, 0].tolist(), every[:, column].tolist()
    if masks == queries:
        return True
    if any(rows not in (1, -1) for rows in masks):
        raise DspattnError([f"attn_mask: expected each rank's own rows {queries}, or 1 everywhere, got {masks}"])
    return False


def _readable(lengths: Tensor | None) -> list[int] | None:
    """Lengths that can be compared without waiting for a device."""
    return lengths.tolist() if lengths is not None and lengths.is_cpu else None


def _rows(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _check_pieces(q: Tensor, k: Tensor, v: Tensor) -> None:
    """What the operator would say on ranks that reach it, said on all before anything travels."""
    reasons = []
    if k.shape[0] != q.shape[0] or v.shape[0] != q.shape[0]:
        reasons.append(f"key, value: expected query's batch of {q.shape[0]}, got {k.shape[0]} and {v.shape[0]}")
    if k.shape[1] == 0 or q.shape[1] % max(1, k.shape[1]) != 0:
        reasons.append(f"query: expected heads a multiple of key's {k.shape[1]}, got {q.shape[1]}")
    if k.shape[1:3] != v.shape[1:3]:
        reasons.append(f"value: expected key's heads and rows {list(k.shape[1:3])}, got {list(v.shape[1:3])}")
    if q.shape[3] != k.shape[3]:
        reasons.append(f"key: expected query's d = {q.shape[3]}, got {k.shape[3]}")
    for name, tensor in (("query", q), ("key", k), ("value", v)):
        if tensor.dtype != q.dtype or tensor.dtype not in (torch.float32, torch.float16, torch.bfloat16):
            reasons.append(f"{name}.dtype: expected float32, float16 or bfloat16 as query's, got {tensor.dtype}")
        if tensor.device != q.device:
            reasons.append(f"{name}: expected query's device {q.device}, got {tensor.device}")
    if reasons:
        raise DspattnError(reasons)


def _masks(attn_mask: Tensor | None, attn_bias: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """(boolean, additive), each with four dimensions."""
    allowed: Tensor | None = None
    bias: Tensor | None = None
    for name, mask in (("attn_mask", attn_mask), ("attn_bias", attn_bias)):
        if mask is None:
            continue
        require_known(name, mask)
        if mask.dim() > 4:
            raise DspattnError([f"{name}: expected at most 4 dimensions, got {list(mask.shape)}"])
        if mask.requires_grad and torch.is_grad_enabled():
            raise DspattnError([f"{name}: expected requires_grad=False (its gradient is not computed)"])
        while mask.dim() < 4:
            mask = mask.unsqueeze(0)
        if mask.dtype == torch.bool and name == "attn_mask":
            allowed = mask
        elif mask.is_floating_point():
            bias = mask if bias is None else bias + mask
        else:
            raise DspattnError([f"{name}.dtype: expected a mask or a bias, got {mask.dtype}"])
    return allowed, bias


def _check_masks(call: Call, q: Tensor) -> None:
    """The other extents of mask tensors, which the ranks have alike: all find the same."""
    full = (q.shape[0], q.shape[1], q.shape[2], call.keys.total)
    for mask in (call.masks.allowed, call.masks.bias):
        if mask is not None and any(mask.shape[i] not in (1, full[i]) for i in (0, 1, 3)):
            raise DspattnError(
                [f"attn_mask: expected this rank's rows by all keys, {list(full)} or 1, got {list(mask.shape)}"]
            )
    lengths = call.masks.key_lengths
    if lengths is not None and list(lengths.shape) != [q.shape[0]]:
        raise DspattnError([f"key_lengths: expected [{q.shape[0]}], got {list(lengths.shape)}"])
    total = call.keys.total
    reasons = [
        f"key_lengths[{i}]: expected a length from 0 to the sequence's keys, {total}, got {length}"
        for i, length in enumerate(_readable(lengths) or [])
        if not 0 <= length <= total
    ]
    if reasons:
        raise DspattnError(reasons)
