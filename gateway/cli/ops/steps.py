"""Runs the steps of a load test, one after the other.

Law of this file: in a closed loop exactly `level` requests are at work as long as there is work; in an open loop they come
when they come. The turns of a conversation never overlap. A step ends when its last answer has.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx2

from gateway.cli.ops.streamed import Sample, stream_chat
from gateway.cli.ops.tally import Step, step_of
from gateway.cli.ops.watch import Watch
from gateway.cli.ops.work import Conversation, marked, open_times


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """What is run. `levels`: requests at once, or with `open_loop` a second. `duration_s`: no request begins later."""

    levels: Sequence[float]
    work: Sequence[Conversation]
    model: str
    max_tokens: int
    open_loop: bool = False
    duration_s: float | None = None
    repeat: bool = False  # begin the set again until the time is over
    run: str = ""  # marks the prompts of this run; empty: prompts stay as they are
    extra: Mapping[str, Any] = field(default_factory=dict)  # more members of every body


async def run_steps(
    client: httpx2.AsyncClient, trial: Trial, watch: Watch, on_sample: Callable[[Sample], None]
) -> AsyncGenerator[Step, None]:
    """Each step as it ends. `on_sample` is told of every answer."""
    for number, level in enumerate(trial.levels):
        running = _Running(
            client, trial, f"{trial.run}{number:02d}" if trial.run else "", on_sample
        )
        async with watch.watching():
            started_s = time.monotonic()
            await (running.open(level) if trial.open_loop else running.closed(int(level)))
            wall_s = time.monotonic() - started_s
        yield step_of(level, running.samples, wall_s, watch.seen, open_loop=trial.open_loop)


def body_of(trial: Trial, messages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A streamed chat with its usage."""
    return {
        "model": trial.model,
        "messages": list(messages),
        "max_tokens": trial.max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        **trial.extra,
    }


class _Running:
    """One step. Owns its samples and what is still to be asked."""

    def __init__(
        self,
        client: httpx2.AsyncClient,
        trial: Trial,
        mark: str,
        on_sample: Callable[[Sample], None],
    ) -> None:
        self.samples: list[Sample] = []
        self._client = client
        self._test = trial
        self._mark = mark
        self._on_sample = on_sample
        self._until_s = None if trial.duration_s is None else time.monotonic() + trial.duration_s
        self._todo = _endless(trial.work) if trial.repeat else iter(trial.work)

    async def closed(self, level: int) -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(level):
                group.create_task(self._work())

    async def open(self, rate: float) -> None:
        started_s = time.monotonic()
        async with asyncio.TaskGroup() as group:
            for conversation, at_s in zip(self._todo, open_times(rate, seed=1), strict=False):
                await asyncio.sleep(max(0.0, started_s + at_s - time.monotonic()))
                if self._is_over():
                    return
                group.create_task(self._converse(conversation))

    async def _work(self) -> None:
        while not self._is_over():
            conversation = next(self._todo, None)
            if conversation is None:
                return
            await self._converse(conversation)

    async def _converse(self, conversation: Conversation) -> None:
        for messages in conversation.turns:
            if self._is_over():
                return
            body = body_of(self._test, marked(messages, self._mark))
            sample = await stream_chat(self._client, body)
            self.samples.append(sample)
            self._on_sample(sample)

    def _is_over(self) -> bool:
        return self._until_s is not None and time.monotonic() >= self._until_s


def _endless(work: Sequence[Conversation]) -> Iterator[Conversation]:
    while True:
        yield from work
