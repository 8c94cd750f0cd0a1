"""``dspattn.use``: every call of PyTorch's scaled_dot_product_attention of a block goes to ``dspattn.attention``."""

from __future__ import annotations

import functools
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, ParamSpec, TypeVar

import torch
from torch.overrides import TorchFunctionMode

from ..errors import DspattnError
from ..functional import attention
from ..patterns import Grouping, parse_grouping, parse_pattern
from . import _account

P = ParamSpec("P")
R = TypeVar("R")

_SDPA = torch.nn.functional.scaled_dot_product_attention
_MULTI_HEAD = torch.nn.functional.multi_head_attention_forward


class use:  # noqa: N801 - reads as a verb where it is used: with dspattn.use("2:4"):
    """Redirect every ``scaled_dot_product_attention`` call to :func:`dspattn.attention`, in a block or a function.

    It catches the calls wherever they are made, by whatever name the function was imported, in this thread. Modules
    that never call it (a plain softmax of scores, as ``torch.nn.MultiheadAttention`` with ``need_weights=True``) do not
    change; PyTorch's fused fast path of transformer encoder layers, which would bypass it, is off inside the block.

    Args:
        pattern: ``"2:4"``, ``"1:2"``, any ``"N:M"``, or ``"dense"``.
        grouping: ``"interleaved"`` or ``"consecutive"``.
        strict: raise for a call that cannot be served (dropout, a type or size the kernels do not take). With False,
            such calls are left to PyTorch; ``left`` then says how many and why, and a warning tells at the end. So it
            does when no call arrived at all.

    Attributes:
        served: how many calls :func:`dspattn.attention` answered.
        short: how many of those had so few keys that nothing was pruned.
        left: for each reason, how many calls were left to PyTorch.

    Example:
        >>> q = k = v = torch.randn(1, 2, 100, 8)
        >>> with use("2:4") as switched:
        ...     out = torch.nn.functional.scaled_dot_product_attention(q, k, v)
        >>> print(switched.report())
        1 attention call ran with 2:4 interleaved; none was left to PyTorch

        >>> @use("1:2")
        ... def forward(q, k, v):
        ...     return torch.nn.functional.scaled_dot_product_attention(q, k, v)
        >>> forward(q, k, v).shape
        torch.Size([1, 2, 100, 8])
    """

    def __init__(self, pattern: str = "2:4", grouping: Grouping = "interleaved", *, strict: bool = True) -> None:
        parse_pattern(pattern)
        parse_grouping(grouping)
        self.pattern = pattern
        self.grouping: Grouping = grouping
        self.strict = strict
        self.served = 0
        self.short = 0
        self.left: Counter[str] = Counter()
        self._entered: list[tuple[_Redirect, bool]] = []

    def __enter__(self) -> use:
        mode = _Redirect(self)
        self._entered.append((mode, torch.backends.mha.get_fastpath_enabled()))
        torch.backends.mha.set_fastpath_enabled(False)
        mode.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        mode, fastpath = self._entered.pop()
        mode.__exit__(*exception)
        torch.backends.mha.set_fastpath_enabled(fastpath)
        if not self._entered and exception[0] is None:
            self.tell()

    def tell(self) -> None:
        """Warn at the end of a block about what was left to PyTorch, and when nothing arrived."""
        if _account.is_worth_a_warning(self.served, self.left):
            warnings.warn(self.report(), stacklevel=3)

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def redirected(*args: P.args, **kwargs: P.kwargs) -> R:
            with self:
                return function(*args, **kwargs)

        return redirected

    def report(self) -> str:
        """How many calls were served and, for each reason, how many were left to PyTorch."""
        return _account.summary(f"{self.pattern} {self.grouping}", self.served, self.short, self.left)


class _Redirect(TorchFunctionMode):
    """Sees every PyTorch function call of the thread; answers those of scaled_dot_product_attention."""

    def __init__(self, owner: use) -> None:
        super().__init__()
        self.owner = owner

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is _SDPA:
            return self._answer(*args, **kwargs)
        if func is _MULTI_HEAD:
            return self._inside_multi_head(*args, **kwargs)
        return func(*args, **kwargs)

    def _inside_multi_head(self, *args: Any, **kwargs: Any) -> Any:
        """PyTorch asks no mode about what a function calls that went through one already, so the call inside
        torch.nn.functional.multi_head_attention_forward is redirected by name, for this thread."""
        functional: Any = torch.nn.functional
        thread, previous = threading.get_ident(), functional.scaled_dot_product_attention

        def redirected(*args: Any, **kwargs: Any) -> Any:
            answer = self._answer if threading.get_ident() == thread else previous
            return answer(*args, **kwargs)

        functional.scaled_dot_product_attention = redirected
        try:
            return _MULTI_HEAD(*args, **kwargs)
        finally:
            functional.scaled_dot_product_attention = previous

    def _answer(self, *args: Any, **kwargs: Any) -> Any:
        owner = self.owner
        reasons = _foreign(*args, **kwargs)
        if not reasons:
            try:
                out = attention(*args, pattern=owner.pattern, grouping=owner.grouping, **kwargs)
            except DspattnError as error:
                reasons = list(error.reasons)
            else:
                owner.served += 1
                key = args[1] if len(args) > 1 else kwargs["key"]
                owner.short += _account.is_short(key.shape[-2], owner.pattern, owner.grouping)
                return out
        if owner.strict:
            raise DspattnError(
                [
                    *reasons,
                    "Pass strict=False to dspattn.use to leave such calls to PyTorch, which will not prune them.",
                ]
            )
        owner.left["; ".join(reasons)] += 1
        return _SDPA(*args, **kwargs)


def _foreign(query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> list[str]:
    """Reasons that lie in what kind of tensors these are."""
    reasons = []
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.is_nested:
            reasons.append(f"{name}: expected a strided tensor, got a nested one")
        elif tensor.layout is not torch.strided:
            reasons.append(f"{name}: expected a strided tensor, got {tensor.layout}")
        elif tensor.device.type not in ("cpu", "cuda", "meta"):
            reasons.append(f"{name}: expected a tensor on cpu or cuda, got {tensor.device}")
    return reasons
