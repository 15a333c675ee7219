"""Which socket a request leaves by: names, families, TLS, and never a proxy (B054, B076, B083, B112)."""

import asyncio
import socket
import ssl
from collections.abc import Callable
from pathlib import Path

import pytest

from gateway.runtime.dial import Race
from gateway.runtime.upstream import Deadlines, Target, Upstream, UpstreamError
from tests.gateway.test_upstream_endings import black_hole
from tests.gateway.upstream_server import (
    PATIENT,
    SLACK,
    Peer,
    Server,
    answers,
    ask,
    both_loops,
    length,
    run,
    until,
)

Loop = Callable[[], asyncio.AbstractEventLoop]
OK = length(b"ok")
CERTS = Path(__file__).parent / "upstream_certs"
V4 = socket.AF_INET
V6 = socket.AF_INET6


def _has_ipv6() -> bool:
    try:
        with socket.socket(V6) as sock:
            sock.bind(("::1", 0))
    except OSError:
        return False
    return True


needs_ipv6 = pytest.mark.skipif(not _has_ipv6(), reason="no IPv6 loopback")


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


@both_loops
@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_a_backend_is_found_by_address_and_by_name(new_loop: Loop, host: str) -> None:
    async def main() -> None:
        async with Server(answers(OK)) as server:
            upstream = Upstream(Target.parse("gpu1", f"http://{host}:{server.port}"))
            assert (await ask(upstream))[1] == b"ok"
            await upstream.aclose()

    run(new_loop, main())


@needs_ipv6
@both_loops
def test_an_ipv6_address_works_and_is_said_in_brackets(new_loop: Loop) -> None:
    async def main() -> None:
        async with Server(answers(OK), host="::1") as server:
            upstream = Upstream(Target.parse("gpu1", f"http://[::1]:{server.port}/v1"))
            assert (await ask(upstream))[1] == b"ok"
            assert server.requests[0].all(b"host") == [b"[::1]:%d" % server.port]
            await upstream.aclose()

    run(new_loop, main())


@both_loops
def test_a_name_that_does_not_resolve_is_unreachable(new_loop: Loop) -> None:
    async def main() -> None:
        upstream = Upstream(Target.parse("gpu1", "http://no-such-host.invalid:1"))
        with pytest.raises(UpstreamError) as caught:
            await ask(upstream, deadlines=Deadlines(60, 20, 20))
        assert (caught.value.kind, caught.value.may_have_run) == ("unreachable", False)

    run(new_loop, main())


@needs_ipv6
@both_loops
def test_the_family_on_which_nobody_listens_costs_nothing(new_loop: Loop) -> None:
    async def main() -> None:
        async with Server(answers(OK)) as server:
            race = Race(
                [(V6, ("::1", server.port)), (V4, ("127.0.0.1", server.port))], fallback_s=60
            )
            with await race.winner() as sock:
                assert sock.getpeername()[1] == server.port

    run(new_loop, main())


@both_loops
def test_an_address_that_swallows_packets_costs_a_quarter_of_a_second(new_loop: Loop) -> None:
    async def main() -> None:
        async with Server(answers(OK)) as server, black_hole() as hole:
            began = asyncio.get_running_loop().time()
            race = Race([(V4, ("127.0.0.1", hole)), (V4, ("127.0.0.1", server.port))])
            with await race.winner() as sock:
                assert sock.getpeername()[1] == server.port
            assert asyncio.get_running_loop().time() - began < 3 * SLACK

    run(new_loop, main())


@both_loops
def test_an_address_that_wakes_up_late_still_wins_over_one_that_never_does(new_loop: Loop) -> None:
    async def main() -> None:
        async with Server(answers(OK)) as server, black_hole() as hole:
            good, bad = (V4, ("127.0.0.1", server.port)), (V4, ("127.0.0.1", hole))
            race = Race([bad, bad, good], fallback_s=0.01)
            with await race.winner() as sock:
                assert sock.getpeername()[1] == server.port

    run(new_loop, main())


@both_loops
def test_when_no_address_accepts_a_refusal_is_what_is_told(new_loop: Loop) -> None:
    async def main() -> None:
        with socket.socket() as unused:
            unused.bind(("127.0.0.1", 0))
            port = unused.getsockname()[1]
            race = Race([(V4, ("255.255.255.255", port)), (V4, ("127.0.0.1", port))])
            with pytest.raises(ConnectionRefusedError):
                await race.winner()

    run(new_loop, main())


def test_a_vanished_peer_will_be_noticed_by_the_kernel_within_a_minute() -> None:
    async def main() -> None:
        async with Server(answers(OK)) as server:
            with await Race([(V4, ("127.0.0.1", server.port))]).winner() as sock:
                assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
                option = lambda name: sock.getsockopt(socket.IPPROTO_TCP, name)  # noqa: E731
                idle = option(socket.TCP_KEEPIDLE)
                assert idle + option(socket.TCP_KEEPINTVL) * option(socket.TCP_KEEPCNT) < 60
                assert option(socket.TCP_NODELAY)

    run(asyncio.new_event_loop, main())


def test_proxies_of_the_environment_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")

    async def main() -> None:
        async with Server(answers(OK)) as server:
            assert (await ask(server.upstream()))[1] == b"ok"

    run(asyncio.new_event_loop, main())


# TLS


def _tls() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(CERTS / "server.pem", CERTS / "server.key")
    return context


def _secure(host: str, port: int, ca: Path | None) -> Upstream:
    return Upstream(Target.parse("gpu1", f"https://{host}:{port}", ca=str(ca) if ca else None))


@both_loops
def test_a_backend_that_its_ca_vouches_for_is_used_over_tls_and_kept(new_loop: Loop) -> None:
    async def main() -> None:
        async with Server(answers(OK, length(b"y" * 300_000)), tls=_tls()) as server:
            upstream = _secure("localhost", server.port, CERTS / "ca.pem")
            for body in (b"{}", b"x" * 1_000_000):
                assert (await ask(upstream, body))[0].status == 200
            assert [len(request.body) for request in server.requests] == [2, 1_000_000]
            await upstream.aclose()
            assert upstream.open_connections == 0

    run(new_loop, main())


@both_loops
@pytest.mark.parametrize(
    ("host", "ca"),
    [
        ("127.0.0.2", CERTS / "ca.pem"),
        ("localhost", None),
        ("localhost", CERTS / "missing.pem"),
        ("localhost", CERTS / "README.md"),
    ],
    ids=["other name", "unknown authority", "no file", "no certificate"],
)
def test_a_backend_that_nobody_vouches_for_gets_no_request(
    new_loop: Loop, host: str, ca: Path | None
) -> None:
    async def main() -> None:
        async with Server(answers(OK), host="0.0.0.0", tls=_tls()) as server:
            upstream = _secure(host, server.port, ca)
            with pytest.raises(UpstreamError) as caught:
                await ask(upstream)
            assert (caught.value.kind, caught.value.may_have_run) == ("tls", False)
            assert server.requests == []
            assert upstream.open_connections == 0

    run(new_loop, main())


@both_loops
@pytest.mark.parametrize("wire", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n"])
def test_a_backend_that_does_not_speak_tls_is_a_tls_error(new_loop: Loop, wire: bytes) -> None:
    async def main() -> None:
        async def script(peer: Peer) -> None:
            await peer.reader.read(1)
            await peer.send(wire)

        async with Server(script) as server:
            upstream = _secure("localhost", server.port, CERTS / "ca.pem")
            with pytest.raises(UpstreamError) as caught:
                await ask(upstream)
            assert caught.value.kind == "tls"
            assert upstream.open_connections == 0

    run(new_loop, main())


@both_loops
def test_cancelling_in_a_tls_handshake_closes_the_socket(new_loop: Loop) -> None:
    async def main() -> None:
        async def script(peer: Peer) -> None:
            await peer.gone()

        async with Server(script) as server:
            upstream = _secure("localhost", server.port, CERTS / "ca.pem")
            for deadlines in (Deadlines(0.05, 20, 20), PATIENT):
                task = asyncio.create_task(ask(upstream, deadlines=deadlines))
                seen = server.accepted
                await until(lambda seen=seen: server.accepted > seen)  # type: ignore[misc]
                if deadlines is PATIENT:
                    task.cancel()
                (error,) = await asyncio.gather(task, return_exceptions=True)
                assert isinstance(error, asyncio.CancelledError | UpstreamError)
                await until(lambda: not server.open)
                assert upstream.open_connections == 0

    run(new_loop, main())
