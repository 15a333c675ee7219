"""Law 3: a client that leaves is acted on within a second, in whatever phase its request is. Cases B001, B002, B003."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest

from gateway.core.fleet import Fitness
from tests.fakes.engine import FakeEngine
from tests.fakes.gateway import Running, running_gateway
from tests.fakes.raw_client import RawClient
from tests.fakes.running import eventually, in_loop, slack
from tests.fakes.scripts import HANG, chat_stream, hang
from tests.gateway.line_talk import CHAT, GENERATING, STREAMING, asking

LEAVING = ["fin", "rst"]


def leave(client: RawClient, how: str) -> None:
    (client.rst if how == "rst" else client.fin)()


@contextlib.asynccontextmanager
async def one_engine(**config: Any) -> AsyncIterator[tuple[FakeEngine, Running]]:
    async with FakeEngine(slots=2) as engine, running_gateway(engine, **config) as slotgate:
        yield engine, slotgate


async def is_acted_on(engine: FakeEngine, slotgate: Running, count: int = 1) -> None:
    """The engine's connection is gone within a second, and it was nobody's fault but the client's."""
    await engine.until(engine.requests[-1].connection.left.is_set, within_s=1)
    await eventually(lambda: slotgate.metric("requests_total", outcome="client_gone"), within_s=1)
    assert await slotgate.outcomes() == {"client_gone": count}
    assert await slotgate.metric("backend_errors_total") == 0
    assert await slotgate.metric("retries_total") == 0
    assert (await slotgate.status())["backends"][0]["breaker"] == "closed"


@pytest.mark.parametrize("how", LEAVING)
@pytest.mark.parametrize("path", GENERATING)
@in_loop
async def test_a_caller_of_any_route_that_hangs_up_in_silence_frees_the_engine(
    path: str, how: str
) -> None:
    async with one_engine() as (engine, slotgate):
        engine.always(hang())
        async with await asking(slotgate, path) as client:
            await engine.until_requests(1)
            leave(client, how)
            await is_acted_on(engine, slotgate)


@pytest.mark.parametrize("how", LEAVING)
@pytest.mark.parametrize(
    "silence", ["before headers", "after headers", "with comments", "with a lone token"]
)
@in_loop
async def test_a_streaming_client_that_leaves_before_or_after_the_first_token_frees_the_engine(
    silence: str, how: str
) -> None:
    scripts = {
        "before headers": hang(),
        "after headers": hang(headers=True),
        "with comments": hang(comments_every_s=0.05),
        "with a lone token": chat_stream(tokens=1, whole=False, then=HANG),
    }

    async with one_engine() as (engine, slotgate):
        engine.always(scripts[silence])
        async with await asking(slotgate, stream=True) as client:
            await engine.until_requests(1)
            if silence != "before headers":
                assert (await client.head()).status == 200
            leave(client, how)
            await is_acted_on(engine, slotgate)
            counted = await slotgate.metric("ttft_seconds_count")
            assert counted == (silence == "with a lone token")


@pytest.mark.parametrize("goes_on", [True, False])
@pytest.mark.parametrize("path", STREAMING)
@in_loop
async def test_a_client_that_leaves_in_the_stream_stops_the_generation(
    path: str, goes_on: bool
) -> None:
    """Also when the engine falls silent, so that no write would ever fail."""
    async with one_engine() as (engine, slotgate):
        then = {} if goes_on else {"then": HANG}
        tokens = 400 if goes_on else 3
        engine.always(chat_stream(tokens, 0.05, path=path, whole=goes_on, **then))
        async with await asking(slotgate, path, stream=True) as client:
            await client.head()
            for _ in range(3):
                await client.chunk()
        await is_acted_on(engine, slotgate)
        written = len(engine.requests[0].connection.written)
        assert written < 10 + 20 * slack(), f"{written} events for a client that read three"


@in_loop
async def test_a_client_that_leaves_while_the_gateway_still_connects_leaves_nothing_behind() -> (
    None
):
    """A listener whose queue of connections is full answers no SYN."""
    async with _that_never_accepts() as port, FakeEngine() as engine:
        backends = [engine, {"url": f"http://127.0.0.1:{port}", "models": ["deaf"]}]
        async with running_gateway(*backends, wait=False) as slotgate:
            slotgate.models.add("deaf")
            gateway = slotgate.gateway
            now = gateway.dispatcher.now()
            gateway.dispatcher.dispatch.report(now, "b2", Fitness.UP, None, now)
            async with await asking(slotgate, model="deaf"):
                await eventually(lambda: slotgate.metric("in_flight", backend="b2"))
            await eventually(lambda: gateway.backends.known["b2"].upstream.open_connections == 0, 1)
            assert await slotgate.metric("in_flight") == 0
            assert await slotgate.metric("backend_errors_total") == 0


@contextlib.asynccontextmanager
async def _that_never_accepts() -> AsyncIterator[int]:
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket())
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        for _ in range(4):
            filler = stack.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(listener.getsockname())
        await asyncio.sleep(0)
        yield listener.getsockname()[1]


@in_loop
async def test_clients_that_come_and_go_quickly_leave_an_engine_that_serves_at_once() -> None:
    async with one_engine(admission={"queue": 100}) as (engine, slotgate):
        engine.script(*[hang()] * 40)
        for number in range(40):
            client = await asking(slotgate, stream=bool(number % 2))
            if number % 3:
                await asyncio.sleep(0.002 * (number % 5))
            leave(client, LEAVING[number % 2])
            client.close()
        engine.normal()
        answer = await asyncio.wait_for(slotgate.chat(), 5 * slack())
        assert answer.status_code == 200
        outcomes = await slotgate.outcomes()
        assert outcomes["served"] == 1
        assert set(outcomes) <= {"served", "client_gone"}


@in_loop
async def test_a_pipelining_client_that_leaves_is_noticed_too() -> None:
    async with one_engine() as (engine, slotgate):
        engine.always(hang())
        async with await asking(slotgate) as client:
            await engine.until_requests(1)
            await client.request("POST", CHAT, body=b"{}")
            client.fin()
            await engine.until(engine.requests[0].connection.left.is_set, within_s=1)
            await eventually(lambda: slotgate.metric("requests_total", outcome="client_gone"))
