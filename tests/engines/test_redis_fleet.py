"""Two gateways in one loop, a real Redis, scripted engines."""

from __future__ import annotations

import asyncio

from gateway.core.lease_dispatch import LeasedDispatch
from tests.fakes.engine import FakeEngine
from tests.fakes.redis_server import redis_server
from tests.fakes.running import eventually, in_loop
from tests.fakes.scripts import chat_stream
from tests.gateway.conftest import Running, running_gateway
from tests.gateway.line_talk import CHAT


@in_loop
async def test_two_gateways_together_never_give_an_engine_more_than_its_slots() -> None:
    async with redis_server() as redis, FakeEngine(slots=3) as engine:
        engine.always(chat_stream(tokens=5, every_s=0.02))
        config = {"redis": {"url": redis.url}, "admission": {"queue": 100}}
        async with (
            running_gateway(engine, config=config, check=False) as one,
            running_gateway(engine, config=config, check=False) as two,
        ):
            answers = await asyncio.gather(
                *(gateway.chat(stream=True) for _ in range(30) for gateway in (one, two))
            )
            assert {answer.status_code for answer in answers} == {200}
            assert engine.peak == 3


@in_loop
async def test_all_slots_of_an_idle_gateway_are_soon_usable_by_a_busy_one() -> None:
    async with redis_server() as redis, FakeEngine(slots=4) as engine:
        engine.always(chat_stream(tokens=2, every_s=1.0))
        config = {"redis": {"url": redis.url}}
        async with (
            running_gateway(engine, config=config, check=False) as one,
            running_gateway(engine, config=config, check=False),
        ):
            asks = [asyncio.create_task(one.chat(stream=True)) for _ in range(4)]
            await eventually(lambda: engine.running == 4, within_s=2)
            await asyncio.gather(*asks)


@in_loop
async def test_a_conversation_is_continued_where_another_gateway_has_begun_it() -> None:
    """One gateway takes no new work to the first engine, so all that it begins is on the second."""
    async with redis_server() as redis, FakeEngine(slots=4) as left, FakeEngine(slots=4) as right:
        sections = {"redis": {"url": redis.url}}
        backends = [{"name": "b1", "url": left.url}, {"name": "b2", "url": right.url}]
        async with (
            running_gateway(
                backends[0] | {"drain": True}, backends[1], check=False, wait=False, **sections
            ) as one,
            running_gateway(*backends, check=False, wait=False, **sections) as two,
        ):
            for gateway in (one, two):
                await eventually(lambda gateway=gateway: is_ready(gateway))
            talks = [[said("user", f"{number}: {'question ' * 200}")] for number in range(8)]
            for talk in talks:
                answer = await one.client.post(CHAT, json={"model": "m", "messages": talk})
                assert answer.headers["x-slotgate-backend"] == "b2"
            homes = dispatch_of(two).homes
            await eventually(lambda: len(homes._heard) == len(talks))
            for talk in talks:
                talk += [said("assistant", "answer"), said("user", "and then?")]
                answer = await two.client.post(CHAT, json={"model": "m", "messages": talk})
                assert answer.headers["x-slotgate-backend"] == "b2"
                assert answer.headers["x-slotgate-affinity"] == "hit"


def said(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def dispatch_of(gateway: Running) -> LeasedDispatch:
    dispatch = gateway.gateway.dispatcher.dispatch
    assert isinstance(dispatch, LeasedDispatch)
    return dispatch


def is_ready(gateway: Running) -> bool:
    return all(
        one.share and one.is_hopeful
        for one in dispatch_of(gateway).backends.values()
        if not one.draining
    )
