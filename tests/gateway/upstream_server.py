"""A raw TCP server for the tests of the upstream client: one script per connection, every byte under control.

    async with Server(script) as server:            # async def script(peer: Peer) -> None
        upstream = server.upstream()

When a script returns, its connection is closed with FIN. `on_both_loops` runs a coroutine function on plain asyncio
and on uvloop: the client must behave the same on both.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import ssl
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Self

import pytest
import uvloop

from gateway.runtime.upstream import Deadlines, Response, Target, Upstream

SLACK = float(os.environ.get("SLOTGATE_TEST_SLACK", "1"))
PATIENT = Deadlines(connect_s=20, first_byte_s=20, between_bytes_s=20)

both_loops = pytest.mark.parametrize(
    "new_loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"]
)


def run(new_loop: Callable[[], asyncio.AbstractEventLoop], main: Coroutine[Any, Any, None]) -> None:
    """Run on that loop; any error that the loop reports on the side fails the test."""
    reported: list[dict[str, Any]] = []
    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.get_loop().set_exception_handler(lambda _, context: reported.append(context))
        runner.run(asyncio.wait_for(main, 60 * SLACK))
    assert not reported, reported


async def until(holds: Callable[[], bool], within_s: float = 10.0) -> None:
    """Wait until it holds; fail the test if it never does."""
    async with asyncio.timeout(within_s * SLACK):
        while not holds():  # noqa: ASYNC110 - what is waited for happens at the far end of a socket
            await asyncio.sleep(0.002)


@dataclass(frozen=True, slots=True)
class Request:
    line: bytes
    headers: list[tuple[bytes, bytes]]
    body: bytes

    def all(self, name: bytes) -> list[bytes]:
        return [value for key, value in self.headers if key == name]


class Peer:
    """One accepted connection, as the script sees it."""

    def __init__(self, server: Server, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self.number = server.accepted
        self.reader = reader
        self.writer = writer
        self._server = server

    async def request(self) -> Request:
        """Read one request with a Content-Length or without a body. Raises when the client leaves."""
        head = await self.reader.readuntil(b"\r\n\r\n")
        line, *rest = head[:-4].split(b"\r\n")
        headers = []
        for each in rest:
            name, _, value = each.partition(b": ")
            headers.append((name.lower(), value))
        length = int(dict(headers).get(b"content-length", b"0"))
        request = Request(line, headers, await self.reader.readexactly(length))
        self._server.requests.append(request)
        return request

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def send_slowly(self, data: bytes, size: int = 1) -> None:
        """In pieces that arrive as separate reads, mostly."""
        for at in range(0, len(data), size):
            await self.send(data[at : at + size])
            await asyncio.sleep(0)

    async def gone(self) -> None:
        """Wait until the client has closed, by FIN or RST."""
        with contextlib.suppress(ConnectionError):
            while await self.reader.read(65536):
                pass
        self._server.seen_gone += 1

    def reset(self) -> None:
        """Close with RST."""
        sock = self.writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()


class Server:
    """Owns the listening socket and the tasks of its connections."""

    def __init__(
        self,
        script: Callable[[Peer], Awaitable[None]],
        *,
        host: str = "127.0.0.1",
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.accepted = 0
        self.open = 0
        self.seen_gone = 0
        self.requests: list[Request] = []
        self.port = 0
        self._script = script
        self._host = host
        self._tls = tls
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._upstreams: list[Upstream] = []

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(
            self._accept, self._host, self.port, ssl=self._tls
        )
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        for upstream in self._upstreams:
            await upstream.aclose()
        await self.stop()

    async def stop(self) -> None:
        assert self._server is not None
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await until(lambda: self.open == 0)

    def upstream(self, **settings: Any) -> Upstream:
        target = Target.parse("gpu1", f"http://127.0.0.1:{self.port}")
        upstream = Upstream(target, **settings)
        self._upstreams.append(upstream)
        return upstream

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.accepted += 1
        self.open += 1
        task = asyncio.create_task(self._serve(Peer(self, reader, writer)))
        self._tasks.add(task)
        task.add_done_callback(lambda done: self._over(done, writer))

    async def _serve(self, peer: Peer) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            await self._script(peer)
        peer.writer.close()
        with contextlib.suppress(OSError):
            await peer.writer.wait_closed()

    def _over(self, task: asyncio.Task[None], writer: asyncio.StreamWriter) -> None:
        self._tasks.discard(task)
        self.open -= 1
        writer.transport.abort()
        if not task.cancelled():
            task.result()  # a mistake in a script is an error of the loop, which `run` reports


def answers(*responses: bytes) -> Callable[[Peer], Awaitable[None]]:
    """A script: the nth request on any connection gets the nth response, the last one for ever."""

    async def script(peer: Peer) -> None:
        left = list(responses)
        while True:
            await peer.request()
            await peer.send(left.pop(0) if len(left) > 1 else left[0])

    return script


def answers_once(response: bytes) -> Callable[[Peer], Awaitable[None]]:
    """A script: one request, this response, then FIN."""

    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(response)

    return script


CHUNKED_HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


async def silent(peer: Peer) -> None:
    await peer.request()
    await peer.gone()


async def silent_after_head(peer: Peer) -> None:
    await peer.request()
    await peer.send(CHUNKED_HEAD)
    await peer.gone()


async def silent_after_body(peer: Peer) -> None:
    await peer.request()
    await peer.send(CHUNKED_HEAD + b"2\r\nok\r\n")
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


def length(body: bytes, *extra: bytes, status: bytes = b"200 OK") -> bytes:
    """A response delimited by Content-Length."""
    lines = [b"HTTP/1.1 " + status, b"Content-Length: %d" % len(body), *extra]
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


async def ask(
    upstream: Upstream,
    body: bytes = b"{}",
    *,
    method: str = "POST",
    deadlines: Deadlines = PATIENT,
    into: list[bytes] | None = None,
) -> tuple[Response, bytes]:
    """One whole exchange. `into` keeps the pieces that came before an error."""
    pieces = [] if into is None else into
    async with upstream.open(
        method, "/v1/chat/completions", b"", [(b"x-a", b"1")], body, deadlines
    ) as response:
        await collect(response, pieces)
        return response, b"".join(pieces)


async def collect(response: Response, into: list[bytes]) -> None:
    """Read to the end, keeping what came before an error."""
    while piece := await response.read():
        into.append(piece)


async def read_all(response: Response) -> bytes:
    pieces: list[bytes] = []
    await collect(response, pieces)
    return b"".join(pieces)
