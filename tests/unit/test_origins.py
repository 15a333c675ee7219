"""Web pages: which may read an answer, and which must not even ask."""

from __future__ import annotations

import pytest

from gateway.core.errors import GatewayError
from gateway.core.origins import preflight, refuse_pages, shared_with

PAGE = b"https://ui.example"
ASKS = [
    (b"origin", PAGE),
    (b"access-control-request-method", b"POST"),
    (b"access-control-request-headers", b"authorization,x-api-key,anthropic-version"),
]


def test_an_answer_is_shared_with_a_named_origin_only() -> None:
    headers = dict(shared_with(PAGE, ("https://ui.example/",)))
    assert headers[b"access-control-allow-origin"] == PAGE
    assert b"retry-after" in headers[b"access-control-expose-headers"]
    assert headers[b"vary"] == b"Origin"
    other = dict(shared_with(b"https://evil.example", ("https://ui.example",)))
    assert b"access-control-allow-origin" not in other
    assert shared_with(None, ("https://ui.example",)) == []
    assert shared_with(PAGE, ()) == []


def test_a_star_names_every_origin() -> None:
    assert dict(shared_with(b"null", ("*",)))[b"access-control-allow-origin"] == b"null"


def test_a_preflight_gets_back_the_headers_it_asked_for() -> None:
    told = dict(preflight(ASKS, ("https://ui.example",)))
    assert told[b"access-control-allow-headers"] == b"authorization,x-api-key,anthropic-version"
    assert told[b"access-control-max-age"] == b"600"
    assert b"POST" in told[b"access-control-allow-methods"]
    assert preflight(ASKS, ()) == []
    assert preflight([], ("*",)) == []


@pytest.mark.parametrize(
    "host",
    [
        *(b"localhost", b"LocalHost:8088", b"127.0.0.1:8088", b"127.9.9.9", b"[::1]:8088", b"::1"),
        *(b"ui.localhost", b"localhost."),
    ],
)
def test_a_host_of_this_machine_is_answered(host: bytes) -> None:
    refuse_pages([(b"host", host)], ())


@pytest.mark.parametrize(
    "host",
    [
        *(b"evil.example", b"10.0.0.1", b"localhost.evil.example", b"127.0.0.1.evil.example"),
        *(b"", b"[::2]", b"0.0.0.0", b"xn--localhost"),
    ],
)
def test_a_host_that_is_not_this_machine_is_refused(host: bytes) -> None:
    with pytest.raises(GatewayError) as refused:
        refuse_pages([(b"host", host)], ())
    assert refused.value.key == "origin_not_allowed"


@pytest.mark.parametrize("origin", [b"https://evil.example", b"null", b"http://127.0.0.1:8088"])
def test_a_page_must_be_named_even_if_it_is_of_this_machine(origin: bytes) -> None:
    headers = [(b"host", b"127.0.0.1:8088"), (b"origin", origin)]
    with pytest.raises(GatewayError):
        refuse_pages(headers, ("https://ui.example",))
    refuse_pages(headers, (origin.decode(),))


def test_a_program_without_host_and_origin_is_answered() -> None:
    refuse_pages([], ())
