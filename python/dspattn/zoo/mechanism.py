"""What every mechanism of the zoo is: a module called with q, k, v and an optional mask, and the facts about it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import ClassVar, Literal

import torch
from torch import Tensor

from .._flags import as_flag
from ..errors import DspattnError

# key: True for keys that take part, the same for every query. pair: any boolean [n, n]. causal: keys up to the query's
# own position.
MaskKind = Literal["key", "pair", "causal"]
Stage = Literal["scores", "softmax", "product"]


class Stages:
    """What a measurement puts around the three stages that all mechanisms share; the rest of a call is the
    mechanism's own overhead. ``observe(stage)`` gives the context the stage runs in."""

    @staticmethod
    def observe(stage: Stage) -> AbstractContextManager[None]:
        return nullcontext()


class Mechanism(torch.nn.Module):
    """Base of all mechanisms: self-attention over ``n`` positions, ``heads`` heads of ``head_dim``.

    Subclasses set ``name``, the orders ``cost`` and ``memory`` in n, ``defaults`` (where the default settings are
    from), ``masks`` (the kinds they define) and ``unused`` (inputs that the mechanism has no use for), and implement
    ``attend``.
    """

    name: ClassVar[str]
    cost: ClassVar[str]
    memory: ClassVar[str]
    defaults: ClassVar[str]
    masks: ClassVar[frozenset[MaskKind]]
    unused: ClassVar[tuple[str, ...]] = ()

    def __init__(self, heads: int, head_dim: int, n: int) -> None:
        super().__init__()
        require_positive(heads=heads, head_dim=head_dim, n=n)
        self.heads, self.head_dim, self.n = heads, head_dim, n
        self.scale = head_dim**-0.5

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, *, is_causal: bool = False
    ) -> Tensor:
        """The mechanism's output.

        Args:
            q: ``[batch, heads, n, head_dim]``.
            k: the same shape.
            v: the same shape.
            mask: boolean, True where a key takes part: ``[batch or 1, heads or 1, 1, n]`` for keys, ``[..., n, n]``
                for pairs, where the mechanism defines it.
            is_causal: a query sees keys up to its own position, where the mechanism defines it.

        Returns:
            ``[batch, heads, n, head_dim]``; a query that sees no key gives 0.
        """
        is_causal = as_flag("is_causal", is_causal)
        self._check(q, k, v, mask, is_causal)
        return self.attend(q, k, v, mask, is_causal)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool) -> Tensor:
        """The mechanism itself, on arguments already checked."""
        raise NotImplementedError

    def extra_repr(self) -> str:
        return f"{self.name}: heads={self.heads}, head_dim={self.head_dim}, n={self.n}"

    def _check(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool) -> None:
        named = {"q": q, "k": k, "v": v} | ({} if mask is None else {"mask": mask})
        reasons = [
            f"{name}: expected a tensor, got {type(given).__name__}"
            for name, given in named.items()
            if not isinstance(given, Tensor)
        ]
        if reasons:
            raise DspattnError(reasons)
        wanted = (self.heads, self.n, self.head_dim)
        for name, tensor in (("q", q), ("k", k), ("v", v)):
            if tensor.dim() != 4 or tuple(tensor.shape[1:]) != wanted:
                reasons.append(f"{name}: expected [batch, {', '.join(map(str, wanted))}], got {list(tensor.shape)}")
            elif tensor.shape[0] != q.shape[0]:
                reasons.append(f"{name}: expected the batch of q, {q.shape[0]}, got {tensor.shape[0]}")
        if mask is not None:
            reasons += self._mask_reasons(q, mask)
        if is_causal and "causal" not in self.masks:
            reasons.append(f"is_causal: expected False, since {self.name} has no causal form here, got True")
        if reasons:
            raise DspattnError(reasons)

    def _mask_reasons(self, q: Tensor, mask: Tensor) -> list[str]:
        if mask.dtype != torch.bool or mask.dim() != 4:
            return [f"mask: expected a boolean tensor of 4 dimensions, got {mask.dtype} {list(mask.shape)}"]
        pairs = mask.shape[2] != 1
        kind: MaskKind = "pair" if pairs else "key"
        fits = (
            mask.shape[0] in (1, q.shape[0])
            and mask.shape[1] in (1, self.heads)
            and mask.shape[2] in (1, self.n)
            and mask.shape[3] == self.n
        )
        if not fits:
            return [
                f"mask: expected [{q.shape[0]} or 1, {self.heads} or 1, 1 or {self.n}, {self.n}], "
                f"got {list(mask.shape)}"
            ]
        if kind not in self.masks:
            defined = "a mask of keys [batch, heads, 1, n]" if "key" in self.masks else "none"
            return [f"mask: expected {defined}, the only kind {self.name} defines, got {list(mask.shape)}"]
        return []


def seeded(seed: int) -> torch.Generator:
    """A generator of random numbers on the CPU."""
    if not isinstance(seed, int) or isinstance(seed, bool) or not -(2**63) <= seed < 2**63:
        raise DspattnError([f"seed: expected a 64-bit integer, got {seed!r}"])
    return torch.Generator().manual_seed(seed)


def draw(generator: torch.Generator, *shape: int) -> Tensor:
    """Normal numbers, the same for a seed whatever PyTorch's default device and type are."""
    return torch.randn(shape, generator=generator, dtype=torch.float32, device=generator.device)


def require_positive(**values: int) -> None:
    """Raises for each value that is not a whole number of at least 1."""
    reasons = [
        f"{name}: expected a whole number >= 1, got {value!r}"
        for name, value in values.items()
        if not isinstance(value, int) or isinstance(value, bool) or value < 1
    ]
    if reasons:
        raise DspattnError(reasons)


def require_number(name: str, value: float, expected: str, fits: Callable[[float], bool]) -> None:
    """Raises unless the value is a number, no flag, that fits."""
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not fits(value):
        raise DspattnError([f"{name}: expected {expected}, got {value!r}"])


def require_not_negative(**values: int) -> None:
    """Raises for each value that is not a whole number of at least 0."""
    reasons = [
        f"{name}: expected a whole number >= 0, got {value!r}"
        for name, value in values.items()
        if not isinstance(value, int) or isinstance(value, bool) or value < 0
    ]
    if reasons:
        raise DspattnError(reasons)


def scores(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """``scale * q k^T`` over the last two dimensions."""
    with Stages.observe("scores"):
        return (q * scale) @ k.transpose(-1, -2)


def softmax(values: Tensor, allowed: Tensor | None = None) -> Tensor:
    """Softmax over the last dimension; 0 where not allowed, and in rows with nothing allowed."""
    with Stages.observe("softmax"):
        if allowed is None:
            return values.softmax(-1)
        # The second fill turns rows with nothing allowed, NaN after the softmax, into zeros with zero gradients.
        return values.masked_fill(~allowed, float("-inf")).softmax(-1).masked_fill(~allowed, 0.0)


def product(weights: Tensor, v: Tensor) -> Tensor:
    """``weights v`` over the last two dimensions."""
    with Stages.observe("product"):
        return weights @ v


def dense_attention(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor | None, scale: float) -> Tensor:
    """softmax(scale q k^T) v over what is allowed."""
    return product(softmax(scores(q, k, scale), allowed), v)


def causal_mask(n: int, device: torch.device) -> Tensor:
    """Boolean [n, n], True up to the diagonal."""
    return torch.ones(n, n, dtype=torch.bool, device=device).tril()


def pair_mask(n: int, mask: Tensor | None, is_causal: bool, device: torch.device) -> Tensor | None:
    """The mask and causality as one boolean tensor that broadcasts to [batch, heads, n, n]; None for neither."""
    if not is_causal:
        return mask
    causal = causal_mask(n, device)
    return causal if mask is None else mask & causal


def pad_rows(tensor: Tensor, rows: int) -> Tensor:
    """Zero rows appended until dimension -2 has ``rows``."""
    missing = rows - tensor.shape[-2]
    return torch.nn.functional.pad(tensor, (0, 0, 0, missing)) if missing else tensor


def pad_keys(mask: Tensor, keys: int) -> Tensor:
    """False appended until dimension -1 has ``keys``."""
    missing = keys - mask.shape[-1]
    return torch.nn.functional.pad(mask, (0, missing), value=False) if missing else mask
