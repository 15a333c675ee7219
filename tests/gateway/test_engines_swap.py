"""Engines that hold one model at a time behind the gateway. B021."""

from __future__ import annotations

import asyncio

import pytest

from tests.fakes.behaviour import Behaviour
from tests.fakes.engine import FakeEngine
from tests.fakes.gateway import Running, running_gateway
from tests.fakes.running import eventually, in_loop
from tests.gateway.line_talk import CHAT

MODELS = ("A:latest", "B:latest", "C:latest")
NAMES = {*MODELS, "A", "B", "C"}
QUEUE = {"queue": 40}


def one_model_at_a_time(swap_s: float = 0.3, **behaviour: float) -> FakeEngine:
    """An Ollama with nothing loaded, which breaks off what runs when it has to swap."""
    engine = FakeEngine(
        "ollama", slots=4, models=MODELS, behaviour=Behaviour(swap_s=swap_s, **behaviour)
    )
    engine.loaded.clear()
    return engine


async def ask(slotgate: Running, model: str) -> int:
    body = {"model": model, "messages": [{"role": "user", "content": "hello"}]}
    answer = await slotgate.client.post(CHAT, json=body)
    assert answer.status_code == 200, answer.text
    return answer.status_code


@pytest.mark.parametrize("slots", [1, 3])
@in_loop
async def test_requests_in_a_mixed_order_cost_few_swaps_and_none_is_broken_off(slots: int) -> None:
    async with (
        one_model_at_a_time(ttft_s=0.1) as engine,
        running_gateway({"url": engine.url, "slots": slots}, admission=QUEUE) as slotgate,
    ):
        slotgate.models |= NAMES
        calls = []
        for model in "ABAACABC":
            calls.append(asyncio.create_task(ask(slotgate, model)))
            await asyncio.sleep(0.02)
        await asyncio.gather(*calls)
        assert engine.swaps <= 3
        assert engine.executions == 8
        assert all(request.gone_at is None for request in engine.requests)


@in_loop
async def test_steady_traffic_for_one_model_does_not_starve_another_one() -> None:
    async with (
        one_model_at_a_time(swap_s=0.2, ttft_s=0.05) as engine,
        running_gateway({"url": engine.url}, admission=QUEUE) as slotgate,
    ):
        slotgate.models |= NAMES
        stop = asyncio.Event()

        async def steady() -> None:
            while not stop.is_set():
                await ask(slotgate, "A")

        crowd = [asyncio.create_task(steady()) for _ in range(3)]
        await eventually(lambda: engine.executions > 5)
        before = engine.swaps
        await asyncio.wait_for(ask(slotgate, "B"), 25)
        stop.set()
        await asyncio.gather(*crowd)
        assert engine.swaps - before <= 2, "there and back"


@in_loop
async def test_the_same_model_elsewhere_is_preferred_to_a_swap() -> None:
    async with (
        one_model_at_a_time() as one,
        one_model_at_a_time() as other,
        running_gateway({"url": one.url}, {"url": other.url}, admission=QUEUE) as slotgate,
    ):
        slotgate.models |= NAMES
        await asyncio.gather(ask(slotgate, "A"), ask(slotgate, "A"))  # one on each
        first = next(engine for engine in (one, other) if engine.loads["A:latest"])
        loads = one.loads.total() + other.loads.total()
        for _ in range(4):
            await ask(slotgate, "A")
        assert one.loads.total() + other.loads.total() == loads, "where it is loaded"
        await ask(slotgate, "B")
        for model in "ABABAB":
            await ask(slotgate, model)
        assert one.swaps + other.swaps <= 1
        assert first.loads["A:latest"] == 1


@in_loop
async def test_an_ollama_is_never_lent_more_than_its_slots_which_are_one_unless_configured() -> (
    None
):
    async with (
        FakeEngine("ollama", slots=8, models=["m:latest"], behaviour=Behaviour(ttft_s=0.05)) as a,
        running_gateway(a, admission=QUEUE) as slotgate,
    ):
        slotgate.models |= {"m", "m:latest"}
        names = ["m", "m:latest"] * 4
        await asyncio.gather(*(ask(slotgate, name) for name in names))
        assert a.peak == 1
        assert a.executions == 8
