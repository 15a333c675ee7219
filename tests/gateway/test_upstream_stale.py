"""When a request may be sent a second time, and when never (B050, B056)."""

import asyncio
from collections.abc import Callable

import pytest

from gateway.runtime.upstream import UpstreamError
from tests.gateway.upstream_server import (
    Peer,
    Server,
    ask,
    both_loops,
    length,
    run,
)

Loop = Callable[[], asyncio.AbstractEventLoop]
OK = length(b"ok")


@both_loops
@pytest.mark.parametrize("how", ["FIN", "RST", "unread"])
def test_a_request_swallowed_by_a_stale_connection_is_sent_once_more(
    new_loop: Loop, how: str
) -> None:
    executed: list[bytes] = []

    async def script(peer: Peer) -> None:
        executed.append((await peer.request()).body)
        await peer.send(OK)
        if peer.number == 1:
            # Closes upon the first byte of the second request, which is what losing the race looks like.
            if how != "unread":
                await peer.reader.readuntil(b"\r\n\r\n")
            else:
                await peer.reader.read(1)
            if how == "RST":
                peer.reset()
            return
        await peer.gone()

    async def main() -> None:
        async with Server(script) as server:
            upstream = server.upstream()
            await ask(upstream, b"1")
            response, body = await ask(upstream, b"2")
            assert (body, response.replayed) == (b"ok", True)
            assert server.accepted == 2
            assert executed == [b"1", b"2"]

    run(new_loop, main())


def test_the_second_attempt_uses_a_new_connection_and_is_the_last() -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        if peer.number <= 3:
            await peer.send(OK)
            await peer.request()

    async def main() -> None:
        async with Server(script) as server:
            upstream = server.upstream()
            await asyncio.gather(*[ask(upstream) for _ in range(3)])
            assert upstream.idle == 3
            with pytest.raises(UpstreamError) as caught:
                await ask(upstream)
            assert (caught.value.kind, caught.value.may_have_run) == ("closed", True)
            assert server.accepted == 4
            assert len(server.requests) == 3 + 2

    run(asyncio.new_event_loop, main())


@both_loops
def test_a_fresh_connection_closed_without_an_answer_is_never_tried_again(new_loop: Loop) -> None:
    async def main() -> None:
        async def script(peer: Peer) -> None:
            await peer.request()
            peer.reset()

        async with Server(script) as server:
            with pytest.raises(UpstreamError) as caught:
                await ask(server.upstream())
            assert (caught.value.kind, caught.value.may_have_run) == ("closed", True)
            assert server.accepted == 1

    run(new_loop, main())


def test_a_used_connection_that_dies_long_after_the_request_is_not_stale() -> None:
    """The engine had the request for longer than a stale connection can hide: it may have run."""

    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(OK)
        await peer.request()
        await asyncio.sleep(1.3)

    async def main() -> None:
        async with Server(script) as server:
            upstream = server.upstream()
            await ask(upstream)
            with pytest.raises(UpstreamError) as caught:
                await ask(upstream)
            assert (caught.value.kind, caught.value.may_have_run) == ("closed", True)
            assert server.accepted == 1

    run(asyncio.new_event_loop, main())


def test_a_used_connection_that_began_to_answer_is_not_stale() -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(OK)
        await peer.request()
        await peer.send(b"H")

    async def main() -> None:
        async with Server(script) as server:
            upstream = server.upstream()
            await ask(upstream)
            with pytest.raises(UpstreamError) as caught:
                await ask(upstream)
            assert caught.value.may_have_run
            assert server.accepted == 1

    run(asyncio.new_event_loop, main())


def test_when_the_engine_has_gone_the_second_attempt_says_so() -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(OK)
        await peer.reader.read(1)

    async def main() -> None:
        async with Server(script) as server:
            upstream = server.upstream()
            await ask(upstream)
            assert server._server is not None
            server._server.close()
            with pytest.raises(UpstreamError) as caught:
                await ask(upstream)
            assert (caught.value.kind, caught.value.may_have_run) == ("refused", False)

    run(asyncio.new_event_loop, main())


@both_loops
def test_requests_that_race_with_the_engines_idle_timer_all_succeed_and_run_once(
    new_loop: Loop,
) -> None:
    executed: list[bytes] = []

    async def script(peer: Peer) -> None:
        while True:
            try:
                async with asyncio.timeout(0.03):
                    first = await peer.reader.readexactly(1)
            except TimeoutError:
                if peer.number % 2:
                    peer.reset()
                return
            peer.reader._buffer[:0] = first  # type: ignore[attr-defined]
            executed.append((await peer.request()).body)
            await peer.send(OK)

    async def main() -> None:
        async with Server(script) as server:
            upstream = server.upstream()
            for number in range(60):
                _, body = await ask(upstream, b"%d" % number)
                assert body == b"ok"
                await asyncio.sleep(0.027 + number % 7 * 0.001)
            assert executed == [b"%d" % number for number in range(60)]

    run(new_loop, main())


def test_stray_bytes_that_the_loop_has_not_read_yet_are_noticed_too() -> None:
    wrote: list[asyncio.StreamWriter] = []

    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(OK)
        wrote.append(peer.writer)
        await peer.gone()

    async def main() -> None:
        async with Server(script) as server:
            upstream = server.upstream()
            await ask(upstream)
            wrote[0].write(length(b"stray"))  # sent at once, and no turn of the loop in between
            assert (await ask(upstream))[1] == b"ok"
            assert server.accepted == 2

    run(asyncio.new_event_loop, main())
