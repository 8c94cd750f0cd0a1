"""``dspattn.use`` as a decorator: the block is open while the function runs, and only then.

A generator runs between its caller's requests, an ``async`` function between its awaits: calling it opens nothing yet.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import AsyncGenerator, Callable, Generator
from typing import TYPE_CHECKING, Any

from ._redirect import as_in

if TYPE_CHECKING:
    from .sdpa import use


def wrapped(function: Callable[..., Any], block: use) -> Callable[..., Any]:
    """The function, run inside the block; a generator one step at a time."""
    if not callable(function):
        raise TypeError(f"function: expected something callable, got {type(function).__name__}")
    if isinstance(function, type):
        raise TypeError(
            f"function: expected a function or a callable object, got the class {function.__name__}, whose making "
            "calls no attention; decorate its methods"
        )
    inner: Any = function
    while isinstance(inner, functools.partial):
        inner = inner.func
    kind = inner if inspect.isroutine(inner) else type(inner).__call__

    if inspect.isasyncgenfunction(kind):
        wrapper = _async_generator(function, block)
    elif inspect.isgeneratorfunction(kind):
        wrapper = _generator(function, block)
    elif inspect.iscoroutinefunction(kind):
        wrapper = _coroutine(function, block)
    else:
        wrapper = _plain(function, block)
    return functools.update_wrapper(wrapper, function)


def _plain(function: Callable[..., Any], block: use) -> Callable[..., Any]:
    def redirected(*args: Any, **kwargs: Any) -> Any:
        with block:
            return function(*args, **kwargs)

    return redirected


def _coroutine(function: Callable[..., Any], block: use) -> Callable[..., Any]:
    async def redirected(*args: Any, **kwargs: Any) -> Any:
        with block:
            return await function(*args, **kwargs)

    return redirected


def _generator(function: Callable[..., Any], block: use) -> Callable[..., Any]:
    def redirected(*args: Any, **kwargs: Any) -> Generator[Any, Any, Any]:
        generator = function(*args, **kwargs)
        step: Callable[[], Any] = functools.partial(next, generator)
        try:
            while True:
                try:
                    with as_in(block):
                        produced = step()
                except StopIteration as end:
                    block.tell()
                    return end.value
                try:
                    sent = yield produced
                    step = functools.partial(generator.send, sent)
                except GeneratorExit:
                    raise
                except BaseException as error:
                    step = functools.partial(generator.throw, error)
        finally:
            with as_in(block):
                generator.close()

    return redirected


def _async_generator(function: Callable[..., Any], block: use) -> Callable[..., Any]:
    async def redirected(*args: Any, **kwargs: Any) -> AsyncGenerator[Any, Any]:
        generator = function(*args, **kwargs)
        step: Callable[[], Any] = functools.partial(anext, generator)
        try:
            while True:
                try:
                    with as_in(block):
                        produced = await step()
                except StopAsyncIteration:
                    block.tell()
                    return
                try:
                    sent = yield produced
                    step = functools.partial(generator.asend, sent)
                except GeneratorExit:
                    raise
                except BaseException as error:
                    step = functools.partial(generator.athrow, error)
        finally:
            with as_in(block):
                await generator.aclose()

    return redirected
