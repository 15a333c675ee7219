"""The whole gateway in front of each kind of engine: one request through everything, and the invariants."""

from __future__ import annotations

import asyncio

import pytest

from tests.fakes.engine import FakeEngine
from tests.fakes.gateway import running_gateway
from tests.fakes.invariants import bytes_are_unchanged
from tests.fakes.running import eventually, in_loop
from tests.fakes.scripts import hang


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    "kind", ["llama-server", "llama-router", "vllm", "ollama", "sglang", "openai"]
)
def test_a_chat_passes_unchanged_through_the_gateway(kind: str, stream: bool) -> None:
    @in_loop
    async def check() -> None:
        async with FakeEngine(kind) as engine, running_gateway(engine) as slotgate:
            answer = await slotgate.chat(stream=stream)
            assert answer.status_code == 200
            bytes_are_unchanged(answer.content, bytes(engine.requests[-1].sent))
            assert answer.headers["x-slotgate-backend"] == "b1"
            slotgate.sent = 1

    check()


@in_loop
async def test_more_than_slots_and_queue_are_refused_and_nothing_is_left_when_all_have_gone() -> (
    None
):
    async with (
        FakeEngine(slots=2) as engine,
        running_gateway(engine, keys=["alice"], admission={"queue": 1}) as slotgate,
    ):
        engine.always(hang())
        calls = [asyncio.create_task(slotgate.chat()) for _ in range(3)]
        await eventually(lambda: slotgate.metric("queue_depth"))
        refused = await slotgate.chat()
        assert refused.status_code == 503
        assert 1 <= int(refused.headers["retry-after"]) <= 60
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        await engine.until(lambda: engine.inside == 0)
        assert engine.peak == 2
        slotgate.sent = 4
