"""What a backend's URL means, and what goes on the wire (B076, B083)."""

import asyncio

import pytest

from gateway.runtime.upstream import Target, Upstream
from tests.gateway.upstream_server import (
    PATIENT,
    Server,
    answers,
    ask,
    length,
    run,
)

OK = length(b"ok")


@pytest.mark.parametrize(
    ("url", "host", "port", "authority", "base_path"),
    [
        ("http://h:8080", "h", 8080, b"h:8080", ""),
        ("http://h:8080/", "h", 8080, b"h:8080", ""),
        ("http://h:8080/v1", "h", 8080, b"h:8080", ""),
        ("http://h:8080/v1/", "h", 8080, b"h:8080", ""),
        ("http://h:8080/prefix/v1", "h", 8080, b"h:8080", "/prefix"),
        ("http://h:8080/prefix/", "h", 8080, b"h:8080", "/prefix"),
        ("http://h:8080/a/b/v1//", "h", 8080, b"h:8080", "/a/b"),
        ("http://h:8080/av1", "h", 8080, b"h:8080", "/av1"),
        ("http://h", "h", 80, b"h", ""),
        ("https://h", "h", 443, b"h", ""),
        ("HTTP://GPU1.lan:1", "gpu1.lan", 1, b"gpu1.lan:1", ""),
        ("http://[::1]:9/v1", "::1", 9, b"[::1]:9", ""),
        ("http://[fe80::1%25eth0]:9", "fe80::1%eth0", 9, b"[fe80::1]:9", ""),
        ("http://bücher.example:9", "xn--bcher-kva.example", 9, b"xn--bcher-kva.example:9", ""),
    ],
)
def test_a_url_gives_where_to_connect_and_what_to_say(
    url: str, host: str, port: int, authority: bytes, base_path: str
) -> None:
    target = Target.parse("gpu1", url)
    assert (target.host, target.port) == (host, port)
    assert (target.authority, target.base_path) == (authority, base_path)


@pytest.mark.parametrize(
    "url",
    [
        "",
        "h:8080",
        "ftp://h",
        "http://",
        "http://h:0",
        "http://h:70000",
        "http://h:x",
        "http://canary:canary@h",
        "http://h/?q=canary",
        "http://h/#canary",
        "http://h/a b",
        "http://a b/",
        "http://" + "x" * 64 + ".example",
    ],
)
def test_a_url_that_names_no_backend_is_refused_without_repeating_secrets(url: str) -> None:
    with pytest.raises(ValueError, match="url") as caught:
        Target.parse("gpu1", url)
    assert "canary" not in str(caught.value)


def test_a_key_that_would_break_the_request_is_refused_and_none_is_shown() -> None:
    with pytest.raises(ValueError, match="api_key") as caught:
        Target.parse("gpu1", "http://h", "canary\r\nX: 1")
    assert "canary" not in str(caught.value)
    assert "canary" not in repr(Target.parse("gpu1", "http://h", "canary"))


def test_the_request_on_the_wire_is_exactly_one_with_the_backends_own_names() -> None:
    async def main() -> None:
        async with Server(answers(OK)) as server:
            target = Target.parse("gpu1", f"http://127.0.0.1:{server.port}/prefix/v1", "own-key")
            upstream = Upstream(target, idle_expiry_s=0)
            headers = [(b"content-type", b"application/json"), (b"x-two", b"1"), (b"x-two", b"2")]
            async with upstream.open(
                "POST", "/v1/chat/completions", b"beta=true&x=%20", headers, b"{ }", PATIENT
            ):
                pass
            (request,) = server.requests
            assert request.line == b"POST /prefix/v1/chat/completions?beta=true&x=%20 HTTP/1.1"
            assert request.headers == [
                (b"host", b"127.0.0.1:%d" % server.port),
                (b"authorization", b"Bearer own-key"),
                *headers,
                (b"content-length", b"3"),
            ]
            assert request.body == b"{ }"

    run(asyncio.new_event_loop, main())


@pytest.mark.parametrize(
    ("method", "body", "lengths"),
    [("GET", b"", []), ("POST", b"", [b"0"]), ("POST", b"x", [b"1"]), ("DELETE", b"", [])],
)
def test_a_length_is_sent_with_every_body_and_with_every_post(
    method: str, body: bytes, lengths: list[bytes]
) -> None:
    async def main() -> None:
        async with Server(answers(OK)) as server:
            await ask(server.upstream(), body, method=method)
            assert server.requests[0].all(b"content-length") == lengths
            assert server.requests[0].all(b"authorization") == []

    run(asyncio.new_event_loop, main())


@pytest.mark.parametrize(
    ("query", "headers"),
    [
        (b"a=1\r\nX: 1", []),
        (b"a=1 HTTP/1.1\nX: 1", []),
        (b"", [(b"x", b"1\r\ny: 2")]),
        (b"", [(b"x", b"1\n")]),
        (b"", [(b"x\r", b"1")]),
    ],
)
def test_nothing_can_smuggle_a_second_header_or_request(
    query: bytes, headers: list[tuple[bytes, bytes]]
) -> None:
    upstream = Upstream(Target.parse("gpu1", "http://127.0.0.1:9"))
    with pytest.raises(ValueError, match="line break"):
        upstream.open("POST", "/v1/x", query, headers, b"", PATIENT)
