"""What reaches the client: answers whole or visibly broken, refusals received, connections kept or closed."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import logging
import shutil
from typing import Any

import openai
import pytest

from gateway.core.errors import GatewayError
from tests.fakes.asgi import Echo, answer, body_of, edge_before, edge_of, on_both_loops
from tests.fakes.raw_client import RawClient, encode
from tests.fakes.running import eventually, run, slack

ERROR = json.dumps({"error": {"message": "no", "type": "t", "param": None, "code": "c"}}).encode()


def refusing(*, close: bool = False, status: int = 413) -> Any:
    """An app that answers every POST without reading its body."""

    async def app(scope: Any, _: Any, send: Any) -> None:
        headers = [(b"content-type", b"application/json")]
        if close:
            headers.append((b"connection", b"close"))
        if scope["method"] == "POST":
            await answer(send, ERROR, status, headers)
        else:
            await answer(send)

    return app


# -- framing


@on_both_loops
async def test_http_1_0_is_framed_by_closing() -> None:
    """Plain uvicorn sends chunks to clients that do not know them."""

    async def app(_: Any, __: Any, send: Any) -> None:
        await answer(send, b"data: 1\n\n", length=False)

    async with (
        edge_before(app) as server,
        await RawClient.connect(server.port) as client,
    ):
        await client.request("GET", "/", {"Connection": "keep-alive"}, version="1.0")
        response = await client.response()
        assert (response.framing, response.body, response.ended) == (
            "close",
            b"data: 1\n\n",
            "whole",
        )
        assert response.header("connection") == "close"


@pytest.mark.parametrize("version", ["1.0", "1.1"])
@pytest.mark.parametrize("ending", ["raises", "returns", "refuses"])
def test_an_app_that_ends_in_mid_answer_leaves_a_broken_connection(
    version: str, ending: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Plain uvicorn closes by FIN, which is a clean end to HTTP/1.0."""

    async def app(_: Any, __: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"data: 1\n\n", "more_body": True})
        await asyncio.sleep(0.02)
        if ending == "raises":
            raise ZeroDivisionError
        if ending == "refuses":
            raise GatewayError("upstream_broke", "too late")

    async def main() -> None:
        async with (
            edge_before(app) as server,
            await RawClient.connect(server.port) as client,
        ):
            await client.request("GET", "/", version=version)
            response = await client.response()
            assert (response.body, response.ended) == (b"data: 1\n\n", "reset")

    run(main())
    assert bool(caplog.records) == (ending != "refuses")


def test_no_body_goes_with_head_204_and_304() -> None:
    async def app(scope: Any, _: Any, send: Any) -> None:
        status = int(scope["path"][1:])
        headers = [(b"content-length", b"5")] if status == 200 else []
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": b"12345"})

    async def main() -> None:
        async with (
            edge_before(app) as server,
            await RawClient.connect(server.port) as client,
        ):
            for method, status in (("HEAD", 200), ("GET", 204), ("GET", 304), ("HEAD", 404)):
                await client.request(method, f"/{status}")
                response = await client.response(head_only=True)
                assert response.status == status
                assert response.header("transfer-encoding") is None
            await client.request("GET", "/200")
            assert (await client.response()).body == b"12345"

    run(main())


@pytest.mark.parametrize("body", [b"123", b"1234567"])
def test_a_body_that_breaks_its_content_length_breaks_the_connection(
    body: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async def app(_: Any, __: Any, send: Any) -> None:
        headers = [(b"content-length", b"5")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await asyncio.sleep(0.02)
        await send({"type": "http.response.body", "body": body})

    async def main() -> None:
        async with (
            edge_before(app) as server,
            await RawClient.connect(server.port) as client,
        ):
            await client.request("GET", "/")
            response = await client.response()
            assert response.ended == "reset"

    run(main())
    assert caplog.records


def test_a_header_with_a_line_break_is_a_500_and_not_two_headers(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def app(_: Any, __: Any, send: Any) -> None:
        await answer(send, headers=[(b"x-a", b"1\r\nset-cookie: 2")])

    async def main() -> None:
        async with (
            edge_before(app) as server,
            await RawClient.connect(server.port) as client,
        ):
            await client.request("GET", "/")
            response = await client.response()
            assert response.status == 500
            assert response.header("set-cookie") is None

    run(main())
    assert caplog.records


def test_the_head_leaves_at_once_when_the_body_is_late_and_with_the_body_when_it_is_not() -> None:
    """Clients wait for headers; and two writes are two system calls and two packets."""
    late = asyncio.Event()

    async def app(scope: Any, _: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        if scope["path"] == "/late":
            await late.wait()
        await send({"type": "http.response.body", "body": b"data: 1\n\n"})

    async def main() -> None:
        async with (
            edge_before(app) as server,
            await RawClient.connect(server.port) as client,
        ):
            await client.request("GET", "/late")
            assert (await client.head()).status == 200
            assert not client.buffer
            late.set()
            assert await client.chunk() == b"data: 1\n\n"
            assert await client.chunk() == b""
            client.log.clear()
            await client.request("GET", "/now")
            assert (await client.response()).body == b"data: 1\n\n"
            assert len(client.log) == 1

    run(main())


def test_bytes_written_without_messages_are_the_same_answer() -> None:
    async def app(scope: Any, _: Any, __: Any) -> None:
        edge = edge_of(scope)
        edge.start(200, [(b"content-type", b"text/event-stream")])
        edge.write(b"data: 1\n\n", more=True)
        edge.write(b"", more=True)
        await edge.writable()
        edge.write(b"data: 2\n\n", more=False)
        with pytest.raises(RuntimeError):
            edge.write(b"data: 3\n\n", more=True)
        with pytest.raises(RuntimeError):
            edge.start(200)

    async def main() -> None:
        async with (
            edge_before(app) as server,
            await RawClient.connect(server.port) as client,
        ):
            for _ in range(2):
                await client.request("GET", "/")
                assert (await client.response()).chunks == [b"data: 1\n\n", b"data: 2\n\n"]

    run(main())


# -- failures of the app


@pytest.mark.parametrize(
    ("path", "key"), [("/v1/x", "code"), ("/v1/messages", "type"), ("/api/chat", None)]
)
def test_an_exception_of_the_app_is_a_500_in_json_without_its_text(
    path: str, key: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    async def app(*_: Any) -> None:
        raise RuntimeError("secret-canary")

    async def main() -> None:
        async with (
            edge_before(app) as server,
            await RawClient.connect(server.port) as client,
        ):
            await client.request("POST", path, body=b"{}")
            response = await client.response()
            assert response.status == 500
            assert b"secret-canary" not in response.body
            assert b"Traceback" not in response.body
            error = response.json()["error"]
            if key is not None:
                assert error[key] in ("internal_error", "api_error")
            assert await client.ending() == "fin"

    with caplog.at_level(logging.ERROR):
        run(main())
    assert "secret-canary" in caplog.text  # the operator is told


def test_an_app_that_returns_without_an_answer_is_a_500(caplog: pytest.LogCaptureFixture) -> None:
    async def app(_: Any, receive: Any, __: Any) -> None:
        await body_of(receive)

    async def main() -> None:
        async with (
            edge_before(app) as server,
            await RawClient.connect(server.port) as client,
        ):
            await client.request("GET", "/")
            assert (await client.response()).status == 500

    run(main())
    assert "without completing" in caplog.text


def test_a_gateway_error_that_escapes_the_app_is_its_answer() -> None:
    async def app(*_: Any) -> None:
        raise GatewayError("no_backend", "none is up", retry_after_s=5)

    async def main() -> None:
        async with (
            edge_before(app) as server,
            await RawClient.connect(server.port) as client,
        ):
            await client.request("POST", "/v1/messages", body=b"{}")
            response = await client.response()
            assert response.status == 529
            assert response.header("retry-after") == "5"
            assert response.json()["error"]["type"] == "overloaded_error"

    run(main())


# -- answers before the request is here


@on_both_loops
async def test_a_connection_lives_on_after_an_early_answer() -> None:
    """Plain uvicorn does that too; a client library that retries on the same socket relies on it."""
    async with (
        edge_before(refusing()) as server,
        await RawClient.connect(server.port) as client,
    ):
        big = b"a" * 4_000_000
        for request in (
            encode("POST", "/", body=big),
            encode("POST", "/", chunks=[big, b"\r\n\r\n", big[:3_000_000]]),
        ):
            await client.send(request[:1000])
            response = await client.response()
            assert (response.status, response.header("connection")) == (413, None)
            await client.send(request[1000:])
            await client.request("GET", "/")
            assert (await client.response()).body == b"ok"


@on_both_loops
async def test_an_early_answer_with_close_is_received_by_a_client_that_sends_first() -> None:
    """Plain uvicorn closes with unread bytes: an RST, and the answer is lost ten times in ten."""
    async with edge_before(refusing(close=True)) as server:
        for _ in range(10):
            response = await asyncio.to_thread(_http_client, server.port, b"a" * 6_000_000)
            assert response == (413, ERROR)


@on_both_loops
async def test_a_body_too_large_to_drain_is_announced_and_the_answer_still_arrives() -> None:
    async with (
        edge_before(refusing(), drain_bytes=1_000_000) as server,
        await RawClient.connect(server.port) as client,
    ):
        await client.send(encode("POST", "/", body=b"a" * 2_000_000)[:900_000])
        response = await client.response()
        assert (response.status, response.body) == (413, ERROR)
        assert response.header("connection") == "close"
        assert await client.ending() == "fin"
        with contextlib.suppress(ConnectionError, BrokenPipeError):
            await client.send(b"a" * 1_100_000)
        await eventually(lambda: not server.connections)


def test_a_chunked_body_without_end_is_cut_off_at_the_bound() -> None:
    async def main() -> None:
        async with (
            edge_before(refusing(), drain_bytes=1_000_000) as server,
            await RawClient.connect(server.port) as client,
        ):
            await client.send(encode("POST", "/", chunks=[b"a" * 1000])[:-5])
            assert (await client.response()).status == 413
            with pytest.raises(ConnectionError):
                await client.send((b"10000\r\n" + b"a" * 65_536 + b"\r\n") * 300)
            await eventually(lambda: not server.connections)

    run(main())


@pytest.mark.parametrize("close", [False, True])
def test_a_body_that_stops_after_an_early_answer_is_waited_for_in_vain_only_so_long(
    close: bool,
) -> None:
    async def main() -> None:
        async with (
            edge_before(refusing(close=close), drain_s=0.2) as server,
            await RawClient.connect(server.port) as client,
        ):
            await client.send(encode("POST", "/", body=b"a" * 1000)[:-1])
            assert (await client.response()).status == 413
            await eventually(lambda: not server.connections)

    run(main())


@on_both_loops
async def test_expect_continue_is_honoured_only_by_an_app_that_reads() -> None:
    async with edge_before(Echo()) as server, await RawClient.connect(server.port) as client:
        ask = {"Expect": "100-continue", "Content-Length": "3"}
        await client.request("POST", "/x", ask)
        assert (await client.head()).status == 100
        await client.send(b"abc")
        assert (await client.response()).body == b"/x abc"
        await client.request("POST", "/x", ask, b"def")  # did not wait: no 100 is owed
        assert (await client.head()).status == 200
        assert await client.exactly(6) == b"/x def"
        await client.request("GET", "/x", {"Expect": "100-continue"})  # nothing to continue with
        assert (await client.head()).status == 200


@on_both_loops
async def test_a_refusal_answers_expect_without_a_100_and_closes() -> None:
    """The client may send its body or not: on a kept connection nobody could tell."""
    async with edge_before(refusing()) as server:
        for body in (b"", b"abc" * 100_000):
            async with await RawClient.connect(server.port) as client:
                length = {"Expect": "100-continue", "Content-Length": "300000"}
                await client.request("POST", "/", length)
                response = await client.head()
                assert (response.status, response.header("connection")) == (413, "close")
                assert await client.exactly(len(ERROR)) == ERROR
                await client.send(body)
                assert await client.ending() == "fin"


@pytest.mark.parametrize("close", [False, True])
@pytest.mark.parametrize("size", [1_000, 3_000_000])
@pytest.mark.skipif(shutil.which("curl") is None, reason="no curl here")
def test_curl_gets_an_early_answer(close: bool, size: int) -> None:
    """curl sends `Expect: 100-continue` with a body above 1 MiB."""

    async def main() -> None:
        async with edge_before(refusing(close=close)) as server:
            process = await asyncio.create_subprocess_exec(
                *("curl", "-sS", "-w", " %{http_code}", "--data-binary", "@-"),
                *("-H", "Content-Type: application/json", f"http://127.0.0.1:{server.port}/v1/x"),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
            )
            out, errors = await process.communicate(b"a" * size)
            assert (out, errors, process.returncode) == (ERROR + b" 413", b"", 0)

    run(main())


@pytest.mark.parametrize("close", [False, True])
def test_the_openai_client_gets_an_early_answer(close: bool) -> None:
    async def main() -> None:
        async with edge_before(refusing(close=close, status=503)) as server:
            client = openai.AsyncOpenAI(
                base_url=f"http://127.0.0.1:{server.port}/v1", api_key="k", max_retries=0
            )
            async with client:
                for _ in range(3):
                    with pytest.raises(openai.InternalServerError) as caught:
                        await client.chat.completions.create(
                            model="m",
                            messages=[{"role": "user", "content": "a" * 3_000_000}],
                        )
                    assert caught.value.status_code == 503
                    assert caught.value.code == "c"

    run(main())


def test_connection_close_of_the_client_is_honoured() -> None:
    async def main() -> None:
        async with (
            edge_before(Echo()) as server,
            await RawClient.connect(server.port) as client,
        ):
            await client.send(encode("GET", "/1", {"Connection": "close"}) + encode("GET", "/2"))
            response = await client.response()
            assert (response.body, response.header("connection")) == (b"/1 ", "close")
            assert await client.ending(patience_s=2 * slack()) == "fin"

    run(main())


def _http_client(port: int, body: bytes) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10 * slack())
    with contextlib.closing(connection):
        connection.request("POST", "/v1/x", body)
        response = connection.getresponse()
        return response.status, response.read()
