"""One accepted connection of the scripted engine: everything a script may do to a socket, and everything that happened.

A script is an async function of one Connection. It runs when a request has arrived whole (or when its head has, or when
the connection was accepted: see FakeEngine.script). If the peer leaves, the script is cancelled, as a real engine drops
the generation, unless it was added with `deaf=True`.
"""

from __future__ import annotations

import asyncio
import json
import socket
import struct
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, cast

from tests.fakes.http_reader import Head

if TYPE_CHECKING:
    from tests.fakes.engine import FakeEngine
    from tests.fakes.intake import Intake

Script = Callable[["Connection"], Awaitable[None]]
HeaderPairs = Sequence[tuple[str, str]]

KEEP_BYTES = 32 * 1024 * 1024  # of what was sent; beyond it only counts are kept


@dataclass(slots=True, eq=False)
class Request:
    """One request as the engine saw it. Times are time.monotonic() seconds."""

    connection: Connection
    head: Head
    head_at: float
    body: bytes = b""
    whole_at: float | None = None  # last body byte
    started_at: float | None = None  # its execution began (got its slot)
    ended_at: float | None = None  # its execution ended, whatever way
    gone_at: float | None = None  # the peer left before we had finished answering
    gone_by: str | None = None  # "fin" or "rst"
    status: int | None = None  # of our answer, if it was given by `begin` or `respond`
    answered: bool = False  # the script ran to its end
    sent: bytearray = field(default_factory=bytearray)  # body bytes of the answer

    @property
    def method(self) -> str:
        return self.head.method

    @property
    def target(self) -> str:
        return self.head.target

    @property
    def path(self) -> str:
        return self.head.target.partition("?")[0]

    @property
    def query(self) -> str:
        return self.head.target.partition("?")[2]

    @property
    def headers(self) -> dict[str, str]:
        """By lower-case name; of a repeated header the last value. `head.headers` has them as sent."""
        return {key.lower(): value for key, value in self.head.headers}

    @property
    def id(self) -> str | None:
        return self.head.get("x-request-id")

    def json(self) -> Any:
        return json.loads(self.body)


class Connection(asyncio.Protocol):
    """The socket, in both directions. Its Intake is told of every event."""

    def __init__(self, intake: Intake, number: int) -> None:
        self.number = number
        self.request: Request | None = None  # the one being answered
        self.requests: list[Request] = []
        self.received: list[tuple[float, bytes]] = []  # every read, raw
        self.written: list[tuple[float, int]] = []  # every write: when, how many bytes
        self.opened_at = time.monotonic()
        self.fin_at: float | None = None
        self.rst_at: float | None = None
        self.closed_at: float | None = None
        self.left = asyncio.Event()  # the peer has closed its side, or the connection is lost
        self.lost = asyncio.Event()
        self._arrived = asyncio.Event()
        self._writable = asyncio.Event()
        self._writable.set()
        self._intake = intake
        self._transport: asyncio.Transport

    # What a script does

    async def write(self, data: bytes, pause_s: float = 0) -> None:
        """Hands exact bytes to the kernel (waits while the peer does not read), then pauses."""
        self.write_now(data)
        if not self._writable.is_set():
            await self._writable.wait()
        if pause_s:
            await asyncio.sleep(pause_s)

    def write_now(self, data: bytes) -> None:
        """As `write`, without waiting for room."""
        if self._transport.is_closing():
            return
        self.written.append((time.monotonic(), len(data)))
        self._transport.write(data)

    async def pause(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def for_ever(self) -> None:
        """Says nothing more until the peer leaves or the test ends."""
        await asyncio.Event().wait()

    def fin(self) -> None:
        """Closes politely: what was written arrives, then FIN."""
        self._transport.close()

    def rst(self) -> None:
        """Breaks the connection: RST, and what the peer has not read yet may be lost to it."""
        if not self.lost.is_set():
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._transport.abort()

    def shut_write(self) -> None:
        """Half-close: FIN, but still reading."""
        self._transport.write_eof()

    def stop_reading(self) -> None:
        """Reads nothing more (so it does not see the peer leave either)."""
        self._transport.pause_reading()

    def resume_reading(self) -> None:
        self._transport.resume_reading()

    async def read(self) -> bytes:
        """The next raw bytes not yet read by this call; for scripts that took the connection over. b"" at the end."""
        while not self._intake.raw(self) and not self.left.is_set():
            self._arrived.clear()
            await self._arrived.wait()
        pending = self._intake.raw(self)
        data = bytes(pending)
        pending.clear()
        return data

    # The same, said in HTTP

    async def respond(
        self,
        status: int,
        body: bytes | str | dict[str, Any] | list[Any] = b"",
        headers: HeaderPairs = (),
        *,
        content_type: str = "application/json",
        framing: str = "length",  # length | chunked | close
        version: str = "1.1",
    ) -> None:
        """A whole answer. With framing `close` (and with version 1.0) the connection is closed behind it."""
        payload = _bytes(body)
        await self.begin(
            status,
            [*headers, ("Content-Length", str(len(payload)))] if framing == "length" else headers,
            content_type=content_type,
            framing=framing,
            version=version,
        )
        await self.body(payload)
        await self.end()

    async def begin(
        self,
        status: int = 200,
        headers: HeaderPairs = (),
        *,
        content_type: str | None = "text/event-stream",
        framing: str = "chunked",
        version: str = "1.1",
    ) -> None:
        """Status line and headers; then `body` pieces and `end`."""
        if self.request is not None:
            self.request.status = status
        self._framing = framing
        self._close_after = framing == "close" or version == "1.0"
        pairs = [*self.engine.common_headers(), *headers]
        if content_type is not None:
            pairs.append(("Content-Type", content_type))
        if framing == "chunked":
            pairs.append(("Transfer-Encoding", "chunked"))
        if self._close_after and version == "1.1":
            pairs.append(("Connection", "close"))
        self._close_after |= any(
            (name.lower(), value.lower()) == ("connection", "close") for name, value in headers
        )
        lines = [f"HTTP/{version} {status} {_phrase(status)}"]
        lines += [f"{name}: {value}" for name, value in pairs]
        await self.write("\r\n".join([*lines, "", ""]).encode("latin-1"))

    async def body(self, data: bytes | str, pause_s: float = 0) -> None:
        """A piece of the body in the framing that `begin` announced, in one write."""
        data = _bytes(data)
        if self.request is not None and len(self.request.sent) < KEEP_BYTES:
            self.request.sent += data
        if self._framing == "chunked":
            if not data:
                return
            data = f"{len(data):x}\r\n".encode() + data + b"\r\n"
        await self.write(data, pause_s)

    async def end(self) -> None:
        """The end of the body, as its framing says it."""
        if self._framing == "chunked":
            await self.write(b"0\r\n\r\n")
        if self._close_after:
            self.fin()

    # What happens to it

    @property
    def engine(self) -> FakeEngine:
        return self._intake.engine

    @property
    def socket(self) -> Any:
        return self._transport.get_extra_info("socket")

    @property
    def is_open(self) -> bool:
        return not self._transport.is_closing()

    @property
    def buffered(self) -> int:
        """Bytes written here that the kernel has not taken yet."""
        return self._transport.get_write_buffer_size()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is none by class
        self._intake.on_open(self)

    def data_received(self, data: bytes) -> None:
        self.received.append((time.monotonic(), data))
        self._arrived.set()
        self._intake.on_data(self, data)

    def eof_received(self) -> bool:
        self.fin_at = time.monotonic()
        self._leave("fin", self.fin_at)
        return True  # stay half open: a script may still want to write

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed_at = time.monotonic()
        if isinstance(exc, ConnectionError):
            self.rst_at = self.closed_at
            self._leave("rst", self.closed_at)
        self.left.set()
        self.lost.set()
        self._arrived.set()
        self._writable.set()
        self._intake.on_lost(self)

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def _leave(self, how: str, now: float) -> None:
        if self.request is not None and self.request.gone_at is None:
            self.request.gone_at, self.request.gone_by = now, how
        self.left.set()
        self._arrived.set()
        self._intake.on_left(self)

    _framing = "length"
    _close_after = False


def _bytes(data: bytes | str | dict[str, Any] | list[Any]) -> bytes:
    if isinstance(data, bytes):
        return data
    if isinstance(data, str):
        return data.encode()
    return json.dumps(data, separators=(",", ":")).encode()


def _phrase(status: int) -> str:
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return "Status"
