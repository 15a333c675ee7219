"""Large and early: back-pressure both ways, and answers that come before the request has left (B080, B081)."""

import asyncio
import hashlib
from collections.abc import Callable

import pytest

from gateway.runtime.http1 import HIGH_WATER
from gateway.runtime.upstream import Deadlines, UpstreamError
from tests.gateway.upstream_server import (
    PATIENT,
    SLACK,
    Peer,
    Server,
    answers,
    ask,
    both_loops,
    collect,
    length,
    read_all,
    run,
    until,
)

Loop = Callable[[], asyncio.AbstractEventLoop]
OK = length(b"ok")
MIB = 1024 * 1024


@both_loops
@pytest.mark.parametrize("size", [0, 1, 65_535, 65_536, 65_537, 131_072, 1_000_003, 33 * MIB])
def test_a_body_of_any_size_arrives_whole(new_loop: Loop, size: int) -> None:
    async def main() -> None:
        body = bytes(range(251)) * (size // 251) + b"z" * (size % 251)
        async with Server(answers(OK)) as server:
            upstream = server.upstream()
            for _ in range(2):  # the second on the used connection
                assert (await ask(upstream, body))[1] == b"ok"
            assert server.accepted == 1
            for request in server.requests:
                assert hashlib.md5(request.body).digest() == hashlib.md5(body).digest()
                assert request.all(b"content-length") == [b"%d" % size]

    run(new_loop, main())


@both_loops
@pytest.mark.parametrize("then", ["stay", "FIN", "RST"])
def test_a_refusal_that_comes_while_the_body_is_leaving_is_delivered(
    new_loop: Loop, then: str
) -> None:
    refusal = length(
        b'{"error":"too large"}', status=b"413 Too Large"
    )  # keep-alive, as far as it says

    async def script(peer: Peer) -> None:
        await peer.reader.readuntil(b"\r\n\r\n")
        peer.writer.transport.pause_reading()  # type: ignore[attr-defined]
        await peer.send(refusal)
        if then == "stay":
            await asyncio.sleep(3600)
        elif then == "RST":
            await asyncio.sleep(0.05)
            peer.reset()

    async def main() -> None:
        async with Server(script) as server:
            upstream = server.upstream()
            for _ in range(5):
                response, body = await ask(upstream, b"x" * 20 * MIB)
                assert (response.status, body) == (413, b'{"error":"too large"}')
                assert upstream.idle == 0
            await until(lambda: upstream.open_connections == 0)

    run(new_loop, main())


@both_loops
def test_a_refusal_is_delivered_even_if_a_write_fails_before_it_was_read(new_loop: Loop) -> None:
    async def script(peer: Peer) -> None:
        await peer.reader.readuntil(b"\r\n\r\n")
        await stopped.wait()
        await peer.send(length(b"no", status=b"413 Too Large"))
        peer.reset()

    stopped = asyncio.Event()

    async def main() -> None:
        async with Server(script) as server:
            upstream = server.upstream()
            task = asyncio.create_task(ask(upstream))
            await until(lambda: upstream.open_connections == 1 and bool(upstream._connections))
            (connection,) = upstream._connections
            transport = connection._transport
            assert transport is not None
            transport.pause_reading()  # the answer and the reset come while this loop looks elsewhere
            stopped.set()
            await until(lambda: server.open == 0)
            transport.write(b"the rest of a body")
            response, body = await task
            assert (response.status, body) == (413, b"no")

    run(new_loop, main())


@both_loops
def test_an_answer_that_begins_early_does_not_stop_the_request(new_loop: Loop) -> None:
    async def script(peer: Peer) -> None:
        head = await peer.reader.readuntil(b"\r\n\r\n")
        assert b"content-length: 8388608" in head
        await peer.send(b"HTTP/1.1 200 OK\r\nContent-Length: 7\r\n\r\n")
        await peer.reader.readexactly(8 * MIB)
        await peer.send(b"all of")
        await asyncio.sleep(0)
        await peer.send(b" it"[:1])
        await peer.gone()

    async def main() -> None:
        async with Server(script) as server:
            upstream = server.upstream()
            _, body = await ask(upstream, b"x" * 8 * MIB)
            assert body == b"all of "
            assert upstream.idle == 1

    run(new_loop, main())


@both_loops
def test_a_slow_reader_stops_the_backend_and_not_the_memory(new_loop: Loop) -> None:
    sent = 0

    async def script(peer: Peer) -> None:
        nonlocal sent
        await peer.request()
        await peer.send(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % (64 * MIB))
        for _ in range(1024):
            await peer.send(b"y" * 65_536)
            sent += 65_536

    async def main() -> None:
        async with Server(script) as server:
            upstream = server.upstream()
            async with upstream.open("POST", "/v1/x", b"", [], b"{}", PATIENT) as response:
                await until(lambda: response.backlog > HIGH_WATER)
                await _at_rest(lambda: sent)
                assert response.backlog < 4 * HIGH_WATER
                assert sent < 32 * MIB  # the rest is in the kernels' buffers, or not sent
                assert len(await read_all(response)) == 64 * MIB
                assert response.complete
            assert upstream.idle == 1

    run(new_loop, main())


@both_loops
def test_a_slow_reader_is_not_blamed_on_the_backend(new_loop: Loop) -> None:
    """While we do not read, the backend's silence is our own doing: no deadline runs."""
    wire = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % (8 * MIB) + b"y" * 8 * MIB

    async def main() -> None:
        async with Server(answers(wire)) as server:
            deadlines = Deadlines(20, 20, 0.2 * SLACK)
            async with server.upstream().open(
                "POST", "/v1/x", b"", [], b"{}", deadlines
            ) as response:
                await until(lambda: response.backlog > HIGH_WATER)
                await asyncio.sleep(0.6 * SLACK)
                assert len(await read_all(response)) == 8 * MIB

    run(new_loop, main())


@both_loops
def test_after_a_slow_reader_the_deadline_runs_again(new_loop: Loop) -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % (2 * MIB) + b"y" * MIB)
        await peer.gone()

    async def main() -> None:
        async with Server(script) as server:
            got: list[bytes] = []
            async with server.upstream().open(
                "POST", "/v1/x", b"", [], b"{}", Deadlines(20, 20, 0.1)
            ) as response:
                await until(lambda: response.backlog > HIGH_WATER)
                await asyncio.sleep(0.3)
                with pytest.raises(UpstreamError) as caught:
                    await collect(response, got)
            assert caught.value.kind == "between_bytes_timeout"
            assert len(b"".join(got)) == MIB
            await until(lambda: server.seen_gone == 1)

    run(new_loop, main())


def test_a_connection_whose_reader_was_slow_can_be_used_again() -> None:
    big = length(b"y" * MIB)

    async def main() -> None:
        async with Server(answers(big, OK)) as server:
            upstream = server.upstream()
            async with upstream.open("POST", "/v1/x", b"", [], b"{}", PATIENT) as response:
                await until(lambda: response.backlog > HIGH_WATER)
                assert len(await read_all(response)) == MIB
            assert (await ask(upstream))[1] == b"ok"
            assert server.accepted == 1

    run(asyncio.new_event_loop, main())


def test_one_read_gives_all_that_has_come() -> None:
    wire = (
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
        + b"2\r\nab\r\n" * 50
        + b"0\r\n\r\n"
    )

    async def main() -> None:
        async with (
            Server(answers(wire)) as server,
            server.upstream().open("POST", "/v1/x", b"", [], b"", PATIENT) as response,
        ):
            await until(lambda: response.ended)
            assert not response.complete
            assert await response.read() == b"ab" * 50
            assert response.complete
            assert await response.read() == b""
            assert await response.read() == b""

    run(asyncio.new_event_loop, main())


async def _at_rest(value: Callable[[], int]) -> None:
    """Wait until the value has not changed for a while."""
    before = -1
    while before != value():
        before = value()
        await asyncio.sleep(0.1)
