"""Cancellation: whoever leaves, whenever, closes the socket at once (B001, B002, B003, B011)."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from gateway.runtime.upstream import Target, Upstream
from tests.gateway.upstream_server import (
    PATIENT,
    Peer,
    Server,
    answers,
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
@pytest.mark.parametrize("twice", [False, True], ids=["once", "twice"])
@pytest.mark.parametrize("script", [silent, silent_after_head, silent_after_body])
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


def _open_files() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())
