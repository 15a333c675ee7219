"""TLS towards a backend: verified, or no request is sent."""

import asyncio
import ssl
from collections.abc import Callable
from pathlib import Path

import pytest

from gateway.runtime.upstream import Deadlines, Target, Upstream, UpstreamError
from tests.gateway.upstream_server import (
    PATIENT,
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
