"""One request and its answer, between a client connection and the ASGI app.

Law of this file: an answer reaches the client whole, or visibly broken. The head leaves in the same write
as the first body bytes when both are there, and otherwise at once; a body shorter or longer than its own
framing says ends the connection by RST, never by a clean end.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import TYPE_CHECKING, Any, Final

import msgspec

from gateway.api.refusal import STATUS_LINES
from gateway.core.errors import GatewayError

if TYPE_CHECKING:
    from gateway.api.edge import Edge

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]

_JOIN_BELOW: Final = 65536  # a copy this small is cheaper than a second system call
_OURS: Final = frozenset(
    {b"content-length", b"transfer-encoding", b"connection", b"keep-alive"}
)  # framing is the edge's to say
_log = logging.getLogger("slotgate.edge")


class Cycle(msgspec.Struct, eq=False):
    """A request in progress and its answer. Owned by its Edge; the app sees it as scope["extensions"]["slotgate.edge"].

    For the app: `gone` (the client left, or `abort` was called, before the answer was complete),
    `refusal` (why the edge itself answered instead of the app: a broken or silent body; then `gone` too),
    `received_at` (loop.time() at which the whole request had arrived, else None), `on_gone`, `abort`,
    `body_buffered`, `declared`, `notes`; and `start`, `write`, `writable`, which do what `send` does without its messages.
    """

    edge: Edge
    is_head: bool
    takes_chunks: bool  # false for HTTP/1.0: framed by closing
    keep_alive: bool
    awaits_continue: bool
    declared: int = 0  # bytes of the body, as far as the head says
    notes: dict[Any, Any] = {}  # of the reader, for the app
    pieces: list[bytes] = []
    held: int = 0  # bytes in `pieces`
    body_complete: bool = False
    received_at: float | None = None
    gone: bool = False
    refusal: GatewayError | None = None
    started: bool = False
    complete: bool = False
    task: asyncio.Task[None] | None = None
    _taken: bool = False  # the app has been given the end of the body
    _callback: Callable[[], object] | None = None
    _waiters: list[asyncio.Future[None]] = []
    _head: bytes = b""
    _bodiless: bool = False
    _chunked: bool = False
    _left: int | None = None  # body bytes that content-length still promises

    # -- for the app: the client

    def on_gone(self, callback: Callable[[], object]) -> None:
        """Call `callback` once, synchronously, when the client leaves before the answer is complete.

        At once if it has left already. One callback: a second registration replaces the first.
        """
        if self.gone:
            callback()
        else:
            self._callback = callback

    def abort(self) -> None:
        """Break the connection by RST, so that nobody takes a cut answer for a whole one."""
        if self.gone or self.complete:
            return
        self._callback = None
        self.leave()
        self.edge.abort()

    def body_buffered(self) -> bytes | None:
        """The whole body, if all of it has arrived and none was received yet; else None. Given once."""
        if not self.body_complete or self._taken:
            return None
        self._taken = True
        return self._take()

    # -- for the app: ASGI

    async def receive(self) -> Message:
        while not (self.gone or self.complete):
            if not self._taken and (self.pieces or self.body_complete):
                self._taken = self.body_complete
                return {
                    "type": "http.request",
                    "body": self._take(),
                    "more_body": not self.body_complete,
                }
            waiter = self.edge.loop.create_future()
            self._waiters.append(waiter)
            if not self.body_complete:
                self.edge.expect_body(self)
            await waiter
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        if self.edge.outflow.paused:
            await self.edge.outflow.room()
        kind = message["type"]
        if kind == "http.response.body":
            self.write(message.get("body", b""), more=message.get("more_body", False))
        elif kind == "http.response.start":
            self.start(message["status"], message.get("headers", ()))
        else:
            raise RuntimeError(f"unknown ASGI message {kind!r}")

    # -- for the app: the same without messages

    @property
    def write_paused(self) -> bool:
        """Whether the client is behind: `writable` would wait."""
        return self.edge.outflow.paused

    async def writable(self) -> None:
        """Wait until the client takes bytes again. Returns at once when it has left."""
        await self.edge.outflow.room()

    def start(self, status: int, headers: Iterable[tuple[bytes, bytes]] = ()) -> None:
        """Begin the answer. Header names in lower case; framing and keep-alive are added here.

        Raises RuntimeError for a second start and for a header that holds a line break.
        """
        if self.gone:
            return
        if self.started:
            raise RuntimeError("the response has already started")
        lines = [STATUS_LINES[status]]
        length: int | None = None
        for name, value in headers:
            if name not in _OURS:
                lines.append(b"%b: %b\r\n" % (name, value))
            elif name == b"content-length":
                length = int(value)
            elif name == b"connection" and b"close" in value.lower():
                self.keep_alive = False
        self._frame(lines, status, length)
        head = b"".join(lines)
        if head.count(b"\n") != len(lines) or head.count(b"\r") != len(lines):
            raise RuntimeError("a response header holds a line break")
        self._head = head + b"\r\n"
        self.started = True
        self.edge.loop.call_soon(self._flush_head)

    def write(self, data: bytes, *, more: bool) -> None:
        """Send body bytes; `more=False` completes the answer. Does not wait: see `writable`.

        Raises RuntimeError before `start`, after the end, and when a content-length is not kept.
        """
        if self.gone:
            return
        if self.complete or not self.started:
            raise RuntimeError("body bytes before the start or after the end of the response")
        if self._chunked:
            data = _chunk(data, more=more)
        elif self._bodiless:
            data = b""
        else:
            self._count(len(data), more=more)
        self._write(data)
        if not more:
            self._finish()

    def write_chunk(self, chunk: bytes) -> bool:
        """Send body bytes that are framed as one whole chunk already. False: the client is behind."""
        if self._chunked and not self._head and not self.gone:
            self.edge.transport.write(chunk)
        else:
            self.write(chunk[chunk.index(b"\r\n") + 2 : -2], more=True)
        return not self.edge.outflow.paused

    # -- for the edge

    async def run(self, app: App, scope: MutableMapping[str, Any]) -> None:
        """Call the app and see to it that the cycle has an end, whatever the app does."""
        try:
            if not self.gone:  # else refused before the task could begin
                await app(scope, self.receive, self.send)
            if not (self.complete or self.gone):
                _log.error("the app returned without completing its response")
                self._fail(GatewayError("internal_error", _INTERNAL))
        except GatewayError as error:
            self._fail(error)
        except Exception:  # noqa: BLE001
            # Noticed by: the operator in the log, the client by a 500 or a broken connection.
            _log.exception("an exception escaped the app")
            self._fail(GatewayError("internal_error", _INTERNAL))
        finally:
            self.abort()  # does nothing after a proper end; a cancelled task gets here
            if self.task is not None:
                self.edge.tasks.discard(self.task)
                self.task = None

    def feed(self, body: bytes) -> None:
        """Body bytes that arrived."""
        self.awaits_continue = False
        self.pieces.append(body)
        self.held += len(body)
        if self._waiters:
            self._wake()

    def end_body(self, now: float) -> None:
        """The whole request has arrived."""
        self.received_at = now
        self.body_complete = True
        self.awaits_continue = False
        if self._waiters and not self._taken:
            self._wake()

    def leave(self) -> None:
        """The client left. Nothing more is sent; every wait ends; the callback is called."""
        if self.gone or self.complete:
            return
        self.gone = True
        self._head = b""
        self._wake()
        self.edge.outflow.resume()
        callback, self._callback = self._callback, None
        if callback is not None:
            callback()

    # -- helpers

    def _frame(self, lines: list[bytes], status: int, length: int | None) -> None:
        """Choose how the end of the body is told, and add the lines that say so."""
        if length is not None:
            lines.append(b"content-length: %d\r\n" % length)
        self._bodiless = self.is_head or status in (204, 304)
        if self._bodiless:
            pass
        elif length is not None:
            self._left = length
        elif self.takes_chunks:
            self._chunked = True
            lines.append(b"transfer-encoding: chunked\r\n")
        if not self.body_complete and not self.edge.can_drain(self):
            self.keep_alive = False
        if not self.keep_alive:
            lines.append(b"connection: close\r\n")

    def _count(self, size: int, *, more: bool) -> None:
        """Hold a counted body to its word."""
        if self._left is None:
            return
        self._left -= size
        if self._left < 0 or (self._left and not more):
            self.abort()
            raise RuntimeError("the response body does not keep its content-length")

    def _write(self, data: bytes) -> None:
        head, self._head = self._head, b""
        if head and len(data) < _JOIN_BELOW:
            data = head + data
        elif head:
            self.edge.transport.write(head)
        if data:
            self.edge.transport.write(data)

    def _flush_head(self) -> None:
        """Send the head alone: the app has nothing to say yet, and clients wait for headers."""
        if self._head:
            self._write(b"")

    def _finish(self) -> None:
        self.complete = True
        self._chunked = False
        self._callback = None
        self.pieces.clear()  # of a body that nobody wanted
        if self._waiters:
            self._wake()
        self.edge.answered(self)

    def _fail(self, error: GatewayError) -> None:
        """End a cycle whose app is done without having ended it."""
        if self.gone or self.complete:
            return
        self._callback = None
        self.edge.refuse(error)

    def _take(self) -> bytes:
        pieces, self.pieces, self.held = self.pieces, [], 0
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def _wake(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)


_INTERNAL: Final = "The gateway failed to answer this request. This is a bug in the gateway."


def _chunk(data: bytes, *, more: bool) -> bytes:
    if more:
        return b"%x\r\n%b\r\n" % (len(data), data) if data else b""
    return b"%x\r\n%b\r\n0\r\n\r\n" % (len(data), data) if data else b"0\r\n\r\n"
