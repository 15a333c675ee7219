"""The process: the first TERM drains while it listens, the second ends it; both with status 0. B112, B113."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.engine import FakeEngine
from tests.fakes.raw_client import RawClient
from tests.fakes.running import eventually, in_loop, slack
from tests.fakes.scripts import chat_stream, hang
from tests.gateway.line_talk import CHAT
from tests.gateway.served import Served, serving


def config_for(engine: FakeEngine, **more: Any) -> dict[str, Any]:
    return {"backends": [{"url": engine.url}], "admission": {"queue": 3}, "drain_s": 20, **more}


async def _ready(served: Served, status: int) -> bool:
    return (await served.get("/readyz")).status == status


async def _streams(served: Served, stack: contextlib.AsyncExitStack, count: int) -> list[RawClient]:
    clients = []
    for _ in range(count):
        clients.append(await stack.enter_async_context(await served.asking(stream=True)))
        assert (await clients[-1].head()).status == 200
    return clients


async def _rest(client: RawClient) -> bytes:
    """What is left of a chunked stream; fails when it is cut."""
    out = b""
    while data := await client.chunk():
        out += data
    return out


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@in_loop
async def test_the_first_signal_lets_streams_and_those_who_wait_finish(
    number: int, tmp_path: Path
) -> None:
    async with (
        FakeEngine(slots=2) as engine,
        serving(tmp_path, config_for(engine)) as served,
        contextlib.AsyncExitStack() as stack,
    ):
        engine.always(chat_stream(tokens=30, every_s=0.05))
        streams = await _streams(served, stack, 2)
        waiting = await stack.enter_async_context(await served.asking(stream=True))
        kept = await stack.enter_async_context(await RawClient.connect(served.port))
        await kept.request("GET", "/healthz")
        assert (await kept.response()).status == 200

        served.signal(number)
        await eventually(lambda: _ready(served, 503), within_s=2)
        assert (await served.get("/healthz")).status == 200
        for late in (kept, await stack.enter_async_context(await served.asking())):
            if late is kept:
                await late.request("POST", CHAT, body=b'{"model":"m"}')
            refused = await late.response()
            assert refused.status == 503
            assert refused.json()["error"]["code"] == "draining"
            assert refused.header("connection") == "close"
            assert refused.header("retry-after") == "2"
            assert await late.ending() == "fin"

        for stream in streams:
            assert (await _rest(stream)).endswith(b"data: [DONE]\n\n")
        assert (await waiting.head()).status == 200
        assert (await _rest(waiting)).endswith(b"data: [DONE]\n\n")
        since = time.monotonic()
        assert await served.status() == 0
        assert time.monotonic() - since < 5 * slack(), "it ends right after the last"
        assert len(engine.requests) == 3


@in_loop
async def test_a_second_signal_ends_it_at_once(tmp_path: Path) -> None:
    async with (
        FakeEngine() as engine,
        serving(tmp_path, config_for(engine)) as served,
        contextlib.AsyncExitStack() as stack,
    ):
        engine.always(chat_stream(tokens=1000, every_s=0.05))
        (stream,) = await _streams(served, stack, 1)
        served.signal()
        await eventually(lambda: _ready(served, 503), within_s=2)
        since = time.monotonic()
        served.signal()
        assert await served.status() == 0
        assert time.monotonic() - since < 5 * slack()
        await stream.ending()
        assert b"[DONE]" not in stream.buffer
        assert not bytes(stream.buffer).endswith(b"0\r\n\r\n"), "a broken stream looks finished"


@in_loop
async def test_at_the_limit_of_draining_streams_get_an_error_and_it_ends_with_status_0(
    tmp_path: Path,
) -> None:
    async with (
        FakeEngine() as engine,
        serving(tmp_path, config_for(engine, drain_s=0.5)) as served,
        contextlib.AsyncExitStack() as stack,
    ):
        engine.script(chat_stream(tokens=1000, every_s=0.05), hang())
        (stream,) = await _streams(served, stack, 1)
        silent = await stack.enter_async_context(await served.asking())
        await engine.until_requests(2)
        waiting = await stack.enter_async_context(await served.asking())
        served.signal()
        rest = await _rest(stream)
        assert b'"code": "draining"' in rest
        assert b"[DONE]" not in rest
        for client in (silent, waiting):
            refused = await client.response()
            assert refused.status == 503
            assert refused.json()["error"]["code"] == "draining"
        assert await served.status() == 0
        await engine.until(lambda: engine.inside == 0, within_s=1)


@in_loop
async def test_a_gateway_without_work_ends_at_once(tmp_path: Path) -> None:
    async with FakeEngine() as engine, serving(tmp_path, config_for(engine)) as served:
        served.signal()
        assert await served.status(within_s=5) == 0
        assert not [line for line in served.log if "Traceback" in line]


PROXIES = {
    "HTTP_PROXY": "http://127.0.0.1:9",
    "HTTPS_PROXY": "http://127.0.0.1:9",
    "ALL_PROXY": "socks5h://127.0.0.1:9",
    "NO_PROXY": "10.0.0.0/8,localhost",
}


@pytest.mark.parametrize("names", [["HTTP_PROXY"], ["ALL_PROXY"], list(PROXIES)])
@in_loop
async def test_proxies_of_the_environment_are_not_asked(names: list[str], tmp_path: Path) -> None:
    environ = {name: PROXIES[name] for name in names}
    environ |= {name.lower(): value for name, value in environ.items()}

    async with (
        FakeEngine() as engine,
        serving(tmp_path, config_for(engine), environ) as served,
    ):
        await eventually(lambda: _ready(served, 200))
        async with await served.asking() as client:
            assert (await asyncio.wait_for(client.response(), 10 * slack())).status == 200
        served.signal()
        assert await served.status() == 0
