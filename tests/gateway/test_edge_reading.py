"""What the edge reads, refuses and leaves alone."""

from __future__ import annotations

import asyncio

import pytest

from tests.fakes.asgi import Echo, answer, body_of, edge_before, edge_of, on_both_loops
from tests.fakes.raw_client import HangupError, RawClient, encode
from tests.fakes.running import eventually, run

CHUNKED = b"POST /x HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n"
SMUGGLED = b"GET /smuggled HTTP/1.1\r\nHost: h\r\n\r\n"


@on_both_loops
async def test_headers_over_the_limit_get_a_431_that_arrives() -> None:
    """Plain uvicorn lets header blocks of many MiB pass."""
    echo = Echo()
    async with (
        edge_before(echo, header_kib=64) as server,
        await RawClient.connect(server.port) as client,
    ):
        await client.request("GET", "/v1/models", {"X-Fill": "a" * 60_000})
        assert (await client.response()).status == 200
        await client.request("GET", "/v1/models", {"X-Fill": "a" * 3_000_000})
        response = await client.response()
        assert (response.status, response.ended) == (431, "whole")
        assert response.json()["error"]["code"] == "headers_too_large"
        assert "limits.header_kib" in response.json()["error"]["message"]
        assert await client.ending() == "fin"
    assert len(echo.seen) == 1


@on_both_loops
async def test_a_request_line_without_end_gets_a_431() -> None:
    """Plain uvicorn collects it for ever."""
    async with (
        edge_before(Echo()) as server,
        await RawClient.connect(server.port) as client,
    ):
        await client.send(b"GET /" + b"a" * 70_000)
        assert (await client.response()).status == 431


def test_the_header_limit_holds_when_the_head_comes_in_small_pieces() -> None:
    """Counting only whole headers would miss one that never ends."""

    async def main() -> None:
        async with (
            edge_before(Echo(), header_kib=1) as server,
            await RawClient.connect(server.port) as client,
        ):
            await client.send(b"GET / HTTP/1.1\r\nHost: h\r\nX: ")
            for _ in range(12):
                await client.send(b"a" * 100)
                await asyncio.sleep(0)
            assert (await client.response()).status == 431

    run(main())


def test_a_head_of_exactly_the_limit_passes_and_one_byte_more_does_not() -> None:
    async def main() -> None:
        head = b"GET / HTTP/1.1\r\nHost: h\r\nX: "
        fill = 1024 - len(head) - 4
        async with edge_before(Echo(), header_kib=1) as server:
            for extra, status in ((0, 200), (1, 431)):
                async with await RawClient.connect(server.port) as client:
                    await client.send(head + b"a" * (fill + extra) + b"\r\n\r\n")
                    assert (await client.response()).status == status

    run(main())


def test_too_many_headers_get_a_431() -> None:
    async def main() -> None:
        async with (
            edge_before(Echo(), header_count=20) as server,
            await RawClient.connect(server.port) as client,
        ):
            await client.request("GET", "/", [(f"X-{n}", "1") for n in range(21)])
            response = await client.response()
            assert response.status == 431
            assert response.json()["error"]["code"] == "headers_too_large"

    run(main())


@pytest.mark.parametrize(
    "bytes_sent",
    [
        pytest.param(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", id="a TLS hello"),
        pytest.param(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", id="an HTTP/2 preface"),
        pytest.param(b"GET /x HTTP/2.0\r\nHost: h\r\n\r\n", id="HTTP/2.0 as text"),
        pytest.param(b"GET /x\r\n\r\n", id="HTTP/0.9"),
        pytest.param(b"GET /x HTTP/1.1\nHost: h\n\n", id="bare LF"),
        pytest.param(b"CONNECT a:443 HTTP/1.1\r\nHost: a:443\r\n\r\n", id="CONNECT"),
        pytest.param(b"GET http://[::1/ HTTP/1.1\r\nHost: h\r\n\r\n", id="a broken URL"),
        pytest.param(b"GET /x HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", id="two hosts"),
        pytest.param(b"GET /x HTTP/1.1\r\nX: a\rb\r\n\r\n", id="bare CR in a header"),
        pytest.param(b"GET /x HTTP/1.1\r\nX: a\0b\r\n\r\n", id="NUL in a header"),
        pytest.param(b"GET /x HTTP/1.1\r\nX: a\r\n b\r\n\r\n", id="a folded header"),
        pytest.param(
            b"POST /x HTTP/1.1\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
            + SMUGGLED,
            id="length and chunked",
        ),
        pytest.param(
            b"POST /x HTTP/1.1\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nabcdef" + SMUGGLED,
            id="two lengths",
        ),
        pytest.param(
            b"POST /x HTTP/1.1\r\nContent-Length: +5\r\n\r\nabcde" + SMUGGLED, id="a signed length"
        ),
        pytest.param(
            b"POST /x HTTP/1.1\r\nTransfer-Encoding: xchunked\r\n\r\n0\r\n\r\n" + SMUGGLED,
            id="xchunked",
        ),
        pytest.param(
            b"POST /x HTTP/1.1\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n" + SMUGGLED,
            id="a coding under chunked",
        ),
        pytest.param(
            b"POST /x HTTP/1.1\r\nTransfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n\r\n"
            b"0\r\n\r\n" + SMUGGLED,
            id="two codings",
        ),
        pytest.param(
            b"POST /x HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + SMUGGLED,
            id="chunked in HTTP/1.0",
        ),
        pytest.param(
            b"POST /x HTTP/1.1\r\nTransfer-Encoding : chunked\r\n\r\n0\r\n\r\n" + SMUGGLED,
            id="a blank before the colon",
        ),
        pytest.param(CHUNKED + b"+5\r\nabcde\r\n0\r\n\r\n" + SMUGGLED, id="chunk size +5"),
        pytest.param(CHUNKED + b"0x5\r\nabcde\r\n0\r\n\r\n" + SMUGGLED, id="chunk size 0x5"),
        pytest.param(CHUNKED + b"f" * 20 + b"\r\nabc" + SMUGGLED, id="chunk size of 20 digits"),
        pytest.param(CHUNKED + b"3\r\nabcde\r\n0\r\n\r\n" + SMUGGLED, id="no CRLF after a chunk"),
        pytest.param(CHUNKED + b"3\nabc\r\n0\r\n\r\n" + SMUGGLED, id="LF after a chunk size"),
    ],
)
def test_a_request_that_can_be_read_in_two_ways_is_a_400_and_nothing_behind_it_is_read(
    bytes_sent: bytes,
) -> None:
    """B074. Plain uvicorn answers in text/plain and closes with unread bytes, so that it may be lost."""

    async def main() -> None:
        echo = Echo()
        async with (
            edge_before(echo) as server,
            await RawClient.connect(server.port) as client,
        ):
            await client.send(bytes_sent)
            response = await client.response()
            assert (response.status, response.ended) == (400, "whole")
            assert response.json()["error"]["code"] == "invalid_request"
            assert response.header("connection") == "close"
            await client.send(SMUGGLED)
            assert await client.ending() == "fin"
            assert not client.buffer
        assert echo.seen == []

    run(main())


def test_a_second_request_in_the_body_of_a_get_is_only_its_body() -> None:
    async def main() -> None:
        echo = Echo()
        async with (
            edge_before(echo) as server,
            await RawClient.connect(server.port) as client,
        ):
            await client.request("GET", "/x", body=SMUGGLED)
            assert (await client.response()).status == 200
        assert echo.seen == [("GET", "/x", b"", SMUGGLED)]

    run(main())


@pytest.mark.parametrize(
    ("path", "where"),
    [
        ("/v1/chat/completions", ("error", "code")),
        ("/v1/messages?beta=true", ("error", "type")),
        ("//v1/messages", ("request_id",)),
        ("/api/chat", ("error",)),
    ],
)
def test_a_refusal_has_the_form_of_the_family_that_the_path_belongs_to(
    path: str, where: tuple[str, ...]
) -> None:
    async def main() -> None:
        async with (
            edge_before(Echo()) as server,
            await RawClient.connect(server.port) as client,
        ):
            await client.request("POST", path, {"X-Fill": "a" * 70_000})
            response = await client.response()
            assert response.status == 431
            found = response.json()
            for name in where:
                found = found[name]
            assert isinstance(found, str)
            assert response.header("x-request-id")
            if "messages" in path:
                assert response.json()["type"] == "error"
                assert response.header("request-id") == response.json()["request_id"]

    run(main())


@pytest.mark.parametrize("framing", ["length", "chunked", "none"])
@pytest.mark.parametrize("upgrade", ["h2c", "websocket", "TLS/1.2"])
def test_a_request_for_an_upgrade_is_served_as_it_is(framing: str, upgrade: str) -> None:
    """Plain uvicorn loses the body of such a POST."""

    async def main() -> None:
        echo = Echo()
        asks = {"Connection": "Upgrade, HTTP2-Settings", "Upgrade": upgrade, "HTTP2-Settings": "AA"}
        body = b"" if framing == "none" else b'{"a": 1}'
        async with (
            edge_before(echo) as server,
            await RawClient.connect(server.port) as client,
        ):
            for _ in range(2):  # the connection goes on
                await client.send(
                    encode(
                        "POST",
                        "/x",
                        asks,
                        body if framing == "length" else None,
                        chunks=[body[:3], body[3:]] if framing == "chunked" else None,
                    )
                )
                assert (await client.response()).body == b"/x " + body
            await client.request("GET", "/y")
            assert (await client.response()).status == 200
        assert echo.seen[:2] == [("POST", "/x", b"", body)] * 2
        assert (b"upgrade", upgrade.encode()) in echo.headers[0]
        assert all(name != b"upgrade" for name, _ in echo.headers[2])

    run(main())


@on_both_loops
async def test_pipelined_requests_are_answered_in_order_whatever_their_framing() -> None:
    echo = Echo()
    async with (
        edge_before(echo) as server,
        await RawClient.connect(server.port) as client,
    ):
        await client.send(
            encode("GET", "/1")
            + encode("POST", "/2", body=b"two")
            + encode("POST", "/3", chunks=[b"th", b"\r\n\r\n", b"ree"])
            + b"\r\n\r\n"
            + encode("POST", "/4", chunks=[b"x"])
            + encode("GET", "/5")
            + b"GET /6 HT"
        )
        await client.send(b"TP/1.1\r\nHost: h\r\n\r\n")
        bodies = [(await client.response()).body for _ in range(6)]
    assert bodies == [b"/1 ", b"/2 two", b"/3 th\r\n\r\nree", b"/4 x", b"/5 ", b"/6 "]


def test_requests_are_the_same_however_the_bytes_are_cut() -> None:
    """The end of a head or of a chunked body may lie across two reads."""

    async def main() -> None:
        stream = (
            encode("GET", "/1?q=1")
            + encode("POST", "/2", {"Upgrade": "h2c", "Connection": "upgrade"}, b"two\r\n\r\n")
            + encode("POST", "/3", chunks=[b"\r\n\r\n", b"0\r\n\r\n"])
            + b"\r\n"
            + CHUNKED.replace(b"/x", b"/4")
            + b"3;ext=1\r\nabc\r\n0\r\nT: v\r\n\r\n"
            + encode("GET", "/5")
        )
        expected = None
        for size in range(1, 12):
            echo = Echo()
            async with (
                edge_before(echo) as server,
                await RawClient.connect(server.port) as client,
            ):
                for at in range(0, len(stream), size):
                    await client.send(stream[at : at + size])
                    if size > 1 or at % 7 == 0:
                        await asyncio.sleep(0)
                for _ in range(5):
                    assert (await client.response()).status == 200
            expected = expected or echo.seen
            assert echo.seen == expected
        assert [path for _, path, _, _ in expected or ()] == ["/1", "/2", "/3", "/4", "/5"]

    run(main())


def test_trailers_do_not_become_headers_and_are_bounded() -> None:
    """Plain uvicorn adds them to the headers of a request that is already running, without limit."""

    async def main() -> None:
        echo = Echo()
        async with edge_before(echo) as server:
            async with await RawClient.connect(server.port) as client:
                await client.send(CHUNKED + b"1\r\na\r\n0\r\nAuthorization: Bearer k\r\n\r\n")
                assert (await client.response()).body == b"/x a"
                assert all(name != b"authorization" for name, _ in echo.headers[0])
            async with await RawClient.connect(server.port) as client:
                await client.send(CHUNKED + b"1\r\na\r\n0\r\n" + b"X: ")
                await client.send(b"a" * 300_000)
                response = await client.response()
                assert response.status == 431
                assert "Trailers" in response.json()["error"]["message"]
        assert len(echo.seen) == 1

    run(main())


def test_a_large_body_is_not_mistaken_for_large_headers() -> None:
    async def main() -> None:
        echo = Echo()
        body = b"a" * 3_000_000
        async with (
            edge_before(echo) as server,
            await RawClient.connect(server.port) as client,
        ):
            await client.request("POST", "/1", body=body)
            assert len((await client.response()).body) == len(body) + 3
            await client.request("POST", "/2", chunks=[body, b"\r\n\r\n" * 100])
            assert len((await client.response()).body) == len(body) + 403

    run(main())


def test_targets_reach_the_app_as_path_and_query() -> None:
    async def main() -> None:
        echo = Echo()
        targets = ["/a%2Fb?x=%20", "http://other.test:1/abs?q=1", "/frag?a=1#no", "http://h"]
        async with (
            edge_before(echo) as server,
            await RawClient.connect(server.port) as client,
        ):
            for target in targets:
                await client.request("GET", target)
                assert (await client.response()).status == 200
            await client.request("OPTIONS", "*")
            assert (await client.response()).status == 200
        assert [(path, query) for _, path, query, _ in echo.seen] == [
            ("/a/b", b"x=%20"),
            ("/abs", b"q=1"),
            ("/frag", b"a=1"),
            ("/", b""),
            ("*", b""),
        ]

    run(main())


@on_both_loops
async def test_what_follows_a_request_in_progress_is_bounded() -> None:
    """64 KiB are kept, then TCP stops the client; plain uvicorn parses on and queues without limit."""
    release = asyncio.Event()

    async def app(_: object, receive: object, send: object) -> None:
        await body_of(receive)
        await release.wait()
        await answer(send)

    async with (
        edge_before(app) as server,
        await RawClient.connect(server.port, sndbuf=16_384) as client,
    ):
        await client.request("GET", "/1")
        flood = asyncio.create_task(client.send(encode("GET", "/2") * 400_000))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.shield(flood), 0.5)
        connection = next(iter(server._state.connections))
        assert len(connection._intake.backlog) < 65_536 + 262_144 + 1  # type: ignore[attr-defined]
        release.set()
        for _ in range(1000):
            assert (await client.response()).status == 200
        flood.cancel()
        with pytest.raises(asyncio.CancelledError):
            await flood


@on_both_loops
async def test_a_whole_body_can_be_had_without_waiting() -> None:
    found: list[object] = []

    async def app(scope: object, receive: object, send: object) -> None:
        edge = edge_of(scope)
        found.append((edge.body_buffered(), edge.received_at))
        body = await body_of(receive) if found[-1][0] is None else found[-1][0]  # type: ignore[index]
        found.append((body, edge.received_at))
        await answer(send)

    async with (
        edge_before(app) as server,
        await RawClient.connect(server.port) as client,
    ):
        loop = asyncio.get_running_loop()
        before = loop.time() - 0.002
        await client.request("POST", "/", body=b"whole")
        await client.response()
        (body, at), (again, at_again) = found  # type: ignore[misc]
        assert body == again == b"whole"
        assert before <= at == at_again <= loop.time()
        found.clear()
        await client.send(b"POST / HTTP/1.1\r\nContent-Length: 6\r\n\r\nabc")
        await eventually(lambda: found)
        await client.send(b"def")
        await client.response()
        (body, at), (again, at_again) = found  # type: ignore[misc]
        assert (body, at, again) == (None, None, b"abcdef")
        assert at_again is not None


def test_a_head_request_is_refused_without_a_body_when_the_head_is_known() -> None:
    async def main() -> None:
        async with (
            edge_before(Echo(), body_silence_s=0.05) as server,
            await RawClient.connect(server.port) as client,
        ):
            await client.send(b"HEAD / HTTP/1.1\r\nContent-Length: 5\r\n\r\n")
            response = await client.response(head_only=True)
            assert response.status == 408
            with pytest.raises(HangupError) as end:
                await client.exactly(1)
            assert end.value.got == b""

    run(main())


def test_the_operator_is_told_of_refusals_that_the_app_never_sees() -> None:
    async def main() -> None:
        told: list[str] = []
        async with edge_before(
            Echo(), on_refused=lambda error: told.append(error.key), body_silence_s=0.05
        ) as server:
            for sent in (b"NONSENSE\r\n\r\n", b"GET /" + b"a" * 70_000, CHUNKED):
                async with await RawClient.connect(server.port) as client:
                    await client.send(sent)
                    await client.response()
        assert told == ["invalid_request", "headers_too_large"]  # the third was the app's

    run(main())
