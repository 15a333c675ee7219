"""Clients that are slow, silent or too many, and a process that has no descriptors left: the others are served."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import sys
from pathlib import Path

import pytest

from tests.fakes.engine import FakeEngine
from tests.fakes.gateway import running_gateway
from tests.fakes.raw_client import RawClient, RawResponse
from tests.fakes.running import eventually, in_loop
from tests.gateway.served import serving

SLOW = 150


@in_loop
async def test_a_crowd_of_half_sent_requests_holds_up_nobody() -> None:
    """Heads without end, bodies without end, and connections that say nothing: none of them takes a place."""
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Slow: "
    part = b"POST /v1/chat/completions HTTP/1.1\r\nHost: h\r\nContent-Length: 900000\r\n\r\n{"
    async with (
        FakeEngine(slots=1) as engine,
        running_gateway(engine, admission={"queue": 1}, check=False) as slotgate,
        contextlib.AsyncExitStack() as stack,
    ):
        for number in range(SLOW):
            client = await stack.enter_async_context(await RawClient.connect(slotgate.port))
            await client.send((head, part, b"", b"\r\n\r\n")[number % 4] or b"\r\n")
        for _ in range(5):
            assert (await slotgate.chat()).status_code == 200
        assert await slotgate.metric("queue_depth") == 0
        assert len(engine.requests) == 5


@in_loop
async def test_streams_that_nobody_reads_hold_up_only_themselves() -> None:
    async with (
        FakeEngine("openai", slots=9) as engine,
        running_gateway({"url": engine.url, "slots": 9}, check=False) as slotgate,
        contextlib.AsyncExitStack() as stack,
    ):
        slotgate.engines = [engine]
        engine.behaviour.tokens = 20_000
        body = b'{"model":"m","stream":true,"max_tokens":20000,"messages":[]}'
        for _ in range(6):
            client = await stack.enter_async_context(
                await RawClient.connect(slotgate.port, rcvbuf=4096)
            )
            await client.request("POST", "/v1/chat/completions", body=body)
        await engine.until_requests(6)
        assert (await slotgate.chat(max_tokens=3)).status_code == 200
        assert await slotgate.metric("in_flight") == 6


@pytest.mark.skipif(sys.platform != "linux", reason="prlimit and /proc are Linux's")
@in_loop
async def test_a_gateway_out_of_descriptors_recovers_with_its_backends(tmp_path: Path) -> None:
    """Neither the clients that it cannot take nor the engine that it cannot reach are lost for good."""
    async with (
        FakeEngine(slots=4) as engine,
        serving(tmp_path, {"backends": [{"url": engine.url}]}) as served,
    ):
        pid = served.process.pid
        used = _descriptors(pid)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (used + 6, used + 6))
        crowd = []
        for _ in range(40):
            with contextlib.suppress(OSError):
                crowd.append(await RawClient.connect(served.port))
        for client in crowd:  # some of them are in, and no descriptor is left for the engine
            with contextlib.suppress(OSError, TimeoutError):
                await client.request("POST", "/v1/chat/completions", body=b'{"model":"m"}')
        await asyncio.sleep(0.5)
        for client in crowd:
            client.close()

        async def serves() -> bool:
            with contextlib.suppress(Exception):  # still crowded
                async with await served.asking() as client:
                    return (await client.response(patience_s=2)).status == 200
            return False

        await eventually(serves, within_s=30, why="it did not recover")
        assert (await served.get("/readyz")).status == 200


@pytest.mark.skipif(sys.platform != "linux", reason="prlimit and /proc are Linux's")
@in_loop
async def test_a_want_of_descriptors_is_no_fault_of_the_backend_that_was_not_dialled(
    tmp_path: Path,
) -> None:
    async with (
        FakeEngine("openai") as one,
        FakeEngine("openai") as other,
        serving(tmp_path, {"backends": [{"url": one.url}, {"url": other.url}]}) as served,
        contextlib.AsyncExitStack() as stack,
    ):
        pid = served.process.pid
        client = await stack.enter_async_context(await RawClient.connect(served.port))
        assert (await asked(client, "GET", "/healthz")).status == 200
        enough = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        limit = _descriptors(pid) + 8
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (limit, enough[1]))
        full = 0
        while full < 20:  # looks in a row: a probe that is just under way gives its one back
            if _descriptors(pid, below=limit) < limit:
                full = 0
                crowd = await RawClient.connect(served.port)
                await stack.enter_async_context(crowd)
                assert (await asked(crowd, "GET", "/healthz")).status == 200
            full += 1
            await asyncio.sleep(0.01)
        refused = await asked(client, "POST", "/v1/chat/completions", CHAT)
        assert (refused.status, refused.json()["error"]["code"]) == (502, "upstream_failed")
        assert not one.requests + other.requests
        resource.prlimit(pid, resource.RLIMIT_NOFILE, enough)
        assert (await asked(client, "POST", "/v1/chat/completions", CHAT)).status == 200
        await eventually(lambda: any("ulimit -n" in line for line in served.log))
        assert not any('"state":"failing"' in line for line in served.log)


async def asked(client: RawClient, method: str, path: str, body: bytes = b"") -> RawResponse:
    await client.request(method, path, body=body)
    return await client.response()


CHAT = b'{"model":"m","messages":[{"role":"user","content":"x"}]}'


def _descriptors(pid: int, below: int = sys.maxsize) -> int:
    return sum(int(each.name) < below for each in Path(f"/proc/{pid}/fd").iterdir())
