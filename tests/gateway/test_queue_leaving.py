"""Who waits: in order, until its time is over, and not a moment longer than its client stays. B012, B017."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from tests.fakes.behaviour import Behaviour
from tests.fakes.engine import FakeEngine
from tests.fakes.gateway import Running, running_gateway
from tests.fakes.raw_client import RawClient
from tests.fakes.running import eventually, in_loop, slack
from tests.fakes.scripts import hang
from tests.gateway.line_talk import asking


async def _deep(slotgate: Running, depth: int) -> bool:
    return await slotgate.metric("queue_depth", model="m") == depth


async def _queue(slotgate: Running, *names: str) -> list[RawClient]:
    """Clients that come one after the other and wait in that order."""
    clients = []
    before = await slotgate.metric("queue_depth", model="m")
    for number, name in enumerate(names, 1):
        clients.append(await asking(slotgate, user=name))
        await eventually(lambda n=number: _deep(slotgate, int(before) + n))
    return clients


@in_loop
async def test_who_leaves_the_queue_gives_up_its_place_and_the_rest_move_up_in_order() -> None:
    async with (
        FakeEngine("openai", slots=1) as engine,
        running_gateway({"url": engine.url, "slots": 1}, admission={"queue": 3}) as slotgate,
    ):
        slotgate.models.add("m")
        engine.script(hang())
        first = await asking(slotgate, user="A")
        await engine.until_requests(1)
        bob, carl, dave = await _queue(slotgate, "B", "C", "D")
        bob.rst()
        carl.fin()
        await eventually(lambda: _deep(slotgate, 1), within_s=1)
        (emma,) = await _queue(slotgate, "E")
        first.rst()  # its slot is free
        for client in (dave, emma):
            assert (await client.response()).status == 200
            client.close()
        carl.close()
        served = [request.json()["user"] for request in engine.requests]
        assert served == ["A", "D", "E"]
        assert await slotgate.outcomes() == {"client_gone": 3, "served": 2}


@in_loop
async def test_who_waited_max_wait_is_refused_and_who_came_later_waits_on() -> None:
    async with (
        FakeEngine(slots=1) as engine,
        running_gateway(engine, admission={"queue": 3, "max_wait_s": 0.6}) as slotgate,
    ):
        engine.always(hang())
        async with await asking(slotgate):
            await engine.until_requests(1)
            (early,) = await _queue(slotgate, "early")
            since = time.monotonic()
            (late,) = await _queue(slotgate, "late")
            refused = await early.response()
            assert 0.4 < time.monotonic() - since < 0.6 + 6 * slack()
            assert refused.status == 503
            assert refused.json()["error"]["code"] == "gateway_queue_timeout"
            assert refused.header("retry-after") is not None
            late.close()
            early.close()
        assert await slotgate.metric("shed_total", reason="queue_timeout") >= 1


@in_loop
async def test_a_client_that_leaves_while_it_waits_is_never_sent_to_an_engine() -> None:
    async with (
        FakeEngine(slots=1) as engine,
        running_gateway(engine, admission={"queue": 5}) as slotgate,
    ):
        engine.script(hang())
        async with await asking(slotgate):
            await engine.until_requests(1)
            for client in await _queue(slotgate, "B", "C", "D"):
                client.close()
            await eventually(lambda: _deep(slotgate, 0), within_s=1)
        assert (await slotgate.chat()).status_code == 200
        assert len(engine.requests) == 2


@in_loop
async def test_one_key_that_floods_does_not_starve_another() -> None:
    """Also when the flood spreads over users and addresses: fairness is by key, and by nothing else."""
    service_s = 0.1
    async with (
        FakeEngine("vllm", slots=2, behaviour=Behaviour(ttft_s=service_s, tokens=1)) as engine,
        running_gateway(
            {"url": engine.url, "slots": 2}, keys=["flood", "drop"], admission={"queue": 20}
        ) as slotgate,
    ):
        slotgate.models.add("m")
        ended = asyncio.Event()

        async def flood(number: int) -> int:
            served = 0
            while not ended.is_set():
                headers = {"X-Forwarded-For": f"10.0.0.{number}"}
                async with await asking(
                    slotgate, key="flood", headers=headers, user=f"u{number}"
                ) as client:
                    served += (await client.response()).status == 200
            return served

        floods = [asyncio.create_task(flood(number)) for number in range(10)]
        await eventually(lambda: slotgate.metric("queue_depth"))
        since = time.monotonic()
        for _ in range(5):
            started = len(engine.requests)
            async with await asking(slotgate, key="drop", user="drop") as client:
                assert (await client.response()).status == 200
            order = [request.json()["user"] for request in engine.requests[started:]]
            assert order.index("drop") <= 2 * 2, f"waited for {order}"
        took = time.monotonic() - since
        ended.set()
        assert sum(await asyncio.gather(*floods)) >= 5, "who floods gets what others leave"
        assert took < 5 * 10 * service_s * slack() * 2


@in_loop
async def test_a_key_alone_gets_all_slots() -> None:
    async with (
        FakeEngine(slots=3, behaviour=Behaviour(ttft_s=0.2)) as engine,
        running_gateway(engine, keys=["alice", "bob"]) as slotgate,
    ):
        await asyncio.gather(*(slotgate.chat() for _ in range(3)))
        assert engine.peak == 3
        assert await slotgate.metric("queue_wait_seconds_count", model="m") == 3


@in_loop
async def test_a_flooding_key_cannot_fill_the_queue_for_all() -> None:
    """Who has none waiting takes the newest place of who has most."""
    keys: list[Any] = ["flood", "drop"]
    async with (
        FakeEngine(slots=1) as engine,
        running_gateway(engine, keys=keys, admission={"queue": 3}) as slotgate,
    ):
        engine.script(hang())
        first = await asking(slotgate, key="flood")
        await engine.until_requests(1)
        _, _, newest = flood = await _queue(slotgate, "1", "2", "3")
        async with await asking(slotgate, key="drop") as client:
            displaced = await newest.response()
            assert displaced.status == 503
            assert displaced.json()["error"]["code"] == "gateway_queue_full"
            first.rst()
            assert (await client.response()).status == 200
        for one in flood:
            one.close()
        await eventually(lambda: slotgate.metric("requests_total", outcome="queue_full"))


@in_loop
async def test_nobody_waits_for_a_backend_that_went_down() -> None:
    async with (
        FakeEngine(slots=1) as engine,
        running_gateway(engine, admission={"queue": 3}, check=False) as slotgate,
    ):
        engine.always(hang())
        first = await asking(slotgate)
        await engine.until_requests(1)
        (waiting,) = await _queue(slotgate, "B")
        await engine.go_down()
        assert (await first.response()).status == 502
        refused = await waiting.response()
        assert refused.status in (502, 503)
        first.close()
        waiting.close()
        late = await slotgate.chat()
        assert late.status_code == 503
        assert late.json()["error"]["code"] == "no_backend"
        assert late.headers["retry-after"] == "5"
