"""Every way in which a response may be delimited, and every way in which it may not (B009, B042, RFC 9112)."""

import asyncio
from collections.abc import Callable

import pytest

from gateway.runtime.upstream import UpstreamError
from tests.gateway.upstream_server import (
    Peer,
    Server,
    answers,
    answers_once,
    ask,
    both_loops,
    length,
    run,
)

Loop = Callable[[], asyncio.AbstractEventLoop]
CHUNKED = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
)


@both_loops
@pytest.mark.parametrize(
    ("wire", "body"),
    [
        (length(b"hello"), b"hello"),
        (length(b""), b""),
        (CHUNKED + b"5\r\nhello\r\n6;ext=1\r\n world\r\n0\r\n\r\n", b"hello world"),
        (CHUNKED + b"1\r\na\r\n0\r\nX-Trailer: 1\r\nX-More: 2\r\n\r\n", b"a"),
        (b"HTTP/1.1 200 OK\r\n\r\nuntil the close", b"until the close"),
        (b"HTTP/1.0 200 OK\r\n\r\nuntil the close", b"until the close"),
        (b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\nok", b"ok"),
        (b"HTTP/1.1 200\r\nContent-Length: 2\r\n\r\nok", b"ok"),
        (
            b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early\r\nLink: x\r\n\r\n" + length(b"ok"),
            b"ok",
        ),
        (b"HTTP/1.1 204 No Content\r\n\r\n", b""),
        (b"HTTP/1.1 304 Not Modified\r\nContent-Length: 9\r\n\r\n", b""),
    ],
)
def test_a_body_is_the_same_however_the_bytes_are_split(
    new_loop: Loop, wire: bytes, body: bytes
) -> None:
    async def main() -> None:
        split = 0

        async def script(peer: Peer) -> None:
            await peer.request()
            await peer.send(wire[:split])
            await asyncio.sleep(0.001)
            await peer.send(wire[split:])

        async with Server(script) as server:
            for split in range(len(wire) + 1):  # noqa: B007 - the script reads it
                response, got = await ask(server.upstream())
                assert got == body
                assert response.complete
                assert b"x-trailer" not in dict(response.headers)
                assert b"link" not in dict(response.headers)

    run(new_loop, main())


def test_a_body_that_comes_byte_by_byte_is_whole() -> None:
    wire = (
        CHUNKED
        + b"".join(b"%x\r\n%b\r\n" % (len(x), x) for x in [b"a" * 17, b"b" * 300])
        + b"0\r\n\r\n"
    )

    async def main() -> None:
        async def script(peer: Peer) -> None:
            await peer.request()
            await peer.send_slowly(wire)

        async with Server(script) as server:
            _, got = await ask(server.upstream())
            assert got == b"a" * 17 + b"b" * 300

    run(asyncio.new_event_loop, main())


@both_loops
@pytest.mark.parametrize(
    ("wire", "kept"),
    [
        (length(b"ok"), True),
        (CHUNKED + b"2\r\nok\r\n0\r\n\r\n", True),
        (b"HTTP/1.0 200 OK\r\nConnection: keep-alive\r\nContent-Length: 2\r\n\r\nok", True),
        (b"HTTP/1.1 204 No Content\r\n\r\n", True),
        (length(b"ok", b"Connection: close"), False),
        (b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\nok", False),
        (length(b"ok") + b"HTTP/1.1 200 OK\r\n", False),
        (length(b"ok") + b"stray", False),
        # RFC 9112 section 6.3: chunked wins, and the connection ends after it.
        (
            b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n",
            False,
        ),
        (
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nContent-Length: 9\r\n\r\n2\r\nok\r\n0\r\n\r\n",
            False,
        ),
    ],
)
def test_a_connection_is_kept_only_after_an_answer_whose_end_is_beyond_doubt(
    new_loop: Loop, wire: bytes, kept: bool
) -> None:
    async def main() -> None:
        async with Server(answers(wire)) as server:
            upstream = server.upstream()
            for _ in range(3):
                _, body = await ask(upstream)
                assert body in {b"ok", b""}
                assert upstream.idle == (1 if kept else 0)
            assert server.accepted == (1 if kept else 3)

    run(new_loop, main())


def test_the_answer_to_head_has_no_body_and_leaves_the_connection_usable() -> None:
    async def main() -> None:
        head_only = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n"
        async with Server(answers(head_only, length(b"after"))) as server:
            upstream = server.upstream()
            response, body = await ask(upstream, b"", method="HEAD")
            assert (response.status, body, response.complete) == (200, b"", True)
            assert (b"content-length", b"5") in response.headers
            assert (await ask(upstream))[1] == b"after"
            assert server.accepted == 1

    run(asyncio.new_event_loop, main())


@both_loops
@pytest.mark.parametrize(
    "wire",
    [
        b"garbage\r\n\r\n",
        b"HTTP/1.1 abc OK\r\n\r\n",
        b"HTTP/1.1 20 OK\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01",
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: h2c\r\nConnection: upgrade\r\n\r\nPRI",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip\r\n\r\nzzz",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\nokk",
        b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nName : v\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX-Big: " + b"x" * 65536 + b"\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"A: b\r\n" * 12000 + b"Content-Length: 0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX-Endless: " + b"x" * 200_000,
        b"HTTP/1.1 103 Early\r\n\r\n" * 5000,
    ],
)
def test_an_answer_that_is_not_http_is_one_protocol_error(new_loop: Loop, wire: bytes) -> None:
    async def main() -> None:
        async with Server(answers(wire)) as server:
            upstream = server.upstream()
            with pytest.raises(UpstreamError) as caught:
                await ask(upstream)
            assert caught.value.kind == "protocol"
            assert caught.value.may_have_run
            assert upstream.idle == 0
            assert server.accepted == 1

    run(new_loop, main())


def test_headers_just_below_the_limit_pass() -> None:
    async def main() -> None:
        value = b"x" * (63 * 1024)
        async with Server(answers(length(b"ok", b"X-Big: " + value))) as server:
            response, body = await ask(server.upstream())
            assert dict(response.headers)[b"x-big"] == value
            assert body == b"ok"

    run(asyncio.new_event_loop, main())


@both_loops
@pytest.mark.parametrize("reset", [False, True], ids=["FIN", "RST"])
@pytest.mark.parametrize(
    ("wire", "kind", "before"),
    [
        (b"", "closed", b""),
        (b"HTTP/1.1 200 OK\r\nContent-", "closed", b""),
        (b"HTTP/1.1 100 Continue\r\n\r\n", "closed", b""),
        (length(b"hello")[:-2], "broke", b"hel"),
        (CHUNKED, "broke", b""),
        (CHUNKED + b"5\r\nhello\r\n", "broke", b"hello"),
        (CHUNKED + b"5\r\nhel", "broke", b"hel"),
        (CHUNKED + b"5", "broke", b""),
        (CHUNKED + b"5\r\nhello\r\n0\r\n", "broke", b"hello"),
    ],
)
def test_an_answer_cut_short_gives_all_its_bytes_and_then_the_error(
    new_loop: Loop, reset: bool, wire: bytes, kind: str, before: bytes
) -> None:
    async def main() -> None:
        async def script(peer: Peer) -> None:
            await peer.request()
            await peer.send(wire)
            await asyncio.sleep(0.02)
            if reset:
                peer.reset()

        async with Server(script) as server:
            upstream = server.upstream()
            got: list[bytes] = []
            with pytest.raises(UpstreamError) as caught:
                await ask(upstream, into=got)
            assert b"".join(got) == before
            assert caught.value.kind == kind
            assert caught.value.may_have_run
            assert upstream.idle == 0
            assert server.accepted == 1  # never asked again: it may have run

    run(new_loop, main())


def test_a_reset_ends_no_close_delimited_body_cleanly() -> None:
    async def main() -> None:
        async def script(peer: Peer) -> None:
            await peer.request()
            await peer.send(b"HTTP/1.1 200 OK\r\n\r\nhalf")
            await asyncio.sleep(0.02)
            peer.reset()

        async with Server(script) as server:
            with pytest.raises(UpstreamError) as caught:
                await ask(server.upstream())
            assert caught.value.kind == "broke"

    run(asyncio.new_event_loop, main())


def test_broken_chunks_are_an_error_after_the_good_ones() -> None:
    async def main() -> None:
        async with Server(answers(CHUNKED + b"2\r\nok\r\n0x5\r\nhello\r\n0\r\n\r\n")) as server:
            got: list[bytes] = []
            with pytest.raises(UpstreamError) as caught:
                await ask(server.upstream(), into=got)
            assert (got, caught.value.kind) == ([b"ok"], "protocol")

    run(asyncio.new_event_loop, main())


def test_chunk_extensions_without_end_do_not_fill_the_memory() -> None:
    async def main() -> None:
        async def script(peer: Peer) -> None:
            await peer.request()
            await peer.send(CHUNKED + b"5;")
            while True:
                await peer.send(b"x" * 4096)

        async with Server(script) as server:
            with pytest.raises(UpstreamError) as caught:
                await ask(server.upstream())
            assert caught.value.kind == "protocol"

    run(asyncio.new_event_loop, main())


@pytest.mark.parametrize(
    "status", [400, 401, 403, 404, 408, 409, 413, 422, 429, 500, 501, 502, 503, 504, 529]
)
def test_an_error_of_the_engine_is_a_response_like_any_other(status: int) -> None:
    async def main() -> None:
        body = b'{"error": {"odd":  1.0}}'
        wire = length(
            body, b"Content-Type: application/json", b"Retry-After: 2", status=b"%d Odd" % status
        )
        async with Server(answers(wire)) as server:
            response, got = await ask(server.upstream())
            assert (response.status, got) == (status, body)
            assert (b"retry-after", b"2") in response.headers
            assert server.accepted == 1

    run(asyncio.new_event_loop, main())


def test_header_names_are_lower_case_and_repeated_headers_stay_apart_in_order() -> None:
    async def main() -> None:
        wire = length(b"", b"X-Two: a", b"x-two:  b ", b"X-Empty:")
        async with Server(answers_once(wire)) as server:
            response, _ = await ask(server.upstream())
            assert response.headers == [
                (b"content-length", b"0"),
                (b"x-two", b"a"),
                (b"x-two", b"b"),
                (b"x-empty", b""),
            ]

    run(asyncio.new_event_loop, main())


def test_a_length_on_204_is_not_passed_on() -> None:
    async def main() -> None:
        async with Server(answers(b"HTTP/1.1 204 No\r\nContent-Length: 0\r\n\r\n")) as server:
            response, _ = await ask(server.upstream())
            assert response.headers == []

    run(asyncio.new_event_loop, main())
