"""``dspattn.use``: every call of PyTorch's scaled_dot_product_attention of a block goes to ``dspattn.attention``."""

from __future__ import annotations

import functools
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch

from .._flags import as_flag
from ..errors import DspattnError
from ..functional import attention
from ..patterns import Grouping, Rest, Selection, parse_grouping, parse_pattern, parse_rest, parse_selection
from ..plans import Plan
from . import _account, _beyond_modes, _redirect
from ._wrapping import wrapped

P = ParamSpec("P")
R = TypeVar("R")


class use:  # noqa: N801 - reads as a verb where it is used: with dspattn.use("2:4"):
    """Redirect every ``scaled_dot_product_attention`` call to :func:`dspattn.attention`, in a block or a function.

    It catches the calls wherever they are made, by whatever name the function was imported, in the thread (and, in
    asynchronous code, the task) that opened the block; other threads see nothing of it. Modules that never call it (a
    plain softmax of scores, as ``torch.nn.MultiheadAttention`` with ``need_weights=True``) do not change; PyTorch's
    fused fast path of transformer encoder layers stands back inside the block. What gradient checkpointing runs again
    in the backward pass sees the block that its forward pass saw. TorchScript does not ask: a traced or scripted
    function with attention in it counts as a call that cannot be served.

    As a decorator it serves functions, generators and ``async`` functions.

    Args:
        pattern: ``"2:4"``, ``"1:2"``, any ``"N:M"``, or ``"dense"``.
        grouping: ``"interleaved"`` or ``"consecutive"``.
        rest: ``"drop"`` or ``"mean"``, as in :func:`dspattn.attention`.
        selection: ``"own"`` or ``"shared"``, likewise.
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

    def __init__(
        self,
        pattern: str = "2:4",
        grouping: Grouping = "interleaved",
        *,
        rest: Rest = "drop",
        selection: Selection = "own",
        strict: bool = True,
    ) -> None:
        parse_pattern(pattern)
        parse_grouping(grouping)
        parse_rest(rest)
        parse_selection(selection)
        self.plan = Plan(pattern, grouping, None, rest, selection)
        self.strict = as_flag("strict", strict)
        self._tally = _account.Tally(pattern, grouping)

    @property
    def served(self) -> int:
        return self._tally.settle().served

    @property
    def short(self) -> int:
        return self._tally.settle().short

    @property
    def left(self) -> Counter[str]:
        return self._tally.settle().left

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy, as of a module that has a block, is a block of its own that has seen nothing yet."""
        plan = self.plan
        options: dict[str, Any] = {"rest": plan.rest, "selection": plan.selection, "strict": self.strict}
        return functools.partial(type(self), plan.pattern, plan.grouping, **options), ()

    def __enter__(self) -> use:
        # Interrupted, as by Ctrl-C, it leaves nothing open: no __exit__ follows.
        entered = False
        try:
            self._tally.watch_collections()
            _redirect.enter(self)
            entered = True
            return self
        except BaseException:
            if entered:
                _redirect.leave(self, [])
            self._tally.unwatch_collections()
            raise

    def __exit__(self, *exception: Any) -> None:
        # Interrupted, it closes the block first. Only what arrives before its first line is beyond it.
        left: list[_redirect.State] = []
        try:
            outermost = _redirect.leave(self, left)
            self._tally.unwatch_collections()
        except BaseException:
            _redirect.leave(self, left)
            self._tally.unwatch_collections()
            raise
        if outermost and exception[0] is None:
            self.tell()

    def tell(self) -> None:
        """Warn at the end of a block about what was left to PyTorch, and when nothing arrived."""
        if _account.is_worth_a_warning(self.served, self.left):
            warnings.warn(self.report(), stacklevel=3)

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        return wrapped(function, self)

    def report(self) -> str:
        """How many calls were served and, for each reason, how many were left to PyTorch."""
        return _account.summary(str(self.plan), self.served, self.short, self.left)

    def answer(self, *args: Any, **kwargs: Any) -> Any:
        """One call of scaled_dot_product_attention made inside the block."""
        reasons = _foreign(*args, **kwargs)
        if not reasons:
            try:
                out = attention(*args, **(self.plan.options() | kwargs))
            except DspattnError as error:
                reasons = list(error.reasons)
            else:
                key = args[1] if len(args) > 1 else kwargs["key"]
                self._tally.serve(key.shape[-2])
                return out
        return self.leave_to_pytorch(reasons, _redirect.SDPA, *args, **kwargs)

    def leave_to_pytorch(self, reasons: list[str], function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The answer to a call that cannot be served: an error, or with ``strict=False`` PyTorch's own, counted."""
        if self.strict:
            raise DspattnError(
                [
                    *reasons,
                    "Pass strict=False to dspattn.use to leave such calls to PyTorch, which will not prune them.",
                ]
            )
        self._tally.leave("; ".join(reasons))
        if torch.compiler.is_compiling():
            return function(*args, **kwargs)
        with _redirect.as_in(None):  # a block around this one does not prune it either
            return function(*args, **kwargs)


def _is_usual(tensor: Any) -> bool:
    """What nearly all tensors are, asked in the quickest way."""
    return (tensor.is_cpu or tensor.is_cuda) and tensor.layout is torch.strided and not tensor.is_nested


def _foreign(query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> list[str]:
    """Reasons that lie in what kind of tensors these are."""
    reasons: list[str] = []
    if _is_usual(query) and _is_usual(key) and _is_usual(value):
        return reasons
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.is_nested:
            reasons.append(f"{name}: expected a strided tensor, got a nested one")
        elif tensor.layout is not torch.strided:
            reasons.append(f"{name}: expected a strided tensor, got {tensor.layout}")
        elif tensor.device.type not in ("cpu", "cuda", "meta"):
            reasons.append(f"{name}: expected a tensor on cpu or cuda, got {tensor.device}")
    return reasons


_beyond_modes.install()
