"""Attention over sequences that are cut along their length over the ranks of a process group.

Pruning is local to blocks of 128 keys, so a sequence cut at multiples of 128 computes the function of one process.

* :func:`shard`, :func:`unshard`: cut tensors, join them; :func:`shard_labels` and :func:`position_ids` for training.
* :func:`attention`, :func:`varlen_attention`: on pieces, by ``"ring"`` or ``"all_to_all"``; with gradients.
* :class:`context`: a block inside which ``dspattn.attention`` and Hugging Face models run on pieces, unchanged.
* :func:`layout_of`: who holds which rows.
"""

from __future__ import annotations

from .attention import attention, varlen_attention
from .context import context
from .layout import Chunk, Layout, layout_of
from .sharding import position_ids, shard, shard_labels, unshard

__all__ = [
    "Chunk",
    "Layout",
    "attention",
    "context",
    "layout_of",
    "position_ids",
    "shard",
    "shard_labels",
    "unshard",
    "varlen_attention",
]
