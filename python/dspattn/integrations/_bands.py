"""Masks of transformers as one row for all queries, and what the diagonal hides beside it.

transformers writes a mask as a row for every query. Where its mask function is causal, full or a sliding window, with
or without padding, the same is said by which keys there are (one row) and a window: what ``rest="mean"`` asks for, as
a key that is hidden from some queries only would reach them through the mean.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

Window = tuple[int | None, int | None]
ATTRIBUTE = "_dspattn_band"  # of a mask of one row
PACKED = "_dspattn_packed"  # of a mask of many rows that says which sequences lie end to end, at most: the window


class Band(NamedTuple):
    """What stands beside a mask of one row, as arguments of :func:`dspattn.attention`."""

    window: Window
    offset: int  # of query 0 among the columns of the mask
    lengths: Tensor | None  # [batch], in place of an offset that only the device knows
    padded: bool  # False: the row hides nothing

    def options(self) -> dict[str, Any]:
        return {"window": self.window, "offset": self.offset, "key_lengths": self.lengths}


def window_of(mask_function: Any, *, packed: bool = False) -> Window | None:
    """How far before and after its own position a query sees by a mask function of transformers, None for no bound;
    None for functions that say anything else, but where `packed` that sequences lie end to end."""
    from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

    if mask_function is causal_mask_function:
        return None, 0
    if mask_function is bidirectional_mask_function:
        return None, None
    if torch.compiler.is_compiling():  # a compiler cannot look into a closure
        return None
    name = getattr(mask_function, "__qualname__", "").split(".")[0]
    code = getattr(mask_function, "__code__", None)
    cells = dict(zip(code.co_freevars, mask_function.__closure__ or (), strict=True)) if code is not None else {}
    if name == "sliding_window_overlay":
        return cells["sliding_window"].cell_contents - 1, None
    if name == "sliding_window_bidirectional_overlay":
        return (cells["sliding_window"].cell_contents,) * 2
    if packed and name == "packed_sequence_mask_function":
        return None, None
    if packed and name in _OF_PACKED:
        return window_of(cells["mask_function"].cell_contents, packed=True)
    if name != "and_masks":
        return None
    left: int | None = None
    right: int | None = None
    for part in cells["mask_functions"].cell_contents:
        window = window_of(part, packed=packed)
        if window is None:
            return None
        left, right = _nearer(left, window[0]), _nearer(right, window[1])
    return left, right


# What a packed batch's mask function is wrapped in.
_OF_PACKED = ("packed_sequence_compatibility_function", "remap_positions_for_packed_sequence")


def packed_window(
    *,
    q_length: int,
    kv_length: int,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: Tensor | None = None,
    **others: Any,
) -> Window | None:
    """The window within each sequence, by the arguments of a mask function of transformers that say no more than that
    and which sequences lie end to end; None where they say anything else."""
    if torch.compiler.is_compiling() or attention_mask is not None or q_length != kv_length or kv_offset != 0:
        return None
    return window_of(mask_function, packed=True)


def window_within(mask: Tensor) -> Window | None:
    """The window within each sequence where lengths beside the mask say all the rest; None: the mask says more."""
    band: Band | None = getattr(mask, ATTRIBUTE, None)
    if band is not None:  # that of the whole row
        return band.window if band.offset == 0 and band.lengths is None and not band.padded else None
    return getattr(mask, PACKED, None)


def _hides_none(keys: Tensor, given: int, end: int, seen_end: int | Tensor | None) -> bool:
    """Whether the window alone hides what these keys, of a mask of `given` columns, hide. Past its last column a mask
    hides every key up to `end`: those of a static cache that are still to come, which the window hides as well."""
    if given >= end:
        return bool(keys.all())
    if seen_end is None:
        return False
    if isinstance(seen_end, Tensor):  # one wait for the device
        return bool(keys.all() & (seen_end.reshape(()).to(keys.device) <= given))
    return seen_end <= given and bool(keys.all())


def _nearer(a: int | None, b: int | None) -> int | None:
    return b if a is None else a if b is None else min(a, b)


def band_mask(
    dropped: int,
    *,
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: Tensor | None = None,
    device: Any = "cpu",
    **others: Any,
) -> Tensor | None:
    """The arguments of a mask function of transformers as one row [batch or 1, 1, 1, dropped + kv_length] that carries
    its :class:`Band`; None where they say more than that.

    Args:
        dropped: columns to put before those of the keys, masked.
    """
    window = window_of(mask_function)
    if window is None:
        return None
    lengths: Tensor | None = None
    # Where the last query's window ends.
    seen_end = None if window[1] is None else q_offset + q_length + window[1]
    if isinstance(q_offset, Tensor):
        # Reading it would wait for the device, and cannot be compiled. One query that sees no later key needs no more
        # than a length.
        if q_length == 1 and window == (None, 0):
            lengths = (q_offset.reshape(1) + (dropped - kv_offset + 1)).to(torch.int32).expand(batch_size)
            window, q_offset = (None, None), 0
        elif torch.compiler.is_compiling():
            return None
        else:
            q_offset = int(q_offset)
    offset = 0 if lengths is not None else q_offset - kv_offset + dropped
    keys: Tensor | None = None
    if attention_mask is not None:
        keys = attention_mask.to(device=device, dtype=torch.bool)
        given = keys.shape[-1]
        keys = keys[:, kv_offset : kv_offset + kv_length]
        hides_none = not torch.compiler.is_compiling() and _hides_none(keys, given, kv_offset + kv_length, seen_end)
        keys = None if hides_none else torch.nn.functional.pad(keys, (0, kv_length - keys.shape[-1]))
    padded = keys is not None or dropped > 0
    if keys is None:
        keys = torch.ones((1, kv_length), dtype=torch.bool, device=device)
    row = torch.nn.functional.pad(keys, (dropped, 0))[:, None, None, :]
    setattr(row, ATTRIBUTE, Band(window, offset, lengths, padded))
    return row
