"""Several gateways with one Redis against one gateway alone: goodput, how fast slots move, what Redis is asked.

    python -m bench.replicas [--seconds 20]

Two scripted engines with four slots each. What they can serve is measured first, by as many clients as there are slots
that ask the engines themselves. Every gateway is a process of its own. `peak` is what the engines counted, and never
above their slots.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import statistics
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx2

from tests.fakes.engine import FakeEngine
from tests.fakes.redis_server import RedisServer, redis_server
from tests.fakes.scripts import chat_stream
from tests.gateway.line_talk import CHAT, body_for
from tests.gateway.served import Served, serving

SLOTS = 4
TOKENS, EVERY_S = 6, 0.05
MOVES = 20


@dataclass
class Load:
    """Clients in a closed loop, spread over gateways."""

    served: int = 0
    failed: int = 0
    times: list[float] = field(default_factory=list)

    async def ask(self, http: httpx2.AsyncClient, port: int, until: float) -> None:
        while time.monotonic() < until:
            began = time.monotonic()
            body = body_for(CHAT, stream=True)
            answer = await http.post(f"http://127.0.0.1:{port}{CHAT}", json=body)
            good = answer.text.rstrip().endswith("[DONE]")
            if (
                time.monotonic() > until
            ):  # else every client counts a whole round more than there was time for
                return
            self.served += good
            self.failed += not good
            self.times.append(time.monotonic() - began)


@contextlib.asynccontextmanager
async def fleet(
    count: int, redis: RedisServer | None, engines: list[FakeEngine]
) -> AsyncIterator[list[Served]]:
    config = {
        "backends": [{"name": f"b{n}", "url": one.url} for n, one in enumerate(engines)],
        "admission": {"queue": 1000},
        **({"redis": {"url": redis.url}} if redis else {}),
    }
    with tempfile.TemporaryDirectory(prefix="slotgate-bench-") as folder:
        async with contextlib.AsyncExitStack() as stack:
            found = []
            for number in range(count):
                own = Path(folder) / str(number)
                own.mkdir()
                found.append(await stack.enter_async_context(serving(own, config)))
            await asyncio.sleep(3)
            yield found


async def goodput(ports: list[int], clients: int, seconds: float) -> Load:
    load = Load()
    async with httpx2.AsyncClient(
        trust_env=False, timeout=None, limits=httpx2.Limits(max_connections=None)
    ) as http:
        until = time.monotonic() + seconds
        await asyncio.gather(
            *(load.ask(http, ports[n % len(ports)], until) for n in range(clients))
        )
    return load


async def moves(gateways: list[Served], engines: list[FakeEngine]) -> list[float]:
    """One gateway is asked for all slots at once, then the other: seconds until all of them are in use."""
    found = []
    for number in range(MOVES):
        port = gateways[number % len(gateways)].port
        async with httpx2.AsyncClient(trust_env=False, timeout=None) as http:
            began = time.monotonic()
            asks = [
                asyncio.create_task(
                    http.post(f"http://127.0.0.1:{port}{CHAT}", json=body_for(CHAT))
                )
                for _ in range(SLOTS * len(engines))
            ]
            while sum(one.running for one in engines) < SLOTS * len(engines):
                await asyncio.sleep(0.002)
                if time.monotonic() > began + 5:
                    break
            found.append(time.monotonic() - began)
            await asyncio.gather(*asks)
        await asyncio.sleep(
            1.2
        )  # the peak of the last second is over: the idle gateways share alike
    return found


async def alone(seconds: float) -> float:
    """What the engines serve a second when each slot has a client of its own."""
    async with FakeEngine(slots=SLOTS) as left, FakeEngine(slots=SLOTS) as right:
        for engine in (left, right):
            engine.always(chat_stream(tokens=TOKENS, every_s=EVERY_S))
        load = await goodput([left.port, right.port], 2 * SLOTS, seconds)
        return load.served / seconds


async def commands(redis: RedisServer) -> int:
    return int((await redis.command("INFO", "stats"))["total_commands_processed"])


async def main(seconds: float) -> None:
    capacity = await alone(seconds)
    print(
        f"{'gateways':28} {'served/s':>9} {'of engines':>11} {'failed':>7} {'p95 s':>7} {'peak':>7}"
    )
    print(f"{'none, 8 clients':28} {capacity:9.1f} {1:11.2f}")
    for name, count, used, shared in (
        ("1, no Redis", 1, 1, False),
        ("1 with Redis", 1, 1, True),
        ("2, load on both", 2, 2, True),
        ("3, load on all", 3, 3, True),
        ("3, load on one", 3, 1, True),
    ):
        async with contextlib.AsyncExitStack() as stack:
            redis = await stack.enter_async_context(redis_server()) if shared else None
            engines = [await stack.enter_async_context(FakeEngine(slots=SLOTS)) for _ in range(2)]
            for engine in engines:
                engine.always(chat_stream(tokens=TOKENS, every_s=EVERY_S))
            gateways = await stack.enter_async_context(fleet(count, redis, engines))
            before = await commands(redis) if redis else 0
            ports = [one.port for one in gateways][:used]
            load = await goodput(ports, 24, seconds)
            asked = (await commands(redis) - before) / seconds / count if redis else 0
            p95 = statistics.quantiles(load.times, n=20)[-1]
            peak = "/".join(str(one.peak) for one in engines)
            rate = load.served / seconds
            print(
                f"{name:28} {rate:9.1f} {rate / capacity:11.2f} {load.failed:7} {p95:7.2f} {peak:>7}"
                f"   {asked:.0f} commands/s of Redis a gateway"
            )
            if name == "2, load on both":
                for engine in engines:
                    engine.normal()
                    engine.always(chat_stream(tokens=2, every_s=0.6))
                took = sorted(await moves(gateways, engines))
                print(
                    f"{'':4}all slots of an idle gateway in use: median {took[len(took) // 2] * 1e3:.0f} ms,"
                    f" worst {took[-1] * 1e3:.0f} ms of {len(took)}"
                )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=20)
    asyncio.run(main(parser.parse_args().seconds))
