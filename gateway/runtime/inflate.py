"""Request bodies out of their content codings: gzip, deflate, br, zstd, also one inside the other.

Law of this file: a decoded body never grows above the limit by more than one STEP, whatever it claims to be; the loop
works on small ones only, and on one STEP of those. What takes longer goes on in a thread, which stops when its
request ends.
"""

from __future__ import annotations

import asyncio
import io
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Final, NoReturn

import brotli  # type: ignore[import-untyped]
import zstandard

from gateway.core.errors import GatewayError
from gateway.runtime import inflate_zstd

STEP: Final = 1 << 20  # bytes that are decoded at a time
FEED: Final = 1 << 16  # bytes that are given to a decoder at a time
MOST_CODINGS: Final = 4  # one inside the other; nobody means more
MOST_MEMBERS: Final = 4096  # of a gzip body: each costs time, also an empty one

Pieces = Iterable[bytes | memoryview]


def codings_of(values: Iterable[bytes]) -> tuple[str, ...]:
    """The codings that Content-Encoding headers name, in the order in which they were applied.

    Raises GatewayError(unsupported_encoding).
    """
    names = [name.strip().lower() for value in values for name in value.split(b",")]
    codings = tuple(name.decode("latin-1") for name in names if name not in (b"", b"identity"))
    for coding in codings:
        if coding not in DECODERS:
            raise GatewayError(
                "unsupported_encoding",
                f"Content-Encoding {coding[:40]!r} is not understood; use gzip, deflate, br, zstd or none.",
            )
    if len(codings) > MOST_CODINGS:
        raise GatewayError(
            "unsupported_encoding", f"A body may have at most {MOST_CODINGS} content codings."
        )
    return codings


async def inflate(
    body: bytes, codings: tuple[str, ...], limit_bytes: int, too_large: Callable[[], GatewayError]
) -> bytes:
    """The body without its codings.

    Raises GatewayError: what `too_large` makes, when it is above the limit; invalid_json, when it is cut or corrupt.
    """
    work = _Inflation(body, codings, limit_bytes)
    is_small = len(body) <= FEED and len(codings) == 1
    try:
        if not (is_small and work.step()):
            await asyncio.to_thread(work.finish)
    except (zlib.error, brotli.error, zstandard.ZstdError, EOFError) as error:
        raise GatewayError(
            "invalid_json",
            f"The request body is no whole {', '.join(codings)} data: {str(error)[:80]}.",
        ) from error
    finally:
        work.stopped.set()
    if work.is_too_large:
        raise too_large()
    return work.result()


class _Inflation:
    """One body while it is decoded. Owned by one `inflate`; used by one thread at a time."""

    def __init__(self, body: bytes, codings: tuple[str, ...], limit_bytes: int) -> None:
        pieces: Pieces = _slices(body)
        for coding in reversed(codings):
            pieces = DECODERS[coding](iter(pieces))
        self._pieces = iter(pieces)
        self._limit = limit_bytes
        self._out = io.BytesIO()  # it grows in place and hands its bytes out without a copy
        self._size = 0
        self.stopped = threading.Event()

    @property
    def is_too_large(self) -> bool:
        return self._size > self._limit

    def step(self) -> bool:
        """Decode about one STEP. True: that was the end of it."""
        goal = self._size + STEP
        for piece in self._pieces:
            self._size += len(piece)
            if self.is_too_large:
                self._out = io.BytesIO()
                return True
            self._out.write(piece)
            if self._size >= goal:
                return False
        return True

    def finish(self) -> None:
        """Decode the rest, in a thread of its own."""
        while not self.stopped.is_set() and not self.step():
            pass

    def result(self) -> bytes:
        return self._out.getvalue()


def _slices(body: bytes) -> Iterator[memoryview]:
    view = memoryview(body)
    for at in range(0, len(view), FEED):
        yield view[at : at + FEED]


def _gzip(pieces: Iterator[bytes | memoryview]) -> Iterator[bytes]:
    return _zlib(pieces, zlib.MAX_WBITS | 16, members=True)


def _deflate(pieces: Iterator[bytes | memoryview]) -> Iterator[bytes]:
    """The zlib format, as the standard says, or the bare one that some clients send."""
    first = b""
    for piece in pieces:
        first += piece
        if len(first) >= 2:
            break
    has_header = (
        len(first) >= 2 and first[0] & 15 == 8 and int.from_bytes(first[:2], "big") % 31 == 0
    )
    bits = zlib.MAX_WBITS if has_header else -zlib.MAX_WBITS
    yield from _zlib(_chained(first, pieces), bits, members=False)


def _zlib(pieces: Iterator[bytes | memoryview], bits: int, *, members: bool) -> Iterator[bytes]:
    decoder, left = zlib.decompressobj(bits), MOST_MEMBERS if members else 1
    for piece in pieces:
        data: bytes | memoryview = piece
        while data:
            if decoder.eof:
                left -= 1
                if not left:
                    _cut("there are bytes behind its end")
                decoder = zlib.decompressobj(bits)
            yield decoder.decompress(data, STEP)
            data = decoder.unused_data if decoder.eof else decoder.unconsumed_tail
    while not decoder.eof:
        rest = decoder.decompress(b"", STEP)
        if not rest:
            _cut("it ends too early")
        yield rest


def _brotli(pieces: Iterator[bytes | memoryview]) -> Iterator[bytes]:
    decoder = brotli.Decompressor()
    for piece in pieces:
        yield decoder.process(piece, output_buffer_limit=STEP)
        while not decoder.can_accept_more_data():
            yield decoder.process(b"", output_buffer_limit=STEP)
    while not decoder.is_finished():  # it keeps output back though it takes more input
        rest = decoder.process(b"", output_buffer_limit=STEP)
        if not rest:
            _cut("it ends too early")
        yield rest


def _zstd(pieces: Iterator[bytes | memoryview]) -> Iterator[bytes]:
    return inflate_zstd.decoded(pieces, STEP)


def _chained(first: bytes, rest: Iterator[bytes | memoryview]) -> Iterator[bytes | memoryview]:
    yield first
    yield from rest


def _cut(why: str) -> NoReturn:
    raise EOFError(why)


DECODERS: Final[dict[str, Callable[[Iterator[bytes | memoryview]], Iterator[bytes]]]] = {
    "gzip": _gzip,
    "x-gzip": _gzip,
    "deflate": _deflate,
    "br": _brotli,
    "zstd": _zstd,
}
