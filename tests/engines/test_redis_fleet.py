"""Two gateways in one loop, a real Redis, scripted engines."""

from __future__ import annotations

import asyncio

from tests.fakes.engine import FakeEngine
from tests.fakes.redis_server import redis_server
from tests.fakes.running import eventually, in_loop
from tests.fakes.scripts import chat_stream
from tests.gateway.conftest import running_gateway


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
