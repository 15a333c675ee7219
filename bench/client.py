"""A client that costs little: one HTTP/1.1 connection on httptools, which notes when things came.

Times are CLOCK_MONOTONIC, as in `bench.engines`, and not the loop's own clock, which stands still within a turn.
"""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, field

import httptools


@dataclass(slots=True)
class Answered:
    """One answer. Times are seconds since the request was written."""

    status: int = 0
    first_s: float | None = None  # to the first body byte
    whole_s: float | None = None
    gaps: list[float] = field(default_factory=list)
    events: int = 0
    retry_after_s: float | None = None
    complete: bool = False  # a stream: with its [DONE]


class Client(asyncio.Protocol):
    """One connection, used for one request after the other."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport = None
        self.closed = False
        self._waiter: asyncio.Future[None] | None = None
        self.answer = Answered()
        self._parser = None
        self._loop = asyncio.get_running_loop()
        self._start = self._last = 0.0

    @classmethod
    async def connect(cls, port: int) -> Client:
        _, client = await asyncio.get_running_loop().create_connection(cls, "127.0.0.1", port)
        return client

    def connection_made(self, transport):
        self.transport = transport

    async def ask(self, request: bytes) -> Answered:
        """Raises ConnectionError when the connection ends before the answer does."""
        if self.closed:
            raise ConnectionResetError("closed while idle")
        self.answer = out = Answered()
        self._parser = httptools.HttpResponseParser(self)
        self._waiter = self._loop.create_future()
        self._start = now = time.monotonic()
        self._last = now
        self.transport.write(request)
        await self._waiter
        return out

    def leave(self) -> None:
        self.closed = True
        self.transport.abort()

    def data_received(self, data):
        if self._parser is not None:
            self._parser.feed_data(data)

    def on_header(self, name, value):
        name = name.lower()
        if name == b"retry-after-ms":
            self.answer.retry_after_s = int(value) / 1000
        elif name == b"retry-after" and self.answer.retry_after_s is None:
            self.answer.retry_after_s = float(value)

    def on_headers_complete(self):
        self.answer.status = self._parser.get_status_code()

    def on_body(self, body):
        out, now = self.answer, time.monotonic()
        if out.first_s is None:
            out.first_s = now - self._start
        else:
            out.gaps.append(now - self._last)
        self._last = now
        out.events += body.count(b"data: ")
        out.complete = out.complete or b"[DONE]" in body

    def on_message_complete(self):
        self.answer.whole_s = time.monotonic() - self._start
        if not self._parser.should_keep_alive():
            self.leave()
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def connection_lost(self, error):
        self.closed = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_exception(ConnectionResetError(str(error or "closed")))


def request(
    port: int,
    *,
    stream: bool,
    key: str,
    body_bytes: int = 8192,
    who: str = "",
    max_tokens: int = 64,
) -> bytes:
    """One chat completion as bytes, its prompt `body_bytes` long and signed by `who`."""
    body = json.dumps(
        {
            "model": "m",
            "stream": stream,
            "max_tokens": max_tokens,
            "messages": [
                {"role": "system", "content": "x" * body_bytes},
                {"role": "user", "content": f"hi who={who}"},
            ],
        }
    ).encode()
    return (
        f"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\ncontent-type: application/json\r\n"
        f"authorization: Bearer {key}\r\ncontent-length: {len(body)}\r\n\r\n"
    ).encode() + body


def quantile(values: list[float], q: float) -> float | None:
    """Nearest rank; None without values."""
    return sorted(values)[min(len(values) - 1, int(len(values) * q))] if values else None
