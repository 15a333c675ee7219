"""A Redis that is slow, stands still, refuses or goes: no request waits for it, and none fails."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import AsyncIterator

import pytest

from gateway.core.lease import LEASE_S, SEEN_S
from tests.fakes.engine import FakeEngine
from tests.fakes.redis_server import RedisServer, redis_server
from tests.fakes.running import eventually, in_loop, slack
from tests.fakes.scripts import chat_stream
from tests.gateway.conftest import Running, running_gateway


class SlowRoad:
    """A way to Redis that takes `delay_s` in each direction."""

    def __init__(self, port: int) -> None:
        self.delay_s = 0.0
        self._port = port
        self._writers: list[asyncio.StreamWriter] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self.connections = 0

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[str]:
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        try:
            yield f"redis://127.0.0.1:{port}/0"
        finally:
            server.close()
            for writer in self._writers:
                writer.close()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self._writers.append(writer)
        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._port)
        except OSError:
            writer.close()
            return
        self._writers.append(far_writer)
        for one, other in ((reader, far_writer), (far_reader, writer)):
            self._tasks.add(asyncio.create_task(self._carry(one, other)))

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                await asyncio.sleep(self.delay_s)
                writer.write(data)
        writer.close()


async def timed(gateway: Running) -> float:
    began = time.monotonic()
    answer = await gateway.chat(stream=True)
    assert answer.status_code == 200, answer.text
    return time.monotonic() - began


@pytest.mark.parametrize("delay_s", [0.1, 0.5, 5.0])
def test_no_request_waits_for_a_slow_redis(delay_s: float) -> None:
    @in_loop
    async def main() -> None:
        async with redis_server() as redis, FakeEngine(slots=2) as engine:
            engine.always(chat_stream(tokens=2, every_s=0.01))
            road = SlowRoad(redis.port)
            async with (
                road.open() as url,
                running_gateway(engine, check=False, redis={"url": url}) as one,
            ):
                await timed(one)
                usual = min([await timed(one) for _ in range(5)])
                road.delay_s = delay_s
                ends = time.monotonic() + 4
                slow = []
                while time.monotonic() < ends:
                    slow.append(await timed(one))
                    await asyncio.sleep(0.05)
                assert sorted(slow)[len(slow) // 2] < usual + 0.05 * slack()
                assert max(slow) < usual + 0.5 * slack()
                assert await one.metric("redis_up") == (delay_s < 1)

    main()


async def busy(gateways: list[Running], seconds: float, clients: int = 4) -> None:
    """Every gateway has more to do than it can, all the time; nobody is refused."""
    ends = time.monotonic() + seconds

    async def client(gateway: Running) -> None:
        while time.monotonic() < ends:
            answer = await gateway.chat(stream=True)
            assert answer.status_code == 200, answer.text

    await asyncio.gather(*(client(one) for one in gateways for _ in range(clients)))


@in_loop
async def test_slots_hold_while_redis_is_slow_for_one_of_two_gateways() -> None:
    async with redis_server() as redis, FakeEngine(slots=3) as engine:
        engine.always(chat_stream(tokens=3, every_s=0.02))
        road = SlowRoad(redis.port)
        async with (
            road.open() as url,
            running_gateway(engine, check=False, admission={"queue": 100}, redis={"url": url}) as a,
            running_gateway(
                engine, check=False, admission={"queue": 100}, redis={"url": redis.url}
            ) as b,
        ):
            for delay_s in (0.0, 0.3, 0.9, 0.0, 0.1):
                road.delay_s = delay_s
                answers = await asyncio.gather(
                    *(one.chat(stream=True) for _ in range(20) for one in (a, b))
                )
                assert {answer.status_code for answer in answers} == {200}
            assert engine.peak <= 3


@pytest.mark.parametrize("delay_s", [1.5, 3.0])
def test_slots_hold_while_all_answers_of_redis_come_too_late_for_one_of_two_gateways(
    delay_s: float,
) -> None:
    @in_loop
    async def main() -> None:
        async with redis_server() as redis, FakeEngine(slots=3) as engine:
            engine.always(chat_stream(tokens=3, every_s=0.02))
            road = SlowRoad(redis.port)
            async with (
                road.open() as url,
                running_gateway(
                    engine, check=False, admission={"queue": 100}, redis={"url": url}
                ) as a,
                running_gateway(
                    engine, check=False, admission={"queue": 100}, redis={"url": redis.url}
                ) as b,
            ):
                await busy([a, b], 1)
                road.delay_s = delay_s
                await busy([b], LEASE_S + SEEN_S + 4)
                assert await a.metric("redis_up") == 0
                await busy([a, b], LEASE_S)
                road.delay_s = 0.0
                await busy([a, b], 3)
                assert engine.peak == 3
                assert road.connections == 1, "slow is not gone"

    main()


@in_loop
async def test_slots_hold_when_redis_stood_still_for_longer_than_a_lease() -> None:
    async with redis_server() as redis, FakeEngine(slots=3) as engine:
        engine.always(chat_stream(tokens=3, every_s=0.02))
        sections = {"redis": {"url": redis.url}, "admission": {"queue": 100}}
        async with (
            running_gateway(engine, check=False, **sections) as a,
            running_gateway(engine, check=False, **sections) as b,
        ):
            await busy([a, b], 1)
            redis.signal(signal.SIGSTOP)
            await busy([a, b], LEASE_S + SEEN_S + 1)
            redis.signal(signal.SIGCONT)
            await busy([a, b], 2)
            assert engine.peak == 3


@in_loop
async def test_a_redis_that_stands_still_is_told_once_and_taken_up_again_without_a_storm() -> None:
    async with redis_server() as redis, FakeEngine(slots=2) as engine:
        engine.always(chat_stream(tokens=2, every_s=0.01))
        road = SlowRoad(redis.port)
        async with (
            road.open() as url,
            running_gateway(engine, check=False, redis={"url": url}) as one,
        ):
            await timed(one)
            before = road.connections
            redis.signal(signal.SIGSTOP)

            async def is_up(value: int) -> bool:
                return await one.metric("redis_up") == value

            await eventually(lambda: is_up(0))
            findings = (await one.status())["findings"]
            assert any("Redis does not answer" in finding["text"] for finding in findings)
            for _ in range(10):
                assert await timed(one) < 2 * slack()
                await asyncio.sleep(0.3)
            assert road.connections - before < 10
            redis.signal(signal.SIGCONT)
            await eventually(lambda: is_up(1))
            assert one.log.getvalue().count('"event":"redis"') <= 2


@in_loop
async def test_a_gateway_that_starts_without_redis_serves_and_joins_when_there_is_one() -> None:
    async with redis_server() as redis, FakeEngine(slots=4) as engine:
        engine.always(chat_stream(tokens=2, every_s=0.05))
        await redis.stop()
        began = time.monotonic()
        sections = {"redis": {"url": redis.url}, "admission": {"queue": 100}}
        async with running_gateway(engine, check=False, **sections) as one:
            assert time.monotonic() - began < 10 * slack()
            answers = await asyncio.gather(*(one.chat(stream=True) for _ in range(6)))
            assert {answer.status_code for answer in answers} == {200}
            assert engine.peak <= 2, "half of the slots, as one of a pair"
            await redis.start()
            await eventually(lambda: one.gateway.cluster and one.gateway.cluster.is_up)
            backend = one.gateway.dispatcher.dispatch.backends["b1"]
            await eventually(lambda: backend.share == 4, within_s=10)


@in_loop
async def test_one_gateway_asks_an_engine_about_its_load_and_both_know_it() -> None:
    async with redis_server() as redis, FakeEngine(kind="vllm", slots=4) as engine:
        await _looks(redis, engine)


async def _looks(redis: RedisServer, engine: FakeEngine) -> None:
    engine.always(chat_stream(tokens=40, every_s=0.1))
    async with (
        running_gateway(engine, check=False, redis={"url": redis.url}) as one,
        running_gateway(engine, check=False, redis={"url": redis.url}) as two,
    ):
        began, before = time.monotonic(), engine.calls["/metrics"]
        await asyncio.gather(one.chat(stream=True), two.chat(stream=True))
        looks = engine.calls["/metrics"] - before
        elapsed = time.monotonic() - began
        assert 1 <= looks <= elapsed + 3, "about as often as one gateway would"
        for gateway in (one, two):
            known = gateway.gateway.backends.known["b1"].report
            assert known is not None
            told = gateway.gateway.cluster
            assert told is not None
            assert told.is_up
