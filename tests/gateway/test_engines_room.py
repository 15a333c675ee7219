"""Slots that share one KV cache: together, what runs fits into it."""

from __future__ import annotations

import asyncio

from tests.fakes.behaviour import Behaviour
from tests.fakes.engine import FakeEngine
from tests.fakes.gateway import Running, running_gateway
from tests.fakes.running import eventually, in_loop
from tests.gateway.line_talk import CHAT

WORDS = "word " * 800  # some 1,000 tokens


async def ask(slotgate: Running, content: str = WORDS, **fields: object) -> int:
    messages = [{"role": "user", "content": content}]
    body = {"model": "m", "messages": messages, "max_tokens": 50, **fields}
    return (await slotgate.client.post(CHAT, json=body)).status_code


@in_loop
async def test_requests_that_would_not_fit_together_wait_although_slots_are_free() -> None:
    async with (
        FakeEngine(slots=4, behaviour=Behaviour(ttft_s=0.1)) as engine,
        running_gateway(
            {"url": engine.url, "kv_tokens": 2500}, admission={"queue": 20}
        ) as slotgate,
    ):
        slotgate.models.add("m")
        assert set(await asyncio.gather(*(ask(slotgate) for _ in range(8)))) == {200}
        assert engine.peak == 2
        small = [ask(slotgate, "hi") for _ in range(8)]
        assert set(await asyncio.gather(*small)) == {200}
        assert engine.peak == 4, "small ones use every slot"


@in_loop
async def test_a_prompt_larger_than_the_cache_runs_alone_and_the_engine_judges_it() -> None:
    async with (
        FakeEngine(slots=4, behaviour=Behaviour(ttft_s=0.1)) as engine,
        running_gateway({"url": engine.url, "kv_tokens": 500}) as slotgate,
    ):
        slotgate.models.add("m")
        assert await asyncio.gather(ask(slotgate), ask(slotgate)) == [200, 200]
        assert engine.peak == 1


@in_loop
async def test_who_leaves_gives_its_room_back() -> None:
    async with (
        FakeEngine(slots=4, behaviour=Behaviour(itl_s=0.05, tokens=2000)) as engine,
        running_gateway({"url": engine.url, "kv_tokens": 1500}) as slotgate,
    ):
        slotgate.models.add("m")
        body = {"model": "m", "messages": [{"role": "user", "content": WORDS}], "stream": True}
        async with slotgate.client.stream("POST", CHAT, json=body) as answer:
            events = answer.aiter_raw()
            await anext(events)
            second = asyncio.create_task(ask(slotgate))
            await eventually(lambda: slotgate.metric("queue_depth"))
            assert engine.inside == 1
        assert await asyncio.wait_for(second, 30) == 200
