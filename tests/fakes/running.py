"""Running a coroutine in a test: one fresh loop, and nothing that goes wrong in the background stays unheard.

    @in_loop
    async def test_a_client_that_leaves_frees_its_slot() -> None: ...

or, inside a plain test, `run(main())`.
"""

from __future__ import annotations

import asyncio
import functools
import gc
import os
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, ParamSpec, TypeVar

import anyio._backends._asyncio  # noqa: F401  (0.1 s of the first request's loop, if a client imports it there)
import uvloop

T = TypeVar("T")
P = ParamSpec("P")


def slack() -> float:
    """By how much wall-clock bounds are stretched on a slow machine: SLOTGATE_TEST_SLACK, 1 by default."""
    return float(os.environ.get("SLOTGATE_TEST_SLACK", "1"))


def run(main: Coroutine[Any, Any, T], *, loop: str = "uvloop") -> T:
    """Runs a coroutine to its end on uvloop (or plain `asyncio`).

    Fails also on what asyncio would only log: exceptions that nobody retrieved, broken callbacks, and tasks still
    running a second after the end.
    """
    unheard: list[str] = []
    factory = uvloop.new_event_loop if loop == "uvloop" else asyncio.new_event_loop
    with asyncio.Runner(loop_factory=factory, debug=False) as runner:
        runner.get_loop().set_exception_handler(lambda _, context: unheard.append(_told(context)))
        result = runner.run(_and_all_tasks(main))
        gc.collect()  # a task dropped with its exception says so when it is collected
    assert not unheard, "the loop had to report:\n" + "\n".join(unheard)
    return result


def in_loop(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """Makes a plain test of an async one."""

    @functools.wraps(test)
    def plain(*args: P.args, **kwargs: P.kwargs) -> None:
        run(test(*args, **kwargs))

    return plain


async def eventually(
    condition: Callable[[], object | Awaitable[object]], within_s: float = 10, why: str = ""
) -> None:
    """Polls until `condition()` (plain or async) is true; fails after `within_s`, stretched by the slack."""
    deadline = time.monotonic() + within_s * slack()
    while True:
        found = condition()
        if await found if isinstance(found, Awaitable) else found:
            return
        assert time.monotonic() < deadline, why or f"not true within {within_s} s"
        await asyncio.sleep(0.005)


async def _and_all_tasks(main: Coroutine[Any, Any, T]) -> T:
    result = await main
    own = asyncio.current_task()
    others = [task for task in asyncio.all_tasks() if task is not own]
    if others:
        await asyncio.wait(others, timeout=slack())
    left = [task for task in others if not task.done()]
    assert not left, f"tasks were left running: {left}"
    return result


def _told(context: dict[str, Any]) -> str:
    error = context.get("exception")
    where = context.get("future") or context.get("handle") or context.get("protocol") or ""
    return f"- {context['message']}: {error!r} {where!r}"
