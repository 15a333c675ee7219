"""An engine that refuses beyond its own limit gets less from us, and its clients wait with us instead."""

from __future__ import annotations

import asyncio

from tests.fakes.connection import Connection
from tests.fakes.engine import FakeEngine
from tests.fakes.gateway import running_gateway
from tests.fakes.running import in_loop
from tests.fakes.scripts import respond


@in_loop
async def test_one_busy_answer_keeps_the_rest_of_a_crowd_in_our_line() -> None:
    """Configured for four at once; the engine takes two and says 503 to a third."""
    async with (
        FakeEngine(kind="openai", slots=8) as engine,
        running_gateway(
            {"name": "b1", "url": engine.url, "slots": 4}, admission={"queue": 20}, check=False
        ) as slotgate,
    ):
        refusals = inside = 0

        async def two_at_once(connection: Connection) -> None:
            nonlocal refusals, inside
            if inside >= 2:
                refusals += 1
                await respond(503, b'{"error":{"message":"busy"}}')(connection)
                return
            inside += 1
            await connection.pause(0.2)
            inside -= 1
            await respond(200, b'{"choices":[]}')(connection)

        engine.always(two_at_once, path="/v1/chat/completions")
        body = {"model": engine.models[0], "messages": [{"role": "user", "content": "hi"}]}
        answers = await asyncio.gather(
            *(slotgate.client.post("/v1/chat/completions", json=body) for _ in range(12))
        )
        served = sum(answer.status_code == 200 for answer in answers)
        assert refusals <= 6, "every further request met the engine's refusal"
        assert served >= 8
        assert await slotgate.metric("backend_up") == 1
