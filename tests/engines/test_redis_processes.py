"""Real gateway processes, a real redis-server, scripted engines that count: the slots hold through everything.

Law of this file: what is in flight is counted by the engine, at its socket.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2

from tests.fakes.engine import FakeEngine
from tests.fakes.redis_server import RedisServer, redis_server
from tests.fakes.running import eventually, in_loop, slack
from tests.fakes.scripts import chat_stream
from tests.gateway.line_talk import CHAT, body_for
from tests.gateway.served import Served, serving

LEASE_S = 6.0


@dataclass
class Load:
    """Clients that ask one gateway again and again."""

    answers: Counter[str] = field(default_factory=Counter)
    tasks: list[asyncio.Task[None]] = field(default_factory=list)
    slowest_s: float = 0.0

    def on(self, served: Served, clients: int) -> None:
        self.tasks += [asyncio.create_task(self._ask(served.port)) for _ in range(clients)]

    async def _ask(self, port: int) -> None:
        async with httpx2.AsyncClient(trust_env=False, timeout=None) as http:
            while True:
                began = time.monotonic()
                try:
                    answer = await http.post(
                        f"http://127.0.0.1:{port}{CHAT}", json=body_for(CHAT, stream=True)
                    )
                    whole = answer.text.rstrip().endswith("[DONE]")
                    self.answers["whole" if whole else f"{answer.status_code} {answer.text}"] += 1
                except httpx2.HTTPError as error:
                    self.answers[type(error).__name__] += 1
                    await asyncio.sleep(0.1)
                self.slowest_s = max(self.slowest_s, time.monotonic() - began)

    async def end(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)


@contextlib.asynccontextmanager
async def gateways(
    folder: Path, count: int, redis: RedisServer, *engines: FakeEngine, **sections: Any
) -> AsyncIterator[list[Served]]:
    config = {
        "backends": [{"name": f"b{n}", "url": one.url} for n, one in enumerate(engines)],
        "redis": {"url": redis.url},
        "admission": {"queue": 100},
        **sections,
    }
    async with contextlib.AsyncExitStack() as stack:
        found = []
        for number in range(count):
            own = folder / str(number)
            own.mkdir()
            found.append(await stack.enter_async_context(serving(own, config)))
        yield found


def in_all(*engines: FakeEngine) -> int:
    return sum(engine.running for engine in engines)


@in_loop
async def test_slots_hold_when_a_gateway_is_killed_and_its_slots_are_soon_used_by_the_other(
    tmp_path: Path,
) -> None:
    async with (
        redis_server() as redis,
        FakeEngine(slots=2) as left,
        FakeEngine(slots=2) as right,
        gateways(tmp_path, 2, redis, left, right) as (one, two),
    ):
        for engine in (left, right):
            engine.always(chat_stream(tokens=5, every_s=0.03))
        kept, lost = Load(), Load()
        kept.on(one, 6)
        lost.on(two, 6)
        await eventually(lambda: in_all(left, right) == 4)
        await asyncio.sleep(1)
        two.signal(signal.SIGKILL)
        await two.status()
        await lost.end()
        await asyncio.sleep(LEASE_S + 1)
        await eventually(lambda: in_all(left, right) == 4, within_s=3)
        await kept.end()
        assert set(kept.answers) == {"whole"}, kept.answers
        assert (left.peak, right.peak) == (2, 2)


@in_loop
async def test_a_gateway_that_is_told_to_end_gives_its_slots_back_at_once(tmp_path: Path) -> None:
    async with (
        redis_server() as redis,
        FakeEngine(slots=4) as engine,
        gateways(tmp_path, 2, redis, engine) as (one, two),
    ):
        engine.always(chat_stream(tokens=5, every_s=0.2))
        kept, ended = Load(), Load()
        ended.on(two, 4)
        await eventually(lambda: engine.running == 4)
        await ended.end()
        await eventually(lambda: engine.running == 0)
        two.signal(signal.SIGTERM)
        assert await two.status() == 0
        began = time.monotonic()
        kept.on(one, 4)
        await eventually(lambda: engine.running == 4)
        assert time.monotonic() - began < LEASE_S / 2 * slack(), "sooner than by its lease"
        await kept.end()
        assert engine.peak == 4


@in_loop
async def test_slots_hold_when_a_gateway_stands_still_for_longer_than_its_lease(
    tmp_path: Path,
) -> None:
    async with (
        redis_server() as redis,
        FakeEngine(slots=2) as left,
        FakeEngine(slots=2) as right,
        gateways(tmp_path, 3, redis, left, right) as served,
    ):
        for engine in (left, right):
            engine.always(chat_stream(tokens=5, every_s=0.03))
        load = Load()
        for one in served:
            load.on(one, 4)
        await eventually(lambda: in_all(left, right) == 4)
        await asyncio.sleep(1)
        served[1].signal(signal.SIGSTOP)
        await asyncio.sleep(LEASE_S + 2)
        served[1].signal(signal.SIGCONT)
        await asyncio.sleep(2)
        await load.end()
        assert set(load.answers) == {"whole"}, load.answers
        assert (left.peak, right.peak) == (2, 2)


@in_loop
async def test_no_request_fails_and_slots_hold_when_redis_is_killed_and_comes_back_empty(
    tmp_path: Path,
) -> None:
    async with (
        redis_server() as redis,
        FakeEngine(slots=2) as left,
        FakeEngine(slots=2) as right,
        gateways(tmp_path, 3, redis, left, right) as served,
    ):
        for engine in (left, right):
            engine.always(chat_stream(tokens=5, every_s=0.03))
        load = Load()
        for one in served:
            load.on(one, 4)
        await eventually(lambda: in_all(left, right) == 4)
        await asyncio.sleep(1)
        await redis.stop()
        before = load.answers["whole"]
        await asyncio.sleep(LEASE_S + 2)
        assert load.answers["whole"] > before + 50 / slack(), "they go on with what they had"
        await redis.start()
        await asyncio.sleep(4)
        await load.end()
        assert set(load.answers) == {"whole"}, load.answers
        assert (left.peak, right.peak) == (2, 2)
        for one in served:
            told = [line for line in one.log if '"event":"redis"' in line]
            assert len(told) == 2, "one line when it goes, one when it is back"
            assert '"up":false' in told[0]
            assert '"up":true' in told[1]
