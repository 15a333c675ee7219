"""One HTTP/1.1 response while it arrives: bytes in, head and body out.

Law of this file: a body is complete only when its own framing says so (RFC 9112 section 6.3: chunked before
length before close), and whatever is wrong with the bytes is an UpstreamError, raised once everything that came
before it has been read. There is no socket here; `connection.py` has it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final, TypeAlias

import httptools

from gateway.runtime.upstream_error import Kind, UpstreamError

MAX_HEAD: Final = (
    64 * 1024
)  # bytes of head, and of bytes in a row that bring no body (chunk headers, trailers)
_FRAMING: Final = frozenset({b"content-length", b"transfer-encoding"})
HIGH_WATER: Final = 256 * 1024  # unread body bytes above which the connection stops reading


TakeChunk: TypeAlias = Callable[[bytes, float], bool]


class Response:
    """An answer of a backend. Owned by the exchange that asked; fed by its connection.

    `headers` have lower-case names and are otherwise as received. `read_started_at` is the loop time at which the
    whole request had been handed to the socket, `first_byte_at` that of the first body byte off the wire.
    `replayed` is true when a stale idle connection made a second attempt necessary.
    """

    __slots__ = (
        "_between",
        "_bodiless",
        "_chunk_taker",
        "_dry",
        "_failure",
        "_feeding",
        "_framed",
        "_loop",
        "_parser",
        "_pieces",
        "_taker",
        "_waiter",
        "backlog",
        "ended",
        "failed",
        "first_byte_at",
        "head_done",
        "headers",
        "heard",
        "on_chunk",
        "on_drained",
        "read_started_at",
        "replayed",
        "reusable",
        "status",
    )

    def __init__(self, loop: asyncio.AbstractEventLoop, *, bodiless: bool, replayed: bool) -> None:
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []
        self.read_started_at: float | None = None
        self.first_byte_at: float | None = None
        self.replayed = replayed
        # Between the response and its connection:
        self.heard = False  # any byte has come
        self.head_done = False
        self.ended = False  # the framing was satisfied
        self.failed = False  # it will not be
        self.backlog = 0  # body bytes that nobody has read yet
        self.reusable = True  # as far as the response can tell; counts once it has ended
        self.on_drained: Callable[[], None] | None = (
            None  # set while the connection waits for a reader
        )
        # Set while a whole chunk may go past the parser, which stands between two. False: the read is for `feed`.
        self.on_chunk: TakeChunk | None = None
        self._loop = loop
        self._bodiless = bodiless  # the answer to HEAD
        self._framed = False  # by length or chunks; otherwise the body ends with the connection
        self._pieces: list[bytes] = []
        self._between = False  # the last chunk that the parser saw is whole, and no other has begun
        self._dry = 0
        self._feeding = 0
        self._failure: tuple[Kind, str] | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._taker: Callable[[bytes], bool] | None = None
        self._chunk_taker: TakeChunk | None = None
        self._parser: httptools.HttpResponseParser | None = httptools.HttpResponseParser(self)
        # With both framings present chunked wins, and the connection is not used again.
        self._parser.set_dangerous_leniencies(lenient_chunked_length=True)

    @property
    def complete(self) -> bool:
        """The body ended cleanly and read() has handed out all of it."""
        return self.ended and not self._pieces

    async def read(self) -> bytes:
        """All body bytes that came since the last call, waiting for some if there are none; b"" at the clean end.

        Raises UpstreamError, after the last byte that came, if the body did not end cleanly.
        """
        while not self._pieces:
            if self.ended:
                return b""
            self._raise_failure()
            await self._woken()
        return self._take()

    async def peek(self) -> bytes:
        """What `read` would give out, left for it to give. Waits and raises as `read` does."""
        while not (self._pieces or self.ended):
            self._raise_failure()
            await self._woken()
        return b"".join(self._pieces)

    async def pass_on(self, take: Callable[[bytes], bool], take_chunk: TakeChunk) -> None:
        """Give each read to `take` in the very turn in which it comes off the wire, until `take` says False.

        A read that comes between two chunks is first offered to `take_chunk`, with the loop's time. If it is one whole
        chunk, that may pass it on as it came and say True: so an engine's event is not unpacked and packed again.
        Returns when `take` says False, after `stop_passing`, and when the body has ended or failed: the last bytes, and
        how it ended, are for `read`. To wake a task for each event of a stream would cost as much as all else that is
        done for it.
        """
        while self._pieces and not (self.ended or self.failed):
            if not take(self._take()):
                return
        if self.ended or self.failed:
            return
        self._taker, self._chunk_taker = take, take_chunk
        self.on_chunk = take_chunk if self._between else None
        try:
            await self._woken()
        finally:
            self._taker = self._chunk_taker = self.on_chunk = None

    def stop_passing(self) -> None:
        """End `pass_on`: what comes from now on is for `read`."""
        self._taker = self._chunk_taker = self.on_chunk = None
        self._wake()

    async def wait_for_head(self) -> None:
        """Returns when status and headers are known. Raises UpstreamError if they will never be."""
        while not self.head_done:
            self._raise_failure()
            await self._woken()

    # What the connection calls.

    def feed(self, data: bytes) -> None:
        """Take bytes off the wire. Never raises."""
        if self._parser is None:
            return
        self.heard = True
        self.on_chunk = None
        self._feeding = len(data)
        before = self.backlog
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._on_garbage(error)
        if self.backlog != before:
            self._dry = 0
        else:
            self._count_dry(len(data))
        taker = self._taker
        if taker is None or self.ended or self.failed:
            self._wake()
        elif self._pieces and not taker(self._take()):
            self.stop_passing()
        elif self._between and data.endswith(
            b"\r\n"
        ):  # else a chunk has begun that is not told yet
            self.on_chunk = self._chunk_taker

    def feed_eof(self) -> None:
        """The backend will send no more. Ends a body that is delimited by the close, and nothing else."""
        if self.head_done and not self._framed and not self.failed:
            self.reusable = False
            self.ended = True
        self._wake()

    def fail(self, kind: Kind, detail: str) -> None:
        """Nothing more will come, for this reason. The first reason stays; after the end there is none."""
        if not self.ended and not self.failed:
            self.failed = True
            self._failure = (kind, detail)
        self.reusable = False
        self._wake()

    def detach(self) -> None:
        """The exchange is over: take no more bytes, and let go of the parser (it points back here)."""
        self.fail("broke", "the exchange was left before its end")
        self._parser = None
        self.on_drained = None

    # What the parser calls.

    def on_message_begin(self) -> None:
        if self.head_done:
            self.reusable = False  # bytes after the end: of whom, nobody knows
        else:
            self.headers = []  # those of an interim (1xx) response are dropped

    def on_header(self, name: bytes, value: bytes) -> None:
        if self.head_done:
            return  # a trailer
        name = name.lower()
        if name in _FRAMING:
            self._on_framing(name, value)
        if value and value[-1] <= 32:
            value = value.rstrip(b" \t")  # the parser strips the left side only
        self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        if self.head_done or self.failed or self._parser is None:
            return
        status = self._parser.get_status_code()
        if status < 200:
            self._on_interim(status)
            return
        if self._dry + self._feeding > MAX_HEAD and _size(self.headers) > MAX_HEAD:
            self.fail("protocol", "response headers above 64 KiB")
            return
        if status == 204:  # engines' frameworks add a length, which RFC 9110 8.6 forbids to pass on
            self.headers = [pair for pair in self.headers if pair[0] != b"content-length"]
        self.status = status
        self.head_done = True
        if self._bodiless:
            self._end()

    def on_body(self, body: bytes) -> None:
        if self.ended or not self.head_done:
            return
        if self.first_byte_at is None:
            self.first_byte_at = self._loop.time()
        self._pieces.append(body)
        self.backlog += len(body)

    def on_chunk_header(self) -> None:
        self._between = False

    def on_chunk_complete(self) -> None:
        self._between = True

    def on_message_complete(self) -> None:
        if self.head_done and not self.ended:
            self._end()

    # Below: private steps.

    def _end(self) -> None:
        self.ended = True
        if self._parser is None or not self._parser.should_keep_alive():
            self.reusable = False

    def _on_interim(self, status: int) -> None:
        if status == 101:
            self.fail("protocol", "switched protocols unasked")
        self._framed = False

    def _on_framing(self, name: bytes, value: bytes) -> None:
        # Transfer-Encoding is hop-by-hop, so a coding other than chunked would reach the client unlabelled.
        if name == b"transfer-encoding" and value.strip().lower() != b"chunked":
            self.fail("protocol", "a transfer coding other than chunked")
        elif self._framed:
            self.reusable = False  # framed twice: chunked wins, and then the connection ends
        self._framed = True

    def _on_garbage(self, error: Exception) -> None:
        self.fail("protocol", f"{type(error).__name__}: {error}"[:200])

    def _count_dry(self, size: int) -> None:
        self._dry += size
        if self._dry > MAX_HEAD and not self.ended:
            self.fail("protocol", "64 KiB of head, chunk headers or trailers without a body byte")

    def _take(self) -> bytes:
        pieces = self._pieces
        self._pieces = []
        self.backlog = 0
        drained = self.on_drained
        if drained is not None:
            self.on_drained = None
            drained()
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise UpstreamError(*self._failure)

    def _woken(self) -> asyncio.Future[None]:
        """To be awaited; one at a time."""
        waiter = self._waiter = self._loop.create_future()
        return waiter

    def _wake(self) -> None:
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)


def _size(headers: list[tuple[bytes, bytes]]) -> int:
    return sum(len(name) + len(value) + 4 for name, value in headers)
