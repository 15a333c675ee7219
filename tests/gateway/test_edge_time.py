"""Every state in which a client owes something has an end."""

from __future__ import annotations

import asyncio
from typing import Any

from gateway.core.errors import GatewayError
from tests.fakes.asgi import Echo, answer, body_of, edge_before, edge_of, on_both_loops
from tests.fakes.raw_client import RawClient, encode
from tests.fakes.running import eventually, run, slack


@on_both_loops
async def test_a_half_sent_head_is_a_408() -> None:
    """Plain uvicorn waits for ever."""
    async with (
        edge_before(Echo(), headers_s=0.2) as server,
        await RawClient.connect(server.port) as client,
    ):
        await client.request("GET", "/first")  # the clock is the request's, not the connection's
        assert (await client.response()).status == 200
        await client.send(b"POST /v1/messages HTTP/1.1\r\nHost: h\r\n")
        response = await client.response()
        assert (response.status, response.header("connection")) == (408, "close")
        assert response.json()["type"] == "error"
        assert await client.ending() == "fin"


def test_a_head_that_drips_is_a_408_all_the_same() -> None:
    async def main() -> None:
        async with (
            edge_before(Echo(), headers_s=0.3) as server,
            await RawClient.connect(server.port) as client,
        ):
            drip = asyncio.create_task(
                client.send_slowly(b"GET / HTTP/1.1\r\n" + b"X: a\r\n" * 1000, 0.02)
            )
            response = await client.response()
            assert response.status == 408
            assert response.json()["error"]["code"] == "request_timeout"
            drip.cancel()
            await asyncio.gather(drip, return_exceptions=True)

    run(main())


@on_both_loops
async def test_a_silent_connection_is_closed_after_the_keep_alive_time() -> None:
    """Plain uvicorn never closes one that has not sent anything."""
    async with edge_before(Echo(), keepalive_s=0.2) as server:
        for sent in (b"", b"\r\n", b"\r\n\r\n\r\n"):
            async with await RawClient.connect(server.port) as client:
                await client.send(sent)
                assert await client.ending() == "fin"
                assert not client.buffer


@on_both_loops
async def test_only_an_idle_connection_is_closed() -> None:
    """B051: an agent between its turns keeps its connection, and a long answer is not idleness."""

    async def app(scope: Any, _: Any, send: Any) -> None:
        await asyncio.sleep(float(scope["query_string"]))
        await answer(send)

    async with (
        edge_before(app, keepalive_s=0.8 * slack()) as server,
        await RawClient.connect(server.port) as client,
    ):
        await client.request("GET", f"/?{1.2 * slack()}")
        assert (await client.response()).status == 200
        for _ in range(4):
            await asyncio.sleep(0.3 * slack())
            await client.request("GET", "/?0")
            assert (await client.response()).status == 200
        assert await client.ending() == "fin"


def test_the_keep_alive_time_is_75_seconds_unless_set() -> None:
    """B051. Plain uvicorn: 5 s, shorter than the pools of its clients."""

    async def main() -> None:
        async with (
            edge_before(Echo()) as server,
            await RawClient.connect(server.port) as client,
        ):
            await client.request("GET", "/")
            await client.response()
            connection: Any = next(iter(server._state.connections))
            left = connection._watch._deadline - asyncio.get_running_loop().time()
            assert 70 < left <= 75.1

    run(main())


@on_both_loops
async def test_a_body_that_stops_coming_is_a_408_and_the_app_knows_why() -> None:
    """Plain uvicorn lets the app wait for ever."""
    ended: list[Any] = []

    async def app(scope: Any, receive: Any, _: Any) -> None:
        edge = edge_of(scope)
        edge.on_gone(lambda: ended.append("called"))
        ended.extend((await body_of(receive), edge.refusal))

    async with (
        edge_before(app, body_silence_s=1.0 * slack()) as server,
        await RawClient.connect(server.port) as client,
    ):
        request = encode("POST", "/v1/x", body=b"a" * 20)
        await client.send(request[:-10])
        await asyncio.sleep(0.6 * slack())
        await client.send(b"a")
        await asyncio.sleep(0.6 * slack())  # the clock runs from the last byte
        assert ended == []
        response = await client.response()
        assert response.status == 408
        assert response.json()["error"]["code"] == "request_timeout"
        assert await client.ending() == "fin"
        called, body, refusal = ended
        assert (called, body) == ("called", None)
        assert isinstance(refusal, GatewayError)
        assert refusal.key == "request_timeout"


def test_a_body_that_nobody_waits_for_has_time() -> None:
    async def app(_: Any, receive: Any, send: Any) -> None:
        await asyncio.sleep(0.4)
        await answer(send, await body_of(receive) or b"")

    async def main() -> None:
        async with (
            edge_before(app, body_silence_s=0.3, headers_s=0.1) as server,
            await RawClient.connect(server.port) as client,
        ):
            request = encode("POST", "/", body=b"whole")
            await client.send(request[:-2])
            await asyncio.sleep(0.5)
            await client.send(request[-2:])
            assert (await client.response()).body == b"whole"

    run(main())


@on_both_loops
async def test_a_client_that_takes_no_byte_is_gone_after_the_stall_time() -> None:
    """B029. Plain uvicorn waits for room for ever."""
    gone = asyncio.Event()

    async def app(scope: Any, _: Any, send: Any) -> None:
        edge_of(scope).on_gone(gone.set)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while not gone.is_set():
            await send({"type": "http.response.body", "body": b"x" * 65_536, "more_body": True})

    limit_s = 0.6 * slack()
    async with (
        edge_before(app, write_stall_s=limit_s) as server,
        await RawClient.connect(server.port, rcvbuf=4096) as client,
    ):
        began = asyncio.get_running_loop().time()
        await client.request("GET", "/")
        await asyncio.wait_for(gone.wait(), 10 * slack())
        took_s = asyncio.get_running_loop().time() - began
        assert limit_s <= took_s + 0.01 < 1.9 * limit_s, "what the kernels take is no second time"
        await eventually(lambda: not server.connections)
        assert await client.ending() == "reset"


def test_a_stalled_socket_goes_when_its_answer_was_complete() -> None:
    """Plain uvicorn keeps it until the client has read all of it."""

    async def app(scope: Any, _: Any, send: Any) -> None:
        headers = [(b"connection", b"close")] if scope["path"] == "/close" else []
        await answer(send, b"x" * 30_000_000, headers=headers)

    async def main() -> None:
        async with edge_before(app, write_stall_s=0.4, keepalive_s=0.2, drain_s=0.2) as server:
            for path in ("/", "/close"):
                async with await RawClient.connect(server.port, rcvbuf=4096) as client:
                    await client.request("GET", path)
                    await client.exactly(1000)
                    await eventually(lambda: not server.connections)

    run(main())


def test_a_slow_reader_that_gets_on_is_left_in_peace() -> None:
    async def app(_: Any, __: Any, send: Any) -> None:
        await answer(send, b"x" * 12_000_000, headers=[(b"connection", b"close")])

    async def main() -> None:
        async with (
            edge_before(app, write_stall_s=slack(), keepalive_s=0.2, drain_s=0.2) as server,
            await RawClient.connect(server.port, rcvbuf=65_536) as client,
        ):
            await client.request("GET", "/")
            await client.head()
            for _ in range(12):  # longer than the stall time in all
                await client.exactly(1_000_000)
                await asyncio.sleep(0.15 * slack())
            assert await client.ending() == "fin"

    run(main())


def test_time_limits_can_be_off() -> None:
    async def main() -> None:
        async with (
            edge_before(
                Echo(), headers_s=0, body_silence_s=0, keepalive_s=0, write_stall_s=0
            ) as server,
            await RawClient.connect(server.port) as client,
        ):
            await asyncio.sleep(0.1)
            await client.send_slowly(encode("POST", "/", body=b"abc"), 0.002)
            assert (await client.response()).body == b"/ abc"

    run(main())
