"""Attention functions for Hugging Face transformers (5.x), by name:

    model.set_attn_implementation("dspattn_2_4")

Names are ``dspattn_N_M`` for the interleaved grouping, ``dspattn_N_M_consecutive`` for the paper's, each with ``_mean``
behind it for ``rest="mean"``, and ``dspattn_dense``. They are registered with ``AttentionInterface`` and, with the mask
function that goes with them, with ``AttentionMaskInterface``, when both packages are imported, in either order.

Padded batches, causal models with a cache and generation, grouped-query attention, sliding windows, relative position
biases, soft caps (``softcap``), attention sinks (``s_aux``) and dropout in training are served. A cache that drops keys
outside a sliding window does not change the result: groups are counted from key 0 of the sequence, so the mask function
says how far the kept keys are from a group's start.
What a model passes that has no counterpart here raises.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .. import _qkv
from .._flags import as_flag
from .._running import stand_in, stand_ins
from ..errors import DspattnError
from ..functional import attention, varlen_attention
from ..patterns import INTERLEAVE_BLOCK, Grouping, Rest, Selection, group_period, parse_rest, parse_selection
from ..plans import Plan, by_heads
from ..weights import attention_weights
from . import _bands, _cache_sums, _refusal

PATTERNS = ("2:4", "1:2", "1:4", "4:8")
GROUPINGS: tuple[Grouping, ...] = ("interleaved", "consecutive")
RESTS: tuple[Rest, ...] = ("drop", "mean")

# What models hand down to every layer that changes nothing in attention itself, or that the mask already expresses.
HARMLESS = frozenset(
    {
        "cache_position",
        "deterministic",
        "grid_thw",
        "input_ids",
        "logits_to_keep",
        "num_items_in_batch",
        "output_hidden_states",
        "output_router_logits",
        "position_ids",
        "return_dict",
        "seq_idx",
        "shift_labels",
        "use_cache",
    }
)


def implementation_name(
    pattern: str, grouping: Grouping = "interleaved", rest: Rest = "drop", selection: Selection = "own"
) -> str:
    """The name under which a pattern is registered.

    Example:
        >>> implementation_name("2:4"), implementation_name("1:2", "consecutive"), implementation_name("dense")
        ('dspattn_2_4', 'dspattn_1_2_consecutive', 'dspattn_dense')
        >>> implementation_name("2:4", rest="mean")
        'dspattn_2_4_mean'
    """
    parts = ["dspattn", pattern.replace(":", "_")]
    if pattern != "dense":
        parts += ["consecutive"] * (grouping == "consecutive") + ["mean"] * (rest == "mean")
        parts += ["shared"] * (selection == "shared")
    return "_".join(parts)


def register() -> None:
    """Register every name. Runs by itself when transformers is imported; safe to call again."""
    from transformers import PreTrainedModel

    _refusal.install(PreTrainedModel)
    _cache_sums.install()
    register_pattern("dense")
    for pattern in PATTERNS:
        for grouping in GROUPINGS:
            for rest in RESTS:
                register_pattern(pattern, grouping, rest=rest)


def register_pattern(
    pattern: str,
    grouping: Grouping = "interleaved",
    *,
    rest: Rest = "drop",
    selection: Selection = "own",
    left_padding: bool = False,
) -> str:
    """Register one pattern, also one that has no name yet, and return its name.

    Args:
        pattern: ``"N:M"`` or ``"dense"``.
        grouping: ``"interleaved"`` or ``"consecutive"``.
        rest: ``"drop"`` or ``"mean"``, as in :func:`dspattn.attention`; under the name with ``_mean`` behind it.
        selection: ``"own"`` or ``"shared"``, likewise; the latter with ``_shared`` behind the name.
        left_padding: count groups from each text's first key instead of the padded batch's, so that a left-padded text
            keeps the same keys as alone; under the name with ``_left_padding`` behind it. It costs a copy of the keys
            and values of batches that are padded on the left, and cannot be compiled. Not with ``rest="mean"``.

    Returns:
        What to give to ``set_attn_implementation``.

    Example:
        >>> register_pattern("3:8")
        'dspattn_3_8'
    """
    from transformers.masking_utils import AttentionMaskInterface
    from transformers.modeling_utils import AttentionInterface

    parse_selection(selection)
    left_padding = as_flag("left_padding", left_padding)
    mean = parse_rest(rest) and pattern != "dense"
    if mean and left_padding:
        raise DspattnError(
            ['left_padding: expected False with rest="mean" (each text has a diagonal of its own), got True']
        )
    name = implementation_name(pattern, grouping, rest, selection) + ("_left_padding" if left_padding else "")
    AttentionInterface.register(name, make_attention(pattern, grouping, rest, selection))
    period = group_period(pattern, grouping, rest)
    AttentionMaskInterface.register(name, make_mask(period, left_padding=left_padding, one_row=mean))
    return name


def register_planned(attribute: str, called: Callable[[torch.nn.Module], None], rest: Rest = "drop") -> str:
    """Register the function that computes what each module's own plan says (see :mod:`dspattn.switching`), dense where
    it has none, and return its name.

    Args:
        attribute: where a module keeps its plan.
        called: told about every call under a plan.
        rest: of all plans.
    """
    from transformers.masking_utils import AttentionMaskInterface
    from transformers.modeling_utils import AttentionInterface

    dense = Plan("dense", "interleaved")

    def plan_of(module: torch.nn.Module) -> Plan:
        plan: Plan | None = getattr(module, attribute, None)
        if plan is None:
            return dense
        called(module)
        return plan

    name = _refusal.PREFIX + ("applied_mean" if rest == "mean" else "applied")
    AttentionInterface.register(name, _attention_function(plan_of))
    AttentionMaskInterface.register(name, make_mask(INTERLEAVE_BLOCK, one_row=rest == "mean"))
    return name


def make_mask(period: int, *, left_padding: bool = False, one_row: bool = False) -> Callable[..., Tensor | None]:
    """The mask function: transformers' boolean mask of scaled_dot_product_attention, with the keys that a cache has
    dropped since the last multiple of `period` put back as masked columns.

    With ``left_padding`` each text's columns move on until its first key lies at such a multiple too. How far is kept
    beside the mask, as a tensor, for the attention function; the mask is then one period wider than the keys.
    With ``one_row`` a mask that is a window and padding is one row, and carries the window (see ``_bands``).
    """

    def dspattn_mask(*, kv_offset: int = 0, **kwargs: Any) -> Tensor | None:
        from transformers.masking_utils import sdpa_mask

        if (parallel := stand_in()) is not None:
            reasons = _against_pieces_mask(parallel.cu_seqlens is not None, **kwargs)
            if reasons:
                parallel.refuse(DspattnError(reasons))
            return None
        starts = _first_keys(kwargs.get("attention_mask")) if left_padding and period > 1 else None
        dropped = kv_offset % period
        if one_row:
            _cache_sums.want()
            row = _bands.band_mask(dropped, kv_offset=kv_offset, **kwargs)
            if row is not None:
                return row
        if dropped or starts is not None:
            kwargs.update(allow_is_causal_skip=False, allow_is_bidirectional_skip=False)
        mask = sdpa_mask(kv_offset=kv_offset, **kwargs)
        if mask is None:
            return None
        packed = _bands.packed_window(kv_offset=kv_offset, **kwargs)
        if packed is not None:
            setattr(mask, _bands.PACKED, packed)
        if starts is not None:
            offsets = (dropped - starts) % period
            mask = _moved(torch.nn.functional.pad(mask, (0, period)), offsets)
            mask._dspattn_offsets = offsets  # type: ignore[attr-defined]
        elif dropped:
            mask = torch.nn.functional.pad(mask, (dropped, 0), value=False)
        return mask

    return dspattn_mask


# What mask functions of transformers are made of where is_causal, the window or cu_seqlens say the same.
EXPRESSED = frozenset(
    {
        "add_offsets_to_mask_function",
        "and_masks",
        "bidirectional_mask_function",
        "causal_mask_function",
        "packed_sequence_compatibility_function",
        "packed_sequence_mask_function",
        "remap_positions_for_packed_sequence",
        "sliding_window_bidirectional_overlay",
        "sliding_window_overlay",
    }
)


def _against_pieces_mask(
    packed: bool,
    *,
    q_length: int = 0,
    kv_length: int = 0,
    attention_mask: Tensor | None = None,
    mask_function: Callable[..., Any] | None = None,
    **kwargs: Any,
) -> list[str]:
    """Inside dspattn.parallel.context a mask would be one of this rank's rows alone, and none is made: reasons against
    what is_causal, windows and cu_seqlens do not say."""
    reasons = []
    if attention_mask is not None and not bool(attention_mask.all()):
        reasons.append("attention_mask: expected no padding in a sequence cut over ranks (pack the batch), got some")
    if kv_length != q_length:
        reasons.append(f"past_key_values: expected none in a sequence cut over ranks, got {kv_length - q_length} keys")
    waiting, seen = [mask_function], set()
    while waiting:
        part = waiting.pop()
        if isinstance(part, (list, tuple)):
            waiting += part
        elif callable(part) and id(part) not in seen:
            seen.add(id(part))
            name = getattr(part, "__qualname__", type(part).__name__).split(".")[0]
            if name not in EXPRESSED:
                reasons.append(f"mask_function: expected a causal or full mask, with or without a window, got {name}")
            cells = dict(zip(part.__code__.co_freevars, part.__closure__ or (), strict=True))
            waiting += [cell.cell_contents for cell in cells.values()]
            positions = cells.get("position_ids")
            if positions is not None and not packed and bool((positions.cell_contents.diff(dim=-1) < 0).any()):
                reasons.append(
                    "position_ids: expected those of one sequence (else give context() cu_seqlens), got more"
                )
    return reasons


def _first_keys(padding: Tensor | None) -> Tensor | None:
    """Where each text of a batch begins, [batch]; None when all begin at 0."""
    if padding is None or torch.compiler.is_compiling():
        return None
    starts = padding.to(torch.bool).int().argmax(-1)
    return starts if bool(starts.any()) else None


def _moved(tensor: Tensor, offsets: Tensor) -> Tensor:
    """Every batch item's last dimension, cyclically moved to the right by its offset."""
    columns = torch.arange(tensor.shape[-1], device=tensor.device) - offsets.to(tensor.device).unsqueeze(-1)
    columns = (columns % tensor.shape[-1])[:, None, None, :]
    return tensor.gather(-1, columns.expand(tensor.shape))


def _moved_rows(tensor: Tensor, offsets: Tensor, period: int) -> Tensor:
    """Keys or values [batch, heads, n, d] with each batch item's rows moved on by its offset, zeros around them."""
    padded = torch.nn.functional.pad(tensor, (0, 0, 0, period))
    return _moved(padded.transpose(-1, -2), offsets).transpose(-1, -2)


def make_attention(
    pattern: str, grouping: Grouping, rest: Rest = "drop", selection: Selection = "own"
) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """The attention function of a pattern, in the signature transformers asks for."""
    plan = Plan(pattern, grouping, None, rest, selection)
    return _attention_function(lambda module: plan)


def _attention_function(
    plan_of: Callable[[torch.nn.Module], Plan],
) -> Callable[..., tuple[Tensor, Tensor | None]]:
    from transformers.utils import output_capturing

    collector = output_capturing._active_collector

    def dspattn_attention(
        module: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        is_causal: bool | None = None,
        position_bias: Tensor | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        cu_seq_lens_q: Tensor | None = None,
        cu_seq_lens_k: Tensor | None = None,
        max_length_q: int | None = None,
        max_length_k: int | None = None,
        output_attentions: bool | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        if kwargs:
            raise_unknown(kwargs)
        plan = plan_of(module)
        if is_causal is None:
            is_causal = getattr(module, "is_causal", True)
        wants_weights = bool(output_attentions) or _weights_are_recorded(collector)
        n_q, n_k = query.shape[2], key.shape[2]
        plain = position_bias is None and plan.heads is None and not wants_weights
        packed_window: _bands.Window | None = None
        if attention_mask is not None and cu_seq_lens_q is not None and cu_seq_lens_k is not None:
            packed_window = _bands.window_within(attention_mask)
            if packed_window is None:
                raise DspattnError([_MASK_BESIDE_LENGTHS])
            attention_mask, is_causal = None, packed_window[1] == 0
        if attention_mask is None and cu_seq_lens_q is not None and cu_seq_lens_k is not None:
            if not plain:
                raise DspattnError(
                    ["cu_seq_lens_q: expected no position_bias, no output_attentions and no choice of heads beside it"]
                )
            q, k, v = (t.transpose(1, 2).flatten(0, 1) for t in (query, key, value))
            packed = varlen_attention(
                q,
                k,
                v,
                cu_seq_lens_q,
                cu_seq_lens_k,
                max_length_q,
                max_length_k,
                dropout_p=dropout,
                is_causal=is_causal,
                scale=scaling,
                soft_cap=softcap,
                sinks=s_aux,
                window=_window(sliding_window, is_causal) if packed_window is None else packed_window,
                **plan.options(),
            )
            return packed.unflatten(0, (query.shape[0], n_q)), None

        # Without a mask, one query sees all keys (decoding) and several are causal from key 0 (their length is that of
        # the keys, or a preallocated cache holds nothing past them): both are what transformers means by no mask.
        # A piece of a longer sequence may have one row, too.
        causal = (n_q > 1 or stand_in() is not None) and attention_mask is None and is_causal
        window = _window(sliding_window, is_causal) if causal else None
        undisturbed = plain and dropout == 0 and softcap is None and s_aux is None
        if undisturbed and plan.rest == "mean":
            by_sums = _cache_sums.attention(plan, query, key, value, attention_mask, scaling)
            if by_sums is not None:
                return by_sums, None
        if attention_mask is None and plain:
            # What follows comes to this; said shortly, since a layer of a small model waits for Python.
            if undisturbed:
                short = _joined_heads(query, key, value, plan, causal, scaling, window)
                if short is not None:
                    return short, None
            out = attention(
                query,
                key,
                value,
                dropout_p=dropout,
                is_causal=causal,
                scale=scaling,
                enable_gqa=True,
                window=window,
                soft_cap=softcap,
                sinks=s_aux,
                **plan.options(),
            )
            return out.transpose(1, 2).contiguous(), None
        extra = 0 if attention_mask is None else attention_mask.shape[-1] - n_k
        offsets: Tensor | None = getattr(attention_mask, "_dspattn_offsets", None)
        if offsets is not None:
            key, value = (_moved_rows(t, offsets, extra) for t in (key, value))
            if position_bias is not None:
                bias = torch.nn.functional.pad(position_bias, (0, extra))
                position_bias = _moved(bias.expand(len(offsets), -1, -1, -1), offsets)
        elif extra > 0:
            key, value = (torch.nn.functional.pad(t, (0, 0, extra, 0)) for t in (key, value))
            if position_bias is not None:
                position_bias = torch.nn.functional.pad(position_bias, (extra, 0))
        options: dict[str, Any] = {
            "attn_bias": position_bias,
            "dropout_p": dropout,
            "is_causal": causal,
            "scale": scaling,
            "enable_gqa": True,
            "window": window,
            "soft_cap": softcap,
            "sinks": s_aux,
        }
        band: _bands.Band | None = getattr(attention_mask, _bands.ATTRIBUTE, None)
        if band is not None:
            options |= band.options()
            attention_mask = attention_mask if band.padded else None
        if plan.rest == "mean" and any([t is not None and t.shape[-2] > 1 for t in (attention_mask, position_bias)]):
            raise DspattnError([_MANY_ROWS])
        weights = None
        if not wants_weights:
            out = by_heads(plan, query, key, value, attention_mask, **options)
        else:
            if plan.heads is not None:
                raise DspattnError(["output_attentions: expected False where only some heads are pruned, got True"])
            weights = attention_weights(query, key, attention_mask, **plan.options(), **options)
            if dropout > 0:  # the output belongs to the weights that are returned
                out = weights @ value.repeat_interleave(query.shape[1] // value.shape[1], 1)
            else:
                out = by_heads(plan, query, key, value, attention_mask, **options)
            weights = weights[..., extra:] if offsets is None else _moved(weights, -offsets)[..., :n_k]
        return out.transpose(1, 2).contiguous(), weights

    return dspattn_attention


def _joined_heads(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    plan: Plan,
    causal: Any,
    scaling: Any,
    window: tuple[int, int | None] | None,
) -> Tensor | None:
    """Attention of q, k and v alone, [batch, n_q, heads, d_v] as models join heads; None where dspattn.attention is to
    be asked: for what is not plain, and for the words in which it refuses."""
    if stand_ins or torch.compiler.is_compiling() or type(causal) is not bool:
        return None
    if not (scaling is None or type(scaling) is float):
        return None
    options = (plan.pattern, plan.grouping, plan.rest, plan.selection, "top_left", causal, True, window, True)
    try:
        return _qkv.attention(query, key, value, options, scaling, True)
    except RuntimeError:
        return None


_MASK_BESIDE_LENGTHS = (
    "cu_seq_lens_q: expected none beside an attention_mask of more than packed sequences, or one that compiled code "
    "made (compile the model's layers instead, for layer in model.model.layers: layer.compile()), got both; without it "
    "groups of keys count from the row's first key, not from each sequence's own"
)
_MANY_ROWS = (
    "attention_mask, position_bias: expected a mask that is causal, full or a sliding window, with or without padding, "
    'and no bias of several queries, for rest="mean" (a key that is hidden from some queries only would reach them '
    "through the mean), got others; give packed batches as cu_seq_lens_q and cu_seq_lens_k, and other masks and biases "
    'to a name without "_mean"'
)


def _weights_are_recorded(collector: Any) -> bool:
    """Whether the model was called with output_attentions=True and collects what its attention modules return, which it
    does not tell the attention function."""
    if torch.compiler.is_compiling() and not collector.compiling:  # a part of a model is, whose caller is not
        return _weights_are_recorded_while_tracing()
    collected = collector.get()
    return collected is not None and any("attentions" in key for key in collected)


def _weights_are_recorded_while_tracing() -> bool:
    """What a compiler cannot ask of a context variable. The code it makes keeps the answer, as it does the hooks of the
    modules that record."""
    from transformers.utils import output_capturing

    collected = output_capturing._active_collector.context_var.get()
    return collected is not None and any("attentions" in key for key in collected)


# What torch.compiler.assume_constant_result does, which would load the compiler with the package.
_weights_are_recorded_while_tracing._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _window(sliding_window: int | None, is_causal: bool) -> tuple[int, int | None] | None:
    """transformers counts the query's own position into a causal window, and not into a bidirectional one."""
    if sliding_window is None:
        return None
    return (sliding_window - 1, None) if is_causal else (sliding_window, sliding_window)


def raise_unknown(arguments: dict[str, Any]) -> None:
    """Raise for what a model hands to its attention function that is not served."""
    reasons = [
        f"{name}: expected nothing (dspattn has no counterpart of it), got {_brief(given)}"
        for name, given in arguments.items()
        if given is not None and given is not False and name not in HARMLESS
    ]
    if reasons:
        raise DspattnError(reasons)


def _brief(given: Any) -> str:
    return f"a tensor of shape {list(given.shape)}" if isinstance(given, Tensor) else repr(given)
