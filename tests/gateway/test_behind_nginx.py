"""A live gateway behind the nginx and the Caddy that deploy/ configures: what a client gets is what the gateway says.

Events come one by one, leaving is seen by the engine, refusals keep their status, headers and words, and nothing is
ever sent twice.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import ssl
import subprocess
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.fakes.connection import Connection, Script
from tests.fakes.engine import FakeEngine
from tests.fakes.gateway import Running, running_gateway
from tests.fakes.raw_client import RawClient
from tests.fakes.running import eventually, in_loop, slack
from tests.fakes.scripts import RST, chat_stream, drop, events_of, hang, raw
from tests.gateway.fronts import CERTS, KINDS, Front, caddy_version, front, host_of
from tests.gateway.line_talk import CHAT, asking, body_for

every_front = pytest.mark.parametrize("kind", KINDS)


@dataclass(frozen=True, slots=True)
class Site:
    """An engine, a gateway, and a proxy in front of it."""

    engine: FakeEngine
    slotgate: Running
    front: Front

    async def asking(self, path: str = CHAT, **fields: Any) -> RawClient:
        """A client of the proxy that has sent its whole request."""
        client = await RawClient.connect(self.front.port)
        headers = {"Content-Type": "application/json", **self.slotgate.header()}
        body = json.dumps(body_for(path, **fields)).encode()
        await client.request("POST", path, headers=headers | host_of(self.front), body=body)
        return client


@contextlib.asynccontextmanager
async def site(kind: str, folder: Path, slots: int = 2, **config: Any) -> AsyncIterator[Site]:
    async with (
        FakeEngine(slots=slots) as engine,
        running_gateway(engine, keys=["alice"], lag_limit_s=1, **config) as slotgate,
        front(kind, slotgate.port, folder) as at,
    ):
        yield Site(engine, slotgate, at)


def one_by_one(events: list[bytes], seen: asyncio.Semaphore) -> Script:
    """A stream whose next event is written only when the one before has been seen: what holds events back hangs."""

    async def script(connection: Connection) -> None:
        await connection.begin(content_type="text/event-stream")
        for event in events:
            await seen.acquire()
            await connection.body(event)
        await connection.end()

    return script


@every_front
@in_loop
async def test_a_stream_arrives_event_by_event_and_byte_for_byte(kind: str, tmp_path: Path) -> None:
    events, seen = events_of(CHAT, tokens=20), asyncio.Semaphore(1)
    async with site(kind, tmp_path) as at:
        at.engine.script(one_by_one(events, seen))
        async with await at.asking(stream=True) as client:
            head = await client.head()
            assert head.status == 200
            assert head.header("x-slotgate-backend") == "b1"
            assert (head.header("content-type") or "").startswith("text/event-stream")
            for event in events:
                got = b""
                while len(got) < len(event):
                    got += await asyncio.wait_for(client.chunk(), 10 * slack())
                assert got == event
                seen.release()
            assert await client.chunk() == b"", "it ended as a whole"


@every_front
@in_loop
async def test_a_client_that_hangs_up_in_a_stream_is_off_the_engine_at_once(
    kind: str, tmp_path: Path
) -> None:
    async with site(kind, tmp_path) as at:
        at.engine.script(chat_stream(tokens=10_000, every_s=0.02))
        client = await at.asking(stream=True)
        await client.head()
        await client.chunk()
        client.rst()
        await at.engine.until(lambda: at.engine.inside == 0, within_s=5)


@every_front
@in_loop
async def test_a_client_that_hangs_up_in_silence_is_off_the_engine_and_out_of_the_queue(
    kind: str, tmp_path: Path
) -> None:
    async with site(kind, tmp_path, slots=1, admission={"queue": 2}) as at:
        at.engine.always(hang(), path=CHAT)
        runs = await at.asking()
        await at.engine.until(lambda: at.engine.inside == 1)
        waits = await at.asking(stream=True)
        await eventually(lambda: _waiting(at.slotgate, 1))
        waits.close()
        await eventually(lambda: _waiting(at.slotgate, 0), within_s=5)
        runs.close()
        await at.engine.until(lambda: at.engine.inside == 0, within_s=5)
        assert len(at.engine.requests) == 1


async def _waiting(slotgate: Running, count: int) -> bool:
    return await slotgate.metric("queue_depth", model="m") == count


@every_front
@in_loop
async def test_a_503_comes_through_with_its_retry_after_and_its_words(
    kind: str, tmp_path: Path
) -> None:
    async with site(kind, tmp_path, slots=1, admission={"queue": 0}) as at:
        at.engine.always(hang(), path=CHAT)
        async with await at.asking():
            await at.engine.until(lambda: at.engine.inside == 1)
            async with await at.asking() as client:
                refused = await client.response()
            async with await asking(at.slotgate) as direct:
                plain = await direct.response()
            assert refused.status == plain.status == 503
            assert refused.json()["error"]["code"] == "gateway_queue_full"
            for name in ("retry-after", "retry-after-ms", "x-request-id", "content-type"):
                assert refused.header(name), name
            assert 1 <= int(refused.header("retry-after") or 0) <= 60
            assert len(at.engine.requests) == 1


@every_front
@in_loop
async def test_a_generation_that_broke_is_not_sent_again(kind: str, tmp_path: Path) -> None:
    async with site(kind, tmp_path) as at:
        at.engine.always(drop(RST, after_s=0.05), path=CHAT)
        async with await at.asking() as client:
            answer = await client.response()
        assert answer.status == 502
        assert answer.json()["error"]["code"] == "upstream_failed"
        assert answer.header("x-should-retry") == "false"
        assert len(at.engine.requests) == 1


@every_front
@in_loop
async def test_a_stream_that_breaks_does_not_look_finished(kind: str, tmp_path: Path) -> None:
    if kind == "caddy" and caddy_version() < (2, 8):
        pytest.skip(
            "Caddy before 2.8 ends broken streams as if they were whole; its Caddyfile says so"
        )
    async with site(kind, tmp_path) as at:
        half = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
        at.engine.script(raw(half + b'8\r\ndata: {"\r\n', 0.1, RST))
        async with await at.asking(stream=True) as client:
            assert (await client.response()).ended != "whole"


@every_front
@in_loop
async def test_paths_keys_and_large_bodies_reach_the_gateway_as_they_were_sent(
    kind: str, tmp_path: Path
) -> None:
    async with site(kind, tmp_path, limits={"body_mib": 1}) as at:
        for path, status in (
            ("/healthz", 200), ("//v1/models", 200), ("/v1/models/", 200), ("/v1/../metrics", 404),
            ("/v1/models/a%2Fb", 404), ("/metrics", 403),
        ):  # fmt: skip
            async with await RawClient.connect(at.front.port) as client:
                await client.request("GET", path, headers=at.slotgate.header() | host_of(at.front))
                got = await client.response()
            if kind == "nginx" and ".." in path:
                assert got.status in (403, 404), (
                    "nginx resolves it: the gateway then says what it says of /metrics"
                )
                continue
            assert got.status == status, path
        async with await at.asking(padding="x" * 1_500_000) as client:
            refused = await client.response()
        assert (refused.status, refused.json()["error"]["code"]) == (413, "body_too_large")
        async with await at.asking(padding="x" * 900_000) as client:
            assert (await client.response()).status == 200


@every_front
@in_loop
async def test_a_websocket_is_told_426(kind: str, tmp_path: Path) -> None:
    async with site(kind, tmp_path) as at, await RawClient.connect(at.front.port) as client:
        headers = {"Connection": "Upgrade", "Upgrade": "websocket", **host_of(at.front)}
        await client.request("GET", "/v1/responses", headers=at.slotgate.header() | headers)
        assert (await client.response()).status == 426


@in_loop
async def test_over_tls_streams_arrive_event_by_event_too(tmp_path: Path) -> None:
    context = ssl.create_default_context(cafile=CERTS / "ca.pem")
    events, seen = events_of(CHAT, tokens=5), asyncio.Semaphore(1)
    async with site("nginx", tmp_path) as at:
        at.engine.script(one_by_one(events, seen))
        url = f"https://localhost:{at.front.tls_port}"
        async with (
            httpx2.AsyncClient(verify=context, trust_env=False, base_url=url) as client,
            asyncio.timeout(20 * slack()),
            client.stream(
                "POST", CHAT, json=body_for(CHAT, stream=True), headers=at.slotgate.header()
            ) as answer,
        ):
            got = b""
            async for piece in answer.aiter_raw():
                got += piece
                if got in _beginnings(events):
                    seen.release()
        assert got == b"".join(events)


def _beginnings(events: list[bytes]) -> set[bytes]:
    """Of the stream, up to the end of each event."""
    return {b"".join(events[:number]) for number in range(1, len(events) + 1)}


@in_loop
async def test_leaving_an_http2_stream_frees_the_slot(tmp_path: Path) -> None:
    """curl speaks HTTP/2 to nginx; a client there leaves a stream without closing the connection."""
    curl = _curl_with_http2()
    async with site("nginx", tmp_path) as at:
        at.engine.script(chat_stream(tokens=10_000, every_s=0.05))
        process = await asyncio.create_subprocess_exec(
            curl, "-sN", "--http2", "--max-time", "1", "--cacert", str(CERTS / "ca.pem"),
            "-w", "%{http_version}", "-H", f"Authorization: {at.slotgate.header()['Authorization']}",
            "-d", json.dumps(body_for(CHAT, stream=True)), f"https://localhost:{at.front.tls_port}{CHAT}",
            stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        out, _ = await asyncio.wait_for(process.communicate(), 20 * slack())
        assert out.startswith(b"data: ")
        assert out.endswith(b"2"), "it was not HTTP/2"
        await at.engine.until(lambda: at.engine.inside == 0, within_s=5)


def _curl_with_http2() -> str:
    curl = shutil.which("curl")
    if curl is None:
        pytest.skip("no curl on PATH")
    features = subprocess.run([curl, "-V"], capture_output=True, text=True, check=True).stdout
    if "HTTP2" not in features:
        pytest.skip("this curl speaks no HTTP/2")
    return curl
