"""What crosses the gateway, and what does not: cases B070, B072, B076, B077, B111."""

import pytest

from gateway.core.headers import query_to_upstream, to_downstream, to_upstream


def up(*headers: tuple[bytes, bytes], identity: bool = True) -> dict[bytes, bytes]:
    out = to_upstream(headers, accept_encoding_identity=identity)
    names = [name for name, _ in out]
    assert len(names) == len(set(names)), names
    return dict(out)


def test_headers_that_the_engine_needs_pass_unchanged() -> None:
    kept = [
        (b"content-type", b"application/json"),
        (b"user-agent", b"agent/1"),
        (b"anthropic-version", b"2023-06-01"),
        (b"x-claude-code-session-id", b"s1"),
    ]
    out = to_upstream(kept, accept_encoding_identity=True)
    assert out == [*kept, (b"accept-encoding", b"identity")]


@pytest.mark.parametrize(
    "name",
    [
        b"authorization",
        b"x-api-key",
        b"api-key",
        b"x-goog-api-key",
        b"proxy-authorization",
        b"cookie",
    ],
)
def test_a_client_secret_never_reaches_the_backend(name: bytes) -> None:
    assert b"canary" not in b"".join(up((name, b"canary")).values())


@pytest.mark.parametrize(
    "name",
    [
        b"host",
        b"origin",
        b"referer",
        b"sec-fetch-mode",
        b"sec-ch-ua",
        b"x-forwarded-for",
        b"x-forwarded-host",
        b"forwarded",
        b"x-real-ip",
        b"access-control-request-method",
    ],
)
def test_the_place_of_the_client_is_not_told(name: bytes) -> None:
    assert name not in up((name, b"v"))


@pytest.mark.parametrize("name", [b"x-conversation-id", b"x-data-parallel-rank"])
def test_headers_that_would_steer_the_engine_are_dropped(name: bytes) -> None:
    assert name not in up((name, b"7"))


def test_hop_by_hop_headers_and_those_named_in_connection_are_dropped() -> None:
    out = up(
        (b"x-drop", b"1"),
        (b"connection", b"X-Drop, keep-alive"),
        (b"keep-alive", b"5"),
        (b"te", b"trailers"),
        (b"trailer", b"x-t"),
        (b"transfer-encoding", b"chunked"),
        (b"upgrade", b"h2c"),
        (b"http2-settings", b"AAMA"),
        (b"x-keep", b"1"),
    )
    assert set(out) == {b"x-keep", b"accept-encoding"}


def test_connection_cannot_be_used_to_strip_the_type_of_the_body() -> None:
    out = up((b"connection", b"content-type"), (b"content-type", b"application/json"))
    assert out[b"content-type"] == b"application/json"


def test_the_framing_of_the_clients_body_is_not_copied() -> None:
    out = up(
        (b"content-length", b"5"), (b"content-encoding", b"gzip"), (b"expect", b"100-continue")
    )
    assert set(out) == {b"accept-encoding"}


def test_the_clients_request_id_does_not_name_the_attempt() -> None:
    assert b"x-request-id" not in up((b"x-request-id", b"same"))


def test_generation_paths_ask_for_an_uncoded_answer() -> None:
    assert up((b"accept-encoding", b"gzip, br"))[b"accept-encoding"] == b"identity"


@pytest.mark.parametrize(
    ("sent", "expected"),
    [([b"gzip"], b"gzip"), ([b"gzip", b"br;q=0.5"], b"gzip, br;q=0.5"), ([], b"identity")],
)
def test_elsewhere_the_clients_own_accept_encoding_stands(
    sent: list[bytes], expected: bytes
) -> None:
    out = up(*[(b"accept-encoding", value) for value in sent], identity=False)
    assert out[b"accept-encoding"] == expected


def test_end_to_end_response_headers_pass_unchanged() -> None:
    kept = [
        (b"content-type", b"text/event-stream"),
        (b"content-encoding", b"gzip"),
        (b"content-length", b"3"),
        (b"retry-after", b"2"),
        (b"server", b"llama.cpp"),
    ]
    assert to_downstream(kept) == kept


def test_response_headers_of_the_hop_or_of_the_gateways_own_kind_are_dropped() -> None:
    dropped = [
        (b"connection", b"close, X-Hop"),
        (b"x-hop", b"1"),
        (b"keep-alive", b"timeout=5, max=100"),
        (b"transfer-encoding", b"chunked"),
        (b"trailer", b"x-t"),
        (b"x-request-id", b"engine's"),
        (b"access-control-allow-origin", b"*"),
        (b"x-slotgate-backend", b"behind"),
    ]
    assert to_downstream([*dropped, (b"content-type", b"a/b")]) == [(b"content-type", b"a/b")]


def test_a_length_beside_chunks_is_not_passed_on() -> None:
    both = [(b"content-length", b"3"), (b"transfer-encoding", b"chunked")]
    assert to_downstream(both) == []


def test_headers_that_the_gateway_sets_itself_can_be_left_out() -> None:
    headers = [(b"cache-control", b"no-store"), (b"content-type", b"a/b")]
    assert to_downstream(headers, without=frozenset({b"cache-control"})) == [
        (b"content-type", b"a/b")
    ]


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        (b"", b""),
        (b"beta=true", b"beta=true"),
        (b"key=canary", b""),
        (b"beta=true&api_key=canary&x=%20&&y", b"beta=true&x=%20&&y"),
        (b"Api%5Fkey=canary&a=%zz", b"a=%zz"),
        (b"keyboard=1", b"keyboard=1"),
    ],
)
def test_a_key_in_the_query_is_cut_out_and_the_rest_untouched(
    query: bytes, expected: bytes
) -> None:
    assert query_to_upstream(query) == expected
