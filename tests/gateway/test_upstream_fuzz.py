"""Whatever bytes a backend sends, in whatever pieces: one meaning, no exception, bounded memory."""

import asyncio
import itertools
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.runtime.http1 import MAX_HEAD, Response

# Fragments that together make up well-formed, broken and hostile responses.
FRAGMENTS = st.sampled_from(
    [
        b"HTTP/1.1 200 OK\r\n",
        b"HTTP/1.0 200 OK\r\n",
        b"HTTP/1.1 100 Continue\r\n\r\n",
        b"HTTP/1.1 101 Switching\r\n\r\n",
        b"HTTP/1.1 204 No Content\r\n",
        b"Content-Length: 5\r\n",
        b"Content-Length: 0\r\n",
        b"Transfer-Encoding: chunked\r\n",
        b"Transfer-Encoding: gzip\r\n",
        b"Connection: close\r\n",
        b"X-Name:  value \r\n",
        b" folded\r\n",
        b"\r\n",
        b"5\r\nhello\r\n",
        b"5;ext=1\r\nhello\r\n",
        b"0\r\n\r\n",
        b"0\r\nX-Trailer: 1\r\n\r\n",
        b"hello",
        b"\n",
        b"\x00\xff",
    ]
)
WIRES = st.lists(FRAGMENTS | st.binary(max_size=6), max_size=14).map(b"".join)


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    yield loop
    loop.close()


def _meaning(
    loop: asyncio.AbstractEventLoop, pieces: list[bytes], bodiless: bool
) -> tuple[object, ...]:
    response = Response(loop, bodiless=bodiless, replayed=False)
    for piece in pieces:
        response.feed(piece)
    response.feed_eof()
    failure = response._failure[0] if response._failure else None
    return (
        response.head_done,
        response.status,
        response.headers if response.head_done else None,
        b"".join(response._pieces),
        response.ended,
        response.ended and response.reusable,
        failure,
    )


@given(wire=WIRES, cuts=st.lists(st.integers(0, 200), max_size=8), bodiless=st.booleans())
def test_the_meaning_does_not_depend_on_the_pieces(
    loop: asyncio.AbstractEventLoop, wire: bytes, cuts: list[int], bodiless: bool
) -> None:
    bounds = sorted({0, len(wire), *[cut for cut in cuts if cut < len(wire)]})
    pieces = [wire[a:b] for a, b in itertools.pairwise(bounds)]
    single = [wire[i : i + 1] for i in range(len(wire))]
    whole = _meaning(loop, [wire] if wire else [], bodiless)
    assert _meaning(loop, pieces, bodiless) == whole
    assert _meaning(loop, single, bodiless) == whole


@given(wire=WIRES, repeated=FRAGMENTS)
def test_no_backend_can_make_the_head_grow_without_bound(
    loop: asyncio.AbstractEventLoop, wire: bytes, repeated: bytes
) -> None:
    response = Response(loop, bodiless=False, replayed=False)
    response.feed(wire)
    for _ in range(3 * MAX_HEAD // 4096):
        if response.failed:
            break
        response.feed(repeated * (4096 // len(repeated)))
    held = sum(len(name) + len(value) for name, value in response.headers)
    assert held <= 2 * MAX_HEAD
