"""Which socket a request leaves by: names, families, and never a proxy (B054, B112)."""

import asyncio
import socket
from collections.abc import Callable

import pytest

from gateway.runtime.dial import Race
from gateway.runtime.upstream import Deadlines, Target, Upstream, UpstreamError
from tests.gateway.upstream_server import (
    SLACK,
    Server,
    answers,
    ask,
    black_hole,
    both_loops,
    length,
    run,
)

Loop = Callable[[], asyncio.AbstractEventLoop]
OK = length(b"ok")
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
