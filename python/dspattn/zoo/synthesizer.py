"""Synthesizer: weights that no key has part in, made from the query alone or learnt outright (Tay et al. 2020)."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from ..errors import DspattnError
from .mechanism import Mechanism, Stages, pair_mask, product, require_positive, softmax

Kind = Literal["factorized_random", "random", "dense"]


class Synthesizer(Mechanism):
    """``random``: a learnt n x n matrix per head; ``factorized_random``: the product of n x rank and rank x n;
    ``dense``: W₂ relu(W₁ q), from the query of each position. ``k`` is not looked at, nor ``q`` by the random kinds.

    The kinds are its own definitions; it approximates nothing."""

    name = "synthesizer"
    cost = "n² d"
    memory = "n²"
    defaults = "Long Range Arena's text_classification/synthesizer_base (factorized_random, rank 32)"
    masks = frozenset({"key", "pair", "causal"})
    unused = ("k", "q (random kinds)")

    def __init__(self, heads: int, head_dim: int, n: int, *, kind: Kind = "factorized_random", rank: int = 32) -> None:
        super().__init__(heads, head_dim, n)
        require_positive(rank=rank)
        if kind not in get_args(Kind):
            raise DspattnError([f"kind: expected one of {', '.join(get_args(Kind))}, got {kind!r}"])
        self.kind = kind
        shapes = {
            "random": [(heads, n, n)],
            "factorized_random": [(heads, n, rank), (heads, rank, n)],
            "dense": [(heads, head_dim, head_dim), (heads, head_dim, n)],
        }[kind]
        self.factors = torch.nn.ParameterList(torch.nn.Parameter(torch.empty(shape)) for shape in shapes)
        for factor in self.factors:
            torch.nn.init.xavier_uniform_(factor)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool) -> Tensor:
        with Stages.observe("scores"):
            made = self._scores(q)
        allowed = pair_mask(self.n, mask, is_causal, q.device)
        return product(softmax(made, allowed), v)

    def _scores(self, q: Tensor) -> Tensor:
        factors = [factor.to(q.dtype) for factor in self.factors]
        if self.kind == "random":
            return factors[0].unsqueeze(0)
        if self.kind == "factorized_random":
            return (factors[0] @ factors[1]).unsqueeze(0)
        return (q @ factors[0]).relu() @ factors[1]
