"""One connection to a backend: writes a request, feeds the answer, watches the clock, gives up at once.

Law of this file: a connection carries one exchange at a time, is never half-closed, and every way in which the
socket can fail reaches the exchange as one UpstreamError. Bytes that nobody asked for end the connection.
"""

from __future__ import annotations

import asyncio
import select
import socket
from collections.abc import Callable
from typing import Final, cast

from gateway.runtime.deadlines import Alarm, Deadlines
from gateway.runtime.http1 import HIGH_WATER, Response

SLICE: Final = (
    128 * 1024
)  # a body is handed to the transport in slices, so that it never holds a copy of it all
BURST: Final = 1024 * 1024  # bytes written before other tasks get their turn
ONE_WRITE: Final = 64 * 1024  # up to here head and body leave in one write

# A server that closed an idle connection did so before our request reached it, so we learn of it within a round
# trip. Later than this, the backend may have been at work, and a second attempt could generate twice.
STALE_WINDOW_S: Final = 0.25

# The kernel gives up on data that a vanished peer does not acknowledge after this (it would be 15 min). A peer that
# is alive but does not read (a busy llama-server with a body above its socket buffer) looks the same to the kernel,
# so larger bodies go without; the deadlines still hold for them.
UNACKED_MS: Final = 45_000
FITS_UNREAD: Final = 32 * 1024


class Connection(asyncio.Protocol):
    """Owns one socket and the timer that watches it. `on_lost` is told when the socket is gone."""

    __slots__ = (
        "_alarm",
        "_deadlines",
        "_on_lost",
        "_pending",
        "_poll",
        "_raw",
        "_reading_paused",
        "_response",
        "_short_patience",
        "_sock",
        "_transport",
        "_writing_paused",
        "closing",
        "loop",
        "lost",
        "peer",
        "served",
    )

    def __init__(
        self,
        sock: socket.socket,
        *,
        peer: str,
        raw: bool,
        on_lost: Callable[[Connection], None],
    ) -> None:
        self.peer = peer  # for logs
        self.served = 0
        self.lost = False
        self.closing = False
        self.loop = asyncio.get_running_loop()
        self._sock = sock
        self._raw = raw  # no TLS: what is on the socket is HTTP
        self._on_lost = on_lost
        self._transport: asyncio.Transport | None = None
        self._response: Response | None = None
        self._pending = memoryview(b"")
        self._writing_paused = False
        self._reading_paused = False
        self._deadlines = Deadlines()
        self._alarm = Alarm(self.loop, self._on_silence)
        self._poll = select.poll()
        self._poll.register(sock.fileno(), select.POLLIN)
        self._short_patience = False

    # What an exchange calls.

    def start(self, response: Response, head: bytes, body: bytes, deadlines: Deadlines) -> None:
        """Write the request; large bodies go on leaving while the caller waits for the response.

        So an answer that comes before all of the body has left is heard, whatever becomes of the rest.
        """
        self.served += 1
        self._response = response
        self._deadlines = deadlines
        if self.lost:
            self._gone("closed at once")
            return
        self._set_patience(short=len(body) <= FITS_UNREAD)
        if len(body) <= ONE_WRITE:
            self._write(head + body)
            self._sent()
        else:
            self._write(head)
            self._pending = memoryview(body)
            self._push()

    def is_quiet(self) -> bool:
        """Nothing has come on this idle connection: no end, no stray bytes, not even some still unread."""
        return not self.closing and not self._poll.poll(0)

    def release(self) -> bool:
        """The exchange is over. True if another may follow; otherwise the socket is closed, at once."""
        response = self._response
        self._response = None
        self._alarm.off()
        if response is None:
            return False
        whole = response.ended and response.reusable and self._all_sent()
        response.detach()
        if self.closing or not whole:
            self.abort()
            return False
        self._resume_reading()
        return True

    def abort(self) -> None:
        """Close the socket now, dropping what is unsent. May be called again."""
        self.closing = True
        self._pending = memoryview(b"")
        self._alarm.close()
        if self._transport is not None:
            self._transport.abort()

    # What the transport calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is one by behaviour only

    def data_received(self, data: bytes) -> None:
        response = self._response
        if response is None:
            self.abort()
            return
        pass_chunk = response.on_chunk
        if pass_chunk is not None and pass_chunk(data, now := self.loop.time()):
            self._alarm.since = now
            return
        response.feed(data)
        if response.ended:
            self._alarm.off()
        elif response.failed:
            self.abort()
        elif response.first_byte_at is not None:
            if response.backlog <= HIGH_WATER:
                self._alarm.set(self._deadlines.between_bytes_s)
            elif not self._reading_paused:
                self._pause_reading(response)

    def eof_received(self) -> None:
        # The transport would flush before it closes, towards a peer that may never read: judge now, and abort.
        if self._response is not None:
            self._response.feed_eof()
        self._gone("end of stream")
        self.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        if exc is not None:
            self._salvage()
        self.lost = True
        self._gone(str(exc) if exc is not None else "closed")
        self.abort()
        self._on_lost(self)

    def pause_writing(self) -> None:
        self._writing_paused = True

    def resume_writing(self) -> None:
        self._writing_paused = False
        self._push()

    # Below: private steps.

    def _write(self, data: bytes | memoryview) -> None:
        if self._transport is not None and not self.closing:
            self._transport.write(data)

    def _all_sent(self) -> bool:
        transport = self._transport
        return transport is not None and not self._pending and not transport.get_write_buffer_size()

    def _push(self) -> None:
        """Write as much of the pending body as the transport takes without buffering it."""
        if not self._pending:
            return
        budget = BURST
        while self._pending and not self._writing_paused and budget > 0:
            part, self._pending = self._pending[:SLICE], self._pending[SLICE:]
            budget -= len(part)
            self._write(part)
        if not self._pending:
            self._pending = memoryview(b"")  # an empty slice would keep the body
            self._sent()
            return
        self._alarm.set(self._deadlines.first_byte_s)
        if not self._writing_paused:
            self.loop.call_soon(self._push)

    def _sent(self) -> None:
        response = self._response
        if response is not None and not response.ended:
            response.read_started_at = self.loop.time()
            self._alarm.set(self._deadlines.first_byte_s)

    def _pause_reading(self, response: Response) -> None:
        """The reader is slow: leave the rest to TCP, and do not blame the backend for the silence."""
        self._reading_paused = True
        self._alarm.off()
        response.on_drained = self._on_drained
        if self._transport is not None and not self.closing:
            self._transport.pause_reading()

    def _on_drained(self) -> None:
        self._resume_reading()
        self._alarm.set(self._deadlines.between_bytes_s)

    def _resume_reading(self) -> None:
        if not self._reading_paused:
            return
        self._reading_paused = False
        if self._transport is not None and not self.closing:
            self._transport.resume_reading()

    def _gone(self, detail: str) -> None:
        """The peer has closed: tell the exchange, if there is one that still waits, in its own terms."""
        response = self._response
        if response is None or response.ended:
            return
        detail = f"{self.peer}: {detail}"
        if response.head_done:
            response.fail("broke", detail)
        elif self.served > 1 and not response.heard and self._cannot_have_run(response):
            response.fail("stale", detail)
        else:
            response.fail("closed", detail)

    def _cannot_have_run(self, response: Response) -> bool:
        sent_at = response.read_started_at
        return sent_at is None or self.loop.time() - sent_at <= STALE_WINDOW_S

    def _salvage(self) -> None:
        """Read what had arrived before a write failed: a refusal sent while our body was still leaving.

        A peer that closes with our bytes unread resets the connection; its answer is in our kernel, but the
        transport has stopped reading.
        """
        response = self._response
        if not self._raw or response is None:
            return
        try:
            while not response.ended and not response.failed:
                data = self._sock.recv(HIGH_WATER)
                if not data:
                    break  # not an end: the connection was reset, and the kernel has already said so
                response.feed(data)
        except OSError:
            pass  # the reset itself, or nothing there: `_gone` tells it

    def _set_patience(self, *, short: bool) -> None:
        if short != self._short_patience and hasattr(socket, "TCP_USER_TIMEOUT"):
            self._short_patience = short
            limit = UNACKED_MS if short else 0
            self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, limit)

    def _on_silence(self) -> None:
        response = self._response
        if response is not None:
            early = response.first_byte_at is None
            response.fail(
                "first_byte_timeout" if early else "between_bytes_timeout", f"{self.peer}: silent"
            )
        self.abort()
