"""Errors in code that torch.compile traces.

Tracing follows ``raise`` and ``except`` as Python does, also out of a graph into plain Python. What it cannot do is let
an exception leave code compiled with ``fullgraph=True``: it then raises its own error, about a graph break. So there
our exception is raised by the tracer itself, at once: an ``except`` in the compiled code does not see it.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

_USE = str(Path(__file__).with_name("integrations") / "sdpa.py")
# What becomes of an error below these methods of dspattn.use: the one looks at it, the other lets it out.
_LOOKS_AT_ERRORS, _LETS_ERRORS_OUT = "answer", "leave_to_pytorch"


def raise_from_the_tracer(kind: Any, *reasons: str) -> None:
    """Called while tracing, before a DspattnError is raised in what is traced: raise it at once where there is no other
    way for it to reach the caller."""
    frame = _innermost_frame()
    if frame is not None and not _may_break(frame) and not _is_caught(frame):
        raise _passed_on(kind)(reasons)


# What torch.compiler.assume_constant_result does, which would load the compiler with the package.
raise_from_the_tracer._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _innermost_frame() -> Any:
    """What torch.compile is tracing; None where it does not say, as it need not: this is not in its documentation."""
    try:
        from torch._dynamo.symbolic_convert import InstructionTranslator

        return InstructionTranslator.current_tx().output.current_tx
    except (ImportError, AttributeError):
        return None


def _may_break(frame: Any) -> bool:
    """Whether the rest may run as plain Python, where any exception is one."""
    return not (getattr(frame, "one_graph", False) or getattr(frame, "error_on_graph_break", False))


def _is_caught(frame: Any) -> bool:
    """Whether dspattn.use asks what the call can do, and goes on without it."""
    while frame is not None:
        if frame.f_code.co_filename == _USE and frame.f_code.co_name in (_LOOKS_AT_ERRORS, _LETS_ERRORS_OUT):
            return bool(frame.f_code.co_name == _LOOKS_AT_ERRORS)
        frame = getattr(frame, "parent", None)
    return False


@functools.cache
def _passed_on(kind: Any) -> Any:
    """The exception as one that torch.compile passes on as it is."""
    from torch._dynamo.exc import TorchRuntimeError

    def made(self: Any, reasons: tuple[str, ...]) -> None:
        TorchRuntimeError.__init__(self, "\n".join(reasons))
        self.reasons = reasons

    return type(kind.__name__, (kind, TorchRuntimeError), {"__init__": made, "__module__": kind.__module__})
