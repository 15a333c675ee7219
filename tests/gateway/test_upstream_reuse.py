"""When a connection is used again, and when it is closed (B050, B052)."""

import asyncio
from collections.abc import Callable

from gateway.runtime.upstream import Deadlines, UpstreamError
from tests.gateway.upstream_server import (
    PATIENT,
    Peer,
    Server,
    answers,
    answers_once,
    ask,
    both_loops,
    length,
    run,
    until,
)

Loop = Callable[[], asyncio.AbstractEventLoop]
OK = length(b"ok")


@both_loops
def test_requests_in_turn_share_one_connection(new_loop: Loop) -> None:
    async def main() -> None:
        async with Server(answers(OK)) as server:
            upstream = server.upstream()
            for _ in range(50):
                assert (await ask(upstream))[1] == b"ok"
                assert (upstream.idle, upstream.open_connections) == (1, 1)
            assert server.accepted == 1

    run(new_loop, main())


def test_requests_at_once_have_a_connection_each() -> None:
    async def main() -> None:
        async with Server(answers(OK)) as server:
            upstream = server.upstream()
            results = await asyncio.gather(*[ask(upstream) for _ in range(30)])
            assert [body for _, body in results] == [b"ok"] * 30
            assert server.accepted == 30
            assert upstream.open_connections == upstream.idle == 30

    run(asyncio.new_event_loop, main())


def test_a_connection_serves_no_more_requests_than_the_engine_allows() -> None:
    async def main() -> None:
        async with Server(answers(OK)) as server:
            upstream = server.upstream(max_requests_per_connection=3)
            for _ in range(7):
                await ask(upstream)
            assert server.accepted == 3
            await until(lambda: server.open == 1)

    run(asyncio.new_event_loop, main())


@both_loops
def test_idle_connections_are_closed_before_the_engine_would(new_loop: Loop) -> None:
    async def main() -> None:
        async def script(peer: Peer) -> None:
            await peer.request()
            await peer.send(OK)
            await peer.gone()

        async with Server(script) as server:
            upstream = server.upstream(idle_expiry_s=0.2)
            await asyncio.gather(ask(upstream), ask(upstream))
            assert upstream.idle == 2
            await until(lambda: server.seen_gone == 2)
            assert upstream.open_connections == upstream.idle == 0

    run(new_loop, main())


def test_an_expiry_of_zero_keeps_nothing() -> None:
    async def main() -> None:
        async with Server(answers(OK)) as server:
            upstream = server.upstream(idle_expiry_s=0)
            await ask(upstream)
            assert upstream.idle == 0
            await until(lambda: server.open == 0)

    run(asyncio.new_event_loop, main())


@both_loops
def test_a_connection_that_the_engine_closed_while_idle_is_not_used(new_loop: Loop) -> None:
    async def main() -> None:
        async with Server(answers_once(OK)) as server:
            upstream = server.upstream()
            for _ in range(3):
                response, _ = await ask(upstream)
                assert not response.replayed
                await until(lambda: upstream.open_connections == 0)
            assert server.accepted == 3

    run(new_loop, main())


@both_loops
def test_bytes_that_come_unasked_are_never_taken_for_the_next_answer(new_loop: Loop) -> None:
    stray = length(b"somebody else's")

    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(OK)
        if peer.number == 1:
            await asyncio.sleep(0.02)
            await peer.send(stray)
            await peer.gone()
        await peer.request()
        await peer.send(OK)

    async def main() -> None:
        async with Server(script) as server:
            upstream = server.upstream()
            await ask(upstream)
            await until(lambda: upstream.open_connections == 0)
            assert (await ask(upstream))[1] == b"ok"
            assert server.accepted == 2

    run(new_loop, main())


def test_an_exchange_left_early_costs_the_connection_only_if_something_is_missing() -> None:
    async def script(peer: Peer) -> None:
        while True:
            request = await peer.request()
            await peer.send(OK if request.body == b"whole" else OK[:-1])

    async def main() -> None:
        async with Server(script) as server:
            upstream = server.upstream()
            for body, kept in ((b"whole", 1), (b"cut", 0)):
                async with upstream.open("POST", "/v1/x", b"", [], body, PATIENT) as response:
                    await until(lambda r=response: r.backlog > 0)  # type: ignore[misc]
                assert upstream.idle == kept
            await until(lambda: server.open == 0)

    run(asyncio.new_event_loop, main())


@both_loops
def test_closing_ends_idle_connections_and_lets_exchanges_finish(new_loop: Loop) -> None:
    async def script(peer: Peer) -> None:
        request = await peer.request()
        await peer.send(OK[:-1])
        if request.body == b"slow":
            await finish.wait()
        await peer.send(OK[-1:])
        await peer.gone()

    finish = asyncio.Event()

    async def main() -> None:
        async with Server(script) as server:
            upstream = server.upstream()
            slow = asyncio.create_task(ask(upstream, b"slow"))
            await ask(upstream)
            await until(lambda: upstream.idle == 1 and upstream.open_connections == 2)
            await upstream.aclose()
            assert (upstream.idle, upstream.open_connections) == (0, 1)
            finish.set()
            assert (await slow)[1] == b"ok"
            assert upstream.idle == 0
            await until(lambda: upstream.open_connections == 0)

    run(new_loop, main())


@both_loops
def test_hundreds_of_exchanges_with_cancels_leave_nothing_behind(new_loop: Loop) -> None:
    async def script(peer: Peer) -> None:
        while True:
            request = await peer.request()
            if int(request.body) % 5 == 0:
                await peer.gone()
                return
            await peer.send(OK)

    async def one(upstream: object, number: int) -> None:
        patience = Deadlines(20, 0.05 if number % 10 == 0 else 20, 20)
        try:
            async with asyncio.timeout(0.02 if number % 5 == 0 else None):
                await ask(upstream, b"%d" % number, deadlines=patience)  # type: ignore[arg-type]
        except (TimeoutError, UpstreamError):
            assert number % 5 == 0

    async def main() -> None:
        async with Server(script) as server:
            upstream = server.upstream(idle_expiry_s=60)
            for start in range(0, 600, 20):
                await asyncio.gather(*[one(upstream, start + i) for i in range(20)])
            await until(lambda: upstream.open_connections == upstream.idle <= 20)
            await until(lambda: server.open == upstream.idle)
            assert (await ask(upstream, b"1"))[1] == b"ok"

    run(new_loop, main())
