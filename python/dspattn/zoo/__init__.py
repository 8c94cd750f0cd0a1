"""The fifteen attention mechanisms of the paper's comparison, under one interface:

    attention = dspattn.zoo.create("nystromformer", heads=4, head_dim=64, n=4096, landmarks=64)
    out = attention(q, k, v)      # [batch, heads, n, head_dim]

Each is a module in plain batched PyTorch, trainable and taken by ``torch.compile``; defaults follow the public
configurations of Long Range Arena, and ``create(name).defaults`` says where each is from. Four of them take a
``pattern``: their scores are then pruned to N:M by this package's kernels. See docs/comparison.md.
"""

from __future__ import annotations

import inspect
from typing import Any

from ..errors import DspattnError
from .bigbird import BigBird
from .fixed import Fixed
from .full import Full
from .linear_transformer import LinearTransformer
from .linformer import Linformer
from .local import Local
from .longformer import Longformer
from .mechanism import Mechanism, Stages
from .nystromformer import Nystromformer
from .performer import Performer
from .reformer import Reformer
from .routing import Routing
from .sinkhorn import Sinkhorn
from .sparse_transformer import SparseTransformer
from .synthesizer import Synthesizer
from .top_k import TopK

MECHANISMS: dict[str, type[Mechanism]] = {
    kind.name: kind
    for kind in (
        Full, Local, SparseTransformer, Longformer, BigBird, Linformer, Nystromformer, Reformer, Routing, Sinkhorn,
        Synthesizer, LinearTransformer, Performer, TopK, Fixed,
    )
}  # fmt: skip

__all__ = ["MECHANISMS", "Mechanism", "Stages", "create", "names"]


def names() -> list[str]:
    """The mechanisms that :func:`create` makes.

    Example:
        >>> names()[:3]
        ['full', 'local', 'sparse_transformer']
    """
    return list(MECHANISMS)


def create(name: str, *, heads: int, head_dim: int, n: int, **options: Any) -> Mechanism:
    """A mechanism by its name.

    Args:
        name: one of :func:`names`.
        heads: number of heads.
        head_dim: their dimension.
        n: length of the sequences.
        options: the mechanism's own settings; ``help(dspattn.zoo.MECHANISMS[name])`` lists them.

    Example:
        >>> create("linformer", heads=2, head_dim=16, n=128, rows=8).key_projection.shape
        torch.Size([8, 128])
    """
    if name not in MECHANISMS:
        raise DspattnError([f"name: expected one of {', '.join(MECHANISMS)}, got {name!r}"])
    kind: Any = MECHANISMS[name]
    known = set(inspect.signature(kind.__init__).parameters) - {"self", "heads", "head_dim", "n"}
    unknown = sorted(set(options) - known)
    if unknown:
        raise DspattnError(
            [f"{option}: expected one of {name}'s options ({', '.join(sorted(known)) or 'none'})" for option in unknown]
        )
    made: Mechanism = kind(heads, head_dim, n, **options)
    return made
