"""Deadlines: a backend that takes too long, in each phase (B008, B009, B049)."""

import asyncio
import socket
from collections.abc import Callable
from functools import partial

import pytest

from gateway.runtime.deadlines import Alarm
from gateway.runtime.upstream import Deadlines, Target, Upstream, UpstreamError
from tests.gateway.upstream_server import (
    CHUNKED_HEAD,
    PATIENT,
    SLACK,
    Peer,
    Server,
    ask,
    black_hole,
    both_loops,
    length,
    reads_nothing,
    run,
    silent,
    silent_after_body,
    silent_after_head,
    until,
)

Loop = Callable[[], asyncio.AbstractEventLoop]
OK = length(b"ok")


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
        await peer.send(CHUNKED_HEAD)
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
        await peer.send(CHUNKED_HEAD)
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
        assert upstream.open_connections == 0

    run(new_loop, main())


def test_the_times_of_sending_and_of_the_first_byte_are_told() -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(CHUNKED_HEAD)
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


@both_loops
def test_reading_on_after_the_exchange_was_left_is_an_error_and_not_a_wait(new_loop: Loop) -> None:
    async def main() -> None:
        async with Server(silent_after_head) as server:
            async with server.upstream().open("POST", "/v1/x", b"", [], b"", PATIENT) as response:
                reader = asyncio.create_task(response.read())
                await asyncio.sleep(0)
            for read in (reader, response.read()):
                with pytest.raises(UpstreamError):
                    await read

    run(new_loop, main())


def test_an_alarm_that_is_put_off_again_and_again_goes_off_once_at_the_end() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        rang: list[float] = []
        alarm = Alarm(loop, lambda: rang.append(loop.time()))
        last = 0.0
        for _ in range(20):
            last = loop.time()
            alarm.set(0.1)
            await asyncio.sleep(0.01)
        await until(lambda: bool(rang))
        assert rang[0] >= last + 0.1
        await asyncio.sleep(0.15)
        assert len(rang) == 1

    run(asyncio.new_event_loop, main())


def test_an_alarm_can_be_brought_forward_switched_off_and_closed() -> None:
    async def main() -> None:
        rang: list[str] = []
        alarms = {
            name: Alarm(asyncio.get_running_loop(), partial(rang.append, name)) for name in "abcd"
        }
        for alarm in alarms.values():
            alarm.set(3600)
        alarms["a"].set(0.01)
        alarms["b"].set(0.01)
        alarms["b"].off()
        alarms["c"].set(0.01)
        alarms["c"].close()
        alarms["c"].set(0.01)
        alarms["d"].set(0)
        await until(lambda: rang == ["a"])
        await asyncio.sleep(0.05)
        assert rang == ["a"]
        for alarm in alarms.values():
            alarm.close()

    run(asyncio.new_event_loop, main())
