"""A storm of clients on a real llama.cpp server: it never has more requests than slots, whatever the clients do.

`SLOTGATE_STORM_S` makes it longer (60 for the record).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import re

import httpx2

from tests.engines.conftest import real_engine
from tests.fakes.gateway import Running, running_gateway
from tests.fakes.running import eventually, in_loop

STORM_S = float(os.environ.get("SLOTGATE_STORM_S", "12"))
CLIENTS = 12


async def restless(
    slotgate: Running, rng: random.Random, until: float, seen: dict[str, int]
) -> None:
    """Asks, and leaves in a random phase: in line, in prefill, in the stream, in a whole answer, or never."""
    clock = asyncio.get_running_loop().time
    while clock() < until:
        body = {
            "model": None,
            "stream": rng.random() < 0.7,
            "max_tokens": rng.randrange(4, 48),
            "messages": [{"role": "user", "content": f"{rng.random()} " * rng.randrange(1, 60)}],
        }
        patience = rng.choice([0.02, 0.1, 0.3, 1.0, 2.5, 30.0])
        try:
            async with asyncio.timeout(patience):
                answer = await slotgate.client.post("/v1/chat/completions", json=body)
            seen[str(answer.status_code)] = seen.get(str(answer.status_code), 0) + 1
            if answer.status_code == 503:
                await asyncio.sleep(rng.random())
        except TimeoutError:
            seen["left"] = seen.get("left", 0) + 1


@in_loop
async def test_a_storm_with_hang_ups_in_every_phase_leaves_nothing_waiting_inside_the_engine() -> (
    None
):
    async with (
        real_engine(slots=2, ctx=4096, batch=128, metrics=True) as engine,
        running_gateway(engine.url, check=False) as slotgate,
    ):
        clock = asyncio.get_running_loop().time
        until, seen = clock() + STORM_S, {}
        clients = [
            asyncio.create_task(restless(slotgate, random.Random(seed), until, seen))
            for seed in range(CLIENTS)
        ]
        deferred = []
        async with httpx2.AsyncClient(trust_env=False, timeout=20) as client:
            while clock() < until:
                await asyncio.sleep(1.7)  # faster, and the engine would not notice who leaves
                with contextlib.suppress(httpx2.HTTPError):
                    text = (await client.get(engine.url + "/metrics")).text
                    found = re.search(r"^llamacpp:requests_deferred (\S+)", text, re.MULTILINE)
                    deferred.append(float(found[1]) if found else -1.0)
        await asyncio.gather(*clients)
        assert deferred, "the engine told nothing"
        assert max(deferred) == 0, f"the engine had requests waiting inside: {deferred}"
        assert seen.get("200", 0) > 0, seen
        assert seen.get("left", 0) > 0, seen

        async def at_rest() -> bool:
            return await slotgate.metric("in_flight") + await slotgate.metric("queue_depth") == 0

        await eventually(at_rest, why="something is still held")
