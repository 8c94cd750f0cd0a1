"""Linear Transformer: φ(Q) (φ(K)ᵀ V) over its normaliser, φ = elu + 1 (Katharopoulos et al. 2020)."""

from __future__ import annotations

import torch
from torch import Tensor

from .mechanism import Mechanism, Stages, pad_rows, require_positive


def feature_attention(queries: Tensor, keys: Tensor, v: Tensor, is_causal: bool, chunk: int) -> Tensor:
    """queries (keysᵀ v) over queries (keysᵀ 1), for features that are not negative; linear in n.

    The causal form carries keysᵀ v from chunk to chunk and is quadratic within one. A query with no weight gives 0.
    """
    v_and_ones = torch.cat([v, v.new_ones(*v.shape[:-1], 1)], -1)
    with Stages.observe("product"):
        both = (
            _causal(queries, keys, v_and_ones, chunk) if is_causal else queries @ (keys.transpose(-1, -2) @ v_and_ones)
        )
    total = both[..., -1:]
    return torch.where(total > 0, both[..., :-1] / torch.where(total > 0, total, 1.0), 0.0)


def _causal(queries: Tensor, keys: Tensor, v: Tensor, chunk: int) -> Tensor:
    n = queries.shape[2]
    count = -(-n // chunk)
    rows, columns, values = (
        pad_rows(tensor, count * chunk).unflatten(2, (count, chunk)) for tensor in (queries, keys, v)
    )
    states = columns.transpose(-1, -2) @ values
    before = states.cumsum(2) - states
    within = (rows @ columns.transpose(-1, -2)).tril() @ values
    return (rows @ before + within).flatten(2, 3)[:, :, :n]


class LinearTransformer(Mechanism):
    """Equal to its quadratic form, weights φ(q)·φ(k) normalised over each row. ``chunk`` is that of the causal form."""

    name = "linear_transformer"
    cost = "n d²"
    memory = "n d"
    defaults = "φ = elu + 1: Long Range Arena's models/linear_transformer"
    masks = frozenset({"key", "causal"})

    def __init__(self, heads: int, head_dim: int, n: int, *, chunk: int = 64) -> None:
        super().__init__(heads, head_dim, n)
        require_positive(chunk=chunk)
        self.chunk = chunk

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool) -> Tensor:
        queries, keys = (torch.nn.functional.elu(tensor) + 1 for tensor in (q, k))
        if mask is not None:
            keys = keys.masked_fill(~mask.transpose(-1, -2), 0.0)
        return feature_attention(queries, keys, v, is_causal, self.chunk)
