"""Deadlines and cancellation: every way of giving up closes the socket at once (B001, B002, B008, B009, B011, B049)."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from gateway.runtime.upstream import Deadlines, Target, Upstream, UpstreamError
from tests.gateway.upstream_server import (
    PATIENT,
    SLACK,
    Peer,
    Server,
    answers,
    ask,
    both_loops,
    length,
    run,
    until,
)

Loop = Callable[[], asyncio.AbstractEventLoop]
OK = length(b"ok")
HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


async def silent(peer: Peer) -> None:
    await peer.request()
    await peer.gone()


async def silent_after_head(peer: Peer) -> None:
    await peer.request()
    await peer.send(HEAD)
    await peer.gone()


async def silent_after_body(peer: Peer) -> None:
    await peer.request()
    await peer.send(HEAD + b"2\r\nok\r\n")
    await peer.gone()


async def reads_nothing(peer: Peer) -> None:
    peer.writer.transport.pause_reading()  # type: ignore[attr-defined]
    await asyncio.sleep(3600)


@contextlib.asynccontextmanager
async def black_hole() -> AsyncIterator[int]:
    """A port that never completes a handshake: its accept queue is full."""
    loop = asyncio.get_running_loop()
    with socket.socket() as listener, contextlib.ExitStack() as stack:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        for _ in range(4):
            sock = stack.enter_context(socket.socket())
            sock.setblocking(False)
            sock.connect_ex(listener.getsockname())
        await asyncio.sleep(0.01)
        assert loop.is_running()
        yield listener.getsockname()[1]


@both_loops
@pytest.mark.parametrize("script", [silent, silent_after_head])
def test_a_backend_that_sends_no_body_byte_in_time_is_given_up(
    new_loop: Loop, script: Callable[[Peer], asyncio.Future[None]]
) -> None:
    async def main() -> None:
        async with Server(script) as server:
            upstream = server.upstream()
            for turn in range(1, 4):
                with pytest.raises(UpstreamError) as caught:
                    await ask(upstream, deadlines=Deadlines(20, 0.05, 20))
                assert (caught.value.kind, caught.value.may_have_run) == (
                    "first_byte_timeout",
                    True,
                )
                await until(lambda turn=turn: server.seen_gone == turn)  # type: ignore[misc]
                assert upstream.open_connections == 0
            assert server.accepted == 3

    run(new_loop, main())


@both_loops
def test_a_backend_that_falls_silent_in_its_answer_is_given_up(new_loop: Loop) -> None:
    async def main() -> None:
        async with Server(silent_after_body) as server:
            upstream = server.upstream()
            got: list[bytes] = []
            with pytest.raises(UpstreamError) as caught:
                await ask(upstream, deadlines=Deadlines(20, 20, 0.05), into=got)
            assert (caught.value.kind, got) == ("between_bytes_timeout", [b"ok"])
            await until(lambda: server.seen_gone == 1)

    run(new_loop, main())


def test_a_slow_stream_lives_as_long_as_no_single_gap_is_too_long() -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(HEAD)
        for _ in range(8):
            await asyncio.sleep(0.1)
            await peer.send(b"1\r\nx\r\n")
        await peer.send(b"0\r\n\r\n")

    async def main() -> None:
        async with Server(script) as server:
            deadlines = Deadlines(20, 0.5 * SLACK, 0.5 * SLACK)  # the whole lasts longer
            _, body = await ask(server.upstream(), deadlines=deadlines)
            assert body == b"x" * 8

    run(asyncio.new_event_loop, main())


@both_loops
def test_zero_turns_a_deadline_off(new_loop: Loop) -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        await asyncio.sleep(0.2)
        await peer.send(HEAD)
        await asyncio.sleep(0.2)
        await peer.send(b"1\r\nx\r\n")
        await asyncio.sleep(0.2)
        await peer.send(b"0\r\n\r\n")

    async def main() -> None:
        async with Server(script) as server:
            assert (await ask(server.upstream(), deadlines=Deadlines(0, 0, 0)))[1] == b"x"

    run(new_loop, main())


def test_a_used_connection_keeps_the_deadlines_of_each_request_apart() -> None:
    async def script(peer: Peer) -> None:
        while True:
            request = await peer.request()
            await asyncio.sleep(float(request.body))
            await peer.send(OK)

    async def main() -> None:
        async with Server(script) as server:
            upstream = server.upstream()
            for wait, first_byte_s in ((b"0", 0.1), (b"0.3", 20), (b"0", 0.1), (b"0.3", 0)):
                await ask(upstream, wait, deadlines=Deadlines(20, first_byte_s * SLACK, 20))
            assert server.accepted == 1
            with pytest.raises(UpstreamError) as caught:
                await ask(upstream, b"5", deadlines=Deadlines(20, 0.1, 20))
            assert caught.value.kind == "first_byte_timeout"

    run(asyncio.new_event_loop, main())


@both_loops
def test_a_backend_that_does_not_accept_in_time_is_a_connect_timeout(new_loop: Loop) -> None:
    async def main() -> None:
        async with black_hole() as port:
            upstream = Upstream(Target.parse("gpu1", f"http://127.0.0.1:{port}"))
            with pytest.raises(UpstreamError) as caught:
                await ask(upstream, deadlines=Deadlines(0.1, 20, 20))
            assert (caught.value.kind, caught.value.may_have_run) == ("connect_timeout", False)
            assert upstream.open_connections == 0

    run(new_loop, main())


@both_loops
def test_a_backend_that_does_not_read_the_request_is_given_up(new_loop: Loop) -> None:
    async def main() -> None:
        async with Server(reads_nothing) as server:
            upstream = server.upstream()
            with pytest.raises(UpstreamError) as caught:
                await ask(upstream, b"x" * 32_000_000, deadlines=Deadlines(20, 0.2, 20))
            assert caught.value.kind == "first_byte_timeout"
            await until(lambda: upstream.open_connections == 0)

    run(new_loop, main())


@both_loops
def test_a_closed_port_is_refused_and_cannot_have_run(new_loop: Loop) -> None:
    async def main() -> None:
        with socket.socket() as unused:
            unused.bind(("127.0.0.1", 0))
            port = unused.getsockname()[1]
            upstream = Upstream(Target.parse("gpu1", f"http://127.0.0.1:{port}"))
            with pytest.raises(UpstreamError) as caught:
                await ask(upstream)
        assert (caught.value.kind, caught.value.may_have_run) == ("refused", False)
        assert str(port) in caught.value.detail
        assert str(port) not in caught.value.message
        assert upstream.open_connections == 0

    run(new_loop, main())


PHASES = [silent, silent_after_head, silent_after_body]


@both_loops
@pytest.mark.parametrize("twice", [False, True], ids=["once", "twice"])
@pytest.mark.parametrize("script", PHASES)
def test_a_cancelled_exchange_closes_its_socket_at_once(
    new_loop: Loop, script: Callable[[Peer], asyncio.Future[None]], twice: bool
) -> None:
    async def main() -> None:
        async with Server(script) as server:
            upstream = server.upstream()
            for turn in range(1, 61):
                task = asyncio.create_task(ask(upstream))
                await until(lambda turn=turn: len(server.requests) == turn)  # type: ignore[misc]
                if turn % 2:
                    await asyncio.sleep(0.002)
                task.cancel()
                if twice:
                    await asyncio.sleep(0)
                    task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
                await until(lambda turn=turn: server.seen_gone == turn, 1)  # type: ignore[misc]
                assert upstream.open_connections == 0
            assert upstream.idle == 0

    run(new_loop, main())


@both_loops
def test_cancelling_while_connecting_leaves_no_socket(new_loop: Loop) -> None:
    async def main() -> None:
        async with black_hole() as port:
            upstream = Upstream(Target.parse("gpu1", f"http://127.0.0.1:{port}"))
            before = _open_files()
            for turn in range(60):
                task = asyncio.create_task(ask(upstream))
                for _ in range(turn % 4):
                    await asyncio.sleep(0)
                task.cancel()
                if turn % 3 == 0:
                    await asyncio.sleep(0)
                    task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
            assert upstream.open_connections == 0
            assert _open_files() <= before

    run(new_loop, main())


@both_loops
def test_cancelling_at_any_turn_of_the_loop_leaves_nothing(new_loop: Loop) -> None:
    """Names, connect, hand-over to the transport, request, head, body: whatever the await, nothing stays."""

    async def main() -> None:
        async with Server(answers(OK)) as server:
            upstream = Upstream(
                Target.parse("gpu1", f"http://localhost:{server.port}"), idle_expiry_s=0
            )
            await ask(upstream)
            await until(lambda: server.open == 0)
            before = _open_files()
            for turns in range(40):
                task = asyncio.create_task(ask(upstream))
                for _ in range(turns):
                    await asyncio.sleep(0)
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
                await until(lambda: upstream.open_connections == 0)
            await until(lambda: server.open == 0)
            await until(lambda: _open_files() <= before)

    run(new_loop, main())


@both_loops
def test_cancelling_while_a_large_body_is_leaving_closes_at_once(new_loop: Loop) -> None:
    async def main() -> None:
        async with Server(reads_nothing) as server:
            upstream = server.upstream()
            task = asyncio.create_task(ask(upstream, b"x" * 32_000_000))
            await until(lambda: server.accepted == 1)
            await asyncio.sleep(0.05)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await until(lambda: upstream.open_connections == 0, 1)

    run(new_loop, main())


def test_leaving_in_the_middle_of_a_stream_closes_at_once() -> None:
    async def main() -> None:
        async with Server(silent_after_body) as server:
            upstream = server.upstream()
            async with upstream.open("POST", "/v1/x", b"", [], b"{}", PATIENT) as response:
                assert await response.read() == b"ok"
                assert not response.complete
            await until(lambda: server.seen_gone == 1, 1)
            assert upstream.open_connections == 0

    run(asyncio.new_event_loop, main())


def test_the_times_of_sending_and_of_the_first_byte_are_told() -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(HEAD)
        await asyncio.sleep(0.1)
        await peer.send(b"1\r\nx\r\n0\r\n\r\n")

    async def main() -> None:
        async with Server(script) as server:
            before = asyncio.get_running_loop().time()
            response, _ = await ask(server.upstream())
            assert response.read_started_at is not None
            assert response.first_byte_at is not None
            assert before <= response.read_started_at <= response.first_byte_at - 0.09

    run(asyncio.new_event_loop, main())


def _open_files() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())
