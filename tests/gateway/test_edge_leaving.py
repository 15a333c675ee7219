"""The client that leaves is seen, in whatever state its request is; and the app can break a connection."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any

import pytest

from gateway.api import tcp
from tests.fakes.asgi import answer, body_of, edge_before, edge_of, on_both_loops
from tests.fakes.raw_client import RawClient, encode
from tests.fakes.running import eventually, run, slack

LEAVE: dict[str, Callable[[RawClient], None]] = {
    "fin": RawClient.close,
    "half-close": RawClient.half_close,
    "rst": RawClient.rst,
}


class Waiting:
    """An app that never answers by itself: it notes how it learns that the client left."""

    def __init__(self, *, stream: bool = False) -> None:
        self.stream = stream
        self.started = 0
        self.calls = 0
        self.received: list[str] = []
        self.edges: list[Any] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await body_of(receive)
        edge = edge_of(scope)
        self.edges.append(edge)
        edge.on_gone(self._called)
        if self.stream:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"data: 1\n\n", "more_body": True})
        self.started += 1
        self.received.append((await receive())["type"])
        await send({"type": "http.response.body", "body": b"late", "more_body": True})

    def _called(self) -> None:
        self.calls += 1


@pytest.mark.parametrize("way", LEAVE)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("behind", [b"", encode("GET", "/2"), b"GET /2 HT", b"x" * 60_000])
def test_the_client_is_seen_leaving_at_once(way: str, stream: bool, behind: bytes) -> None:
    """Law 3. Plain uvicorn stops reading when a second request is behind the first, and sees nothing."""

    async def main() -> None:
        app = Waiting(stream=stream)
        async with edge_before(app) as server:
            client = await RawClient.connect(server.port)
            await client.request("POST", "/", body=b"{}")
            await eventually(lambda: app.started)
            if stream:
                await client.until(b"data: 1\n\n")
            if behind:
                await client.send(behind)
                await asyncio.sleep(0.02)
            assert app.calls == 0
            loop = asyncio.get_running_loop()
            before = loop.time()
            LEAVE[way](client)
            await eventually(lambda: app.received)
            assert loop.time() - before < slack()
            assert app.received == ["http.disconnect"]
            assert app.calls == 1
            assert app.edges[0].gone
            await eventually(lambda: not server.connections)
            assert app.started == 1  # what was behind is not served for somebody who left
            client.close()

    run(main())


@pytest.mark.parametrize("way", LEAVE)
def test_a_client_that_leaves_within_its_request_is_seen_too(way: str) -> None:
    async def main() -> None:
        seen: list[bytes | None] = []

        async def app(_: Any, receive: Any, __: Any) -> None:
            seen.append(await body_of(receive))

        async with edge_before(app) as server:
            client = await RawClient.connect(server.port)
            await client.send(b"POST / HTTP/1.1\r\nContent-Length: 100\r\n\r\nabc")
            await asyncio.sleep(0.05)
            LEAVE[way](client)
            await eventually(lambda: seen)
            assert seen == [None]
            client.close()

    run(main())


def test_who_asks_after_the_client_has_left_is_told_at_once() -> None:
    async def main() -> None:
        left = asyncio.Event()
        calls: list[str] = []

        async def app(scope: Any, receive: Any, send: Any) -> None:
            await body_of(receive)
            await receive()
            edge_of(scope).on_gone(lambda: calls.append("told"))
            assert calls == ["told"]
            await answer(send)  # goes nowhere, and harms nobody
            left.set()

        async with edge_before(app) as server:
            client = await RawClient.connect(server.port)
            await client.request("GET", "/")
            await asyncio.sleep(0.02)
            client.close()
            await asyncio.wait_for(left.wait(), 10 * slack())

    run(main())


def test_nobody_has_left_when_the_answer_was_complete() -> None:
    async def main() -> None:
        calls: list[str] = []
        after: list[Any] = []

        async def app(scope: Any, receive: Any, send: Any) -> None:
            edge_of(scope).on_gone(lambda: calls.append("gone"))
            await answer(send)
            after.extend((await receive(), edge_of(scope).gone))

        async with edge_before(app) as server:
            client = await RawClient.connect(server.port)
            await client.request("GET", "/")
            await client.response()
            client.rst()
            await eventually(lambda: not server.connections)
        assert calls == []
        assert after == [{"type": "http.disconnect"}, False]

    run(main())


@on_both_loops
async def test_abort_breaks_the_connection_visibly() -> None:
    """Plain uvicorn offers no way: the app returns early and the client sees a proper FIN."""
    calls: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        edge = edge_of(scope)
        edge.on_gone(lambda: calls.append("gone"))
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"data: 1\n\n", "more_body": True})
        await asyncio.sleep(0.02)
        edge.abort()
        edge.abort()
        assert edge.gone
        assert (await receive())["type"] == "http.disconnect"

    async with edge_before(app) as server:
        for version in ("1.0", "1.1"):
            async with await RawClient.connect(server.port) as client:
                await client.request("GET", "/", version=version)
                response = await client.response()
                assert (response.body, response.ended) == (b"data: 1\n\n", "reset")
                await eventually(lambda: not server.connections)
    assert calls == []  # who breaks it needs not be told


@on_both_loops
async def test_a_writer_that_waits_for_room_is_woken_when_the_client_leaves() -> None:
    ended = asyncio.Event()

    async def app(scope: Any, _: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while not edge_of(scope).gone:
            await send({"type": "http.response.body", "body": b"x" * 65_536, "more_body": True})
        ended.set()

    async with edge_before(app) as server:
        client = await RawClient.connect(server.port, rcvbuf=4096)
        await client.request("GET", "/")
        await asyncio.sleep(0.2)
        assert not ended.is_set()
        client.rst()
        await asyncio.wait_for(ended.wait(), 10 * slack())


def test_sockets_are_kept_alive_and_send_at_once() -> None:
    """Law 3: vanished clients within 60 s. Plain uvicorn leaves it to the system: two hours."""

    async def main() -> None:
        found: dict[str, int] = {}

        async def app(scope: Any, _: Any, send: Any) -> None:
            sock = edge_of(scope).edge.transport.get_extra_info("socket")
            for level, name in (
                ("SOL_SOCKET", "SO_KEEPALIVE"),
                ("IPPROTO_TCP", "TCP_NODELAY"),
                ("IPPROTO_TCP", "TCP_KEEPIDLE"),
                ("IPPROTO_TCP", "TCP_KEEPINTVL"),
                ("IPPROTO_TCP", "TCP_KEEPCNT"),
            ):
                found[name] = sock.getsockopt(getattr(socket, level), getattr(socket, name))
            assert not tcp.is_unanswered(edge_of(scope).edge.transport)
            await answer(send)

        async with (
            edge_before(app) as server,
            await RawClient.connect(server.port) as client,
        ):
            await client.request("GET", "/")
            assert (await client.response()).status == 200
        assert found["SO_KEEPALIVE"] == 1
        assert found["TCP_NODELAY"] == 1
        dead_after_s = found["TCP_KEEPIDLE"] + found["TCP_KEEPINTVL"] * found["TCP_KEEPCNT"]
        assert dead_after_s <= 60

    run(main())
