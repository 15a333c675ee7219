"""A chunked body that is passed on in the turn in which it comes is the body, however it was chunked and split."""

from __future__ import annotations

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from gateway.core.sse import Tap
from gateway.core.wire import Wire
from gateway.runtime.http1 import Response
from gateway.runtime.watch import Watch
from tests.fakes.meter import Counts

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def chunk(data: bytes, style: str) -> bytes:
    size = b"%x" % len(data)
    if style == "upper":
        size = size.upper()
    elif style == "zeros":
        size = b"000" + size
    elif style == "extension":
        size += b";name=value"
    return size + b"\r\n" + data + b"\r\n"


DATA = st.one_of(
    st.binary(min_size=1, max_size=300),
    st.sampled_from(
        [b"5\r\nhello\r\n", b"0\r\n\r\n", b"\r\n", b"a\r\n0123456789\r\n", b"data: {}\n\n"]
    ),
)
STYLES = st.sampled_from(["plain", "plain", "plain", "upper", "zeros", "extension"])


@st.composite
def reads(draw: st.DrawFn) -> tuple[bytes, list[bytes]]:
    """The body, and the reads in which its chunks come: mostly one a read, some cut, some together."""
    parts = draw(st.lists(st.tuples(DATA, STYLES), min_size=1, max_size=12))
    split: list[bytes] = []
    for data, style in parts:
        whole = chunk(data, style)
        if draw(st.booleans()):
            cut = draw(st.integers(1, len(whole) - 1))
            split += [whole[:cut], whole[cut:]]
        elif split and draw(st.booleans()):
            split[-1] += whole
        else:
            split.append(whole)
    if draw(st.booleans()):
        split.append(b"0\r\n\r\n")
    else:
        split[-1] += b"0\r\n\r\n"
    return b"".join(data for data, _ in parts), split


@given(reads(), st.integers(0, 5), st.booleans())
def test_every_byte_of_the_body_comes_once_and_in_order(
    sent: tuple[bytes, list[bytes]], behind_at: int, trickle: bool
) -> None:
    body, split = sent
    if trickle:
        split = [part[i : i + 3] for part in split for i in range(0, len(part), 3)]
    assert asyncio.run(passed(split, behind_at)) == body


async def passed(split: list[bytes], behind_at: int) -> bytes:
    """What a relay would send on, whose client is behind at one of the reads."""
    response = Response(asyncio.get_running_loop(), bodiless=False, replayed=False)
    got: list[bytes] = []

    def keep(data: bytes) -> bool:
        got.append(data)
        return len(got) != behind_at

    def keep_chunk(data: bytes) -> bool:
        at = data.index(b"\r\n") + 2
        assert data == b"%x\r\n%b\r\n" % (len(data[at:-2]), data[at:-2]), (
            "as it would be framed here"
        )
        return keep(data[at:-2])

    async def relayed() -> None:
        watch = Watch(Tap(Wire.CHAT), Counts())
        take_chunk = watch.chunk_taker(keep_chunk, response.stop_passing)
        while not response.complete:
            await response.pass_on(keep, take_chunk)
            got.append(await response.read())

    response.feed(HEAD)
    relaying = asyncio.ensure_future(relayed())
    for data in split:
        await asyncio.sleep(0)
        if not (response.on_chunk is not None and response.on_chunk(data, 0.0)):
            response.feed(data)
    await relaying
    assert response.ended
    assert not response.failed
    return b"".join(got)


def test_a_chunk_is_passed_as_it_came_only_between_two_chunks() -> None:
    async def scenario() -> list[bool]:
        response = Response(asyncio.get_running_loop(), bodiless=False, replayed=False)
        response.feed(HEAD)
        passing = asyncio.ensure_future(
            response.pass_on(lambda _data: True, lambda _data, _now: True)
        )
        await asyncio.sleep(0)
        told = []
        for data in (b"3\r\nabc\r\n", b"3\r\nab", b"c\r\n", b"3", b"\r\nabc\r\n", b"0"):
            response.feed(data)
            told.append(response.on_chunk is not None)
        passing.cancel()
        return told

    assert asyncio.run(scenario()) == [True, False, True, False, True, False]
