"""Start, stop and signals."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import ssl
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
import uvicorn

from gateway.api.edge import EdgeSettings, edge
from gateway.api.server import Server, StartupError
from gateway.core.config import Tls
from tests.fakes.asgi import Echo, answer, edge_before, only_http
from tests.fakes.raw_client import PATIENCE_S, RawClient, encode
from tests.fakes.running import eventually, run, slack

ROOT = Path(__file__).parents[2]
CERTS = Path(__file__).parent / "upstream_certs"

# A server process: `/slow` streams until the drain, which takes as long as its first argument says.
SCRIPT = """
import asyncio, sys
import uvloop
from gateway.api.edge import EdgeSettings
from gateway.api.server import Server

draining = asyncio.Event()

async def app(scope, receive, send):
    if scope["type"] != "http":
        raise RuntimeError
    if scope["path"] == "/slow":
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"first", "more_body": True})
        await draining.wait()
        await asyncio.sleep(0.3)
        await send({"type": "http.response.body", "body": b"last"})
        return
    headers = [(b"content-length", b"2")]
    if draining.is_set():
        headers.append((b"connection", b"close"))
    status = 503 if draining.is_set() else 200
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": b"ok"})

async def drain():
    draining.set()
    print("draining", flush=True)
    await asyncio.sleep(float(sys.argv[1]))

async def main():
    server = Server(app, EdgeSettings(), host="127.0.0.1", port=0)
    server.catch_signals()
    await server.start()
    print(server.port, flush=True)
    try:
        await server.until_signalled(drain)
    finally:
        await server.stop()
    print("stopped", flush=True)

with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
    runner.run(main())
"""


class Child:
    """A server process."""

    def __init__(self, process: asyncio.subprocess.Process, port: int) -> None:
        self.process = process
        self.port = port

    async def line(self) -> str:
        assert self.process.stdout is not None
        async with asyncio.timeout(PATIENCE_S):
            return (await self.process.stdout.readline()).decode().strip()

    async def status(self) -> int:
        async with asyncio.timeout(PATIENCE_S):
            return await self.process.wait()


@contextlib.asynccontextmanager
async def child(drain_s: float, *before: str) -> AsyncIterator[Child]:
    process = await asyncio.create_subprocess_exec(
        *(*before, sys.executable, "-c", SCRIPT, str(drain_s)),
        stdout=asyncio.subprocess.PIPE,
        cwd=ROOT,
    )
    found = Child(process, 0)
    try:
        found.port = int(await found.line())
        yield found
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_first_signal_drains_while_new_clients_still_get_an_answer(number: int) -> None:
    """Plain uvicorn closes the listening socket at once, and ends by the signal."""

    async def main() -> None:
        async with child(0.6) as server, await RawClient.connect(server.port) as stream:
            idle = await RawClient.connect(server.port)
            await idle.request("GET", "/")
            assert (await idle.response()).status == 200
            await stream.request("GET", "/slow")
            await stream.head()
            assert await stream.chunk() == b"first"
            server.process.send_signal(number)
            assert await server.line() == "draining"
            async with await RawClient.connect(server.port) as late:
                await late.request("GET", "/")
                assert (await late.response()).status == 503
            await idle.request("GET", "/")  # a kept connection is told, not cut
            response = await idle.response()
            assert (response.status, response.header("connection")) == (503, "close")
            assert await stream.chunk() == b"last"
            assert await stream.chunk() == b""
            assert await server.line() == "stopped"
            assert await server.status() == 0
            assert await stream.ending() == "fin"
            idle.close()

    run(main())


def test_an_idle_server_ends_at_once_with_status_0_even_when_told_twice() -> None:
    async def main() -> None:
        for _ in range(5):
            async with child(0) as server:
                server.process.send_signal(signal.SIGTERM)
                with contextlib.suppress(ProcessLookupError):
                    server.process.send_signal(signal.SIGINT)
                    await asyncio.sleep(0.01)
                    server.process.send_signal(signal.SIGTERM)
                assert await server.status() == 0

    run(main())


def test_the_second_signal_breaks_what_runs_and_ends_with_status_0() -> None:
    async def main() -> None:
        async with child(60) as server, await RawClient.connect(server.port) as stream:
            await stream.request("GET", "/slow", version="1.0")
            await stream.until(b"first")
            server.process.send_signal(signal.SIGTERM)
            assert await server.line() == "draining"
            loop = asyncio.get_running_loop()
            before = loop.time()
            server.process.send_signal(signal.SIGTERM)
            assert await stream.ending() == "reset"  # to HTTP/1.0 a FIN would be a whole answer
            assert await server.status() == 0
            assert loop.time() - before < 10 * slack()

    run(main())


def test_the_real_port_is_known_after_the_start_and_a_taken_one_is_a_plain_error() -> None:
    async def main() -> None:
        async with edge_before(Echo()) as server:
            assert server.port > 0
            other = Server(only_http(Echo()), EdgeSettings(), host="127.0.0.1", port=server.port)
            with pytest.raises(StartupError, match=f"cannot listen on 127.0.0.1:{server.port}"):
                await other.start()

    run(main())


def test_the_app_is_started_before_the_first_connection_and_told_of_the_end() -> None:
    async def main() -> None:
        heard: list[str] = []

        async def app(scope: Any, receive: Any, send: Any) -> None:
            if scope["type"] == "http":
                heard.append("request")
                await answer(send)
                return
            for _ in range(2):
                heard.append((await receive())["type"])
                await send({"type": heard[-1] + ".complete"})

        server = Server(app, EdgeSettings(), host="127.0.0.1", port=0)
        await server.start()
        async with await RawClient.connect(server.port) as client:
            await client.request("GET", "/")
            await client.response()
        await server.stop()
        assert heard == ["lifespan.startup", "request", "lifespan.shutdown"]

    run(main())


def test_stop_closes_idle_connections_and_breaks_those_that_do_not_end() -> None:
    async def main() -> None:
        cancelled = asyncio.Event()

        async def app(scope: Any, _: Any, send: Any) -> None:
            if scope["path"] == "/":
                await answer(send)
                return
            await send({"type": "http.response.start", "status": 200, "headers": []})
            try:
                await asyncio.sleep(3600)
            finally:
                cancelled.set()

        async with edge_before(app) as server:
            idle = await RawClient.connect(server.port)
            await idle.request("GET", "/")
            await idle.response()
            busy = await RawClient.connect(server.port)
            await busy.request("GET", "/busy")
            await busy.head()
        assert cancelled.is_set()
        assert await idle.ending() == "fin"
        assert await busy.ending() == "reset"
        assert server.connections == 0
        with pytest.raises(ConnectionRefusedError):
            await RawClient.connect(server.port)
        idle.close()
        busy.close()

    run(main())


def test_new_limits_count_without_a_restart() -> None:
    async def main() -> None:
        async with edge_before(Echo(), keepalive_s=60) as server:
            old = await RawClient.connect(server.port)
            server.apply(EdgeSettings(keepalive_s=0.1, header_kib=1))
            await old.request("GET", "/")
            assert (await old.response()).status == 200
            assert await old.ending() == "fin"
            old.close()
            async with await RawClient.connect(server.port) as new:
                await new.request("GET", "/", {"X-Fill": "a" * 1024})
                assert (await new.response()).status == 431

    run(main())


def test_the_edge_fits_into_plain_uvicorn() -> None:
    """What it borrows: the constructor, the state, `shutdown`, and two look-ups of addresses."""

    async def main() -> None:
        config = uvicorn.Config(
            only_http(Echo()),
            http=edge(EdgeSettings()),
            port=0,
            log_config=None,
            interface="asgi3",
        )
        server = uvicorn.Server(config)
        serving = asyncio.create_task(server._serve())
        await eventually(lambda: server.started)
        port = server.servers[0].sockets[0].getsockname()[1]
        async with await RawClient.connect(port) as client:
            await client.request("POST", "/x", body=b"abc")
            assert (await client.response()).body == b"/x abc"
            server.should_exit = True
            assert await client.ending() == "fin"
        await serving

    run(main())


def test_tls_is_spoken_and_early_answers_arrive_there_too() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        assert scope["scheme"] == "https"
        if scope["path"] == "/early":
            await answer(send, b"no", 413, [(b"connection", b"close")])
        else:
            await Echo()(scope, receive, send)

    async def main() -> None:
        server = Server(
            only_http(app),
            EdgeSettings(),
            host="127.0.0.1",
            port=0,
            tls=Tls(cert=str(CERTS / "server.pem"), key=str(CERTS / "server.key")),
        )
        await server.start()
        context = ssl.create_default_context()
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        base = f"https://127.0.0.1:{server.port}"
        async with httpx2.AsyncClient(verify=context, base_url=base, timeout=PATIENCE_S) as client:
            for _ in range(3):
                assert (await client.post("/x", content=b"abc")).content == b"/x abc"
            for size in (10, 3_000_000):
                response = await client.post("/early", content=b"a" * size)
                assert (response.status_code, response.content) == (413, b"no")
        await server.stop()

    run(main())


def test_a_server_out_of_descriptors_goes_on_and_recovers() -> None:
    """B052c. uvloop itself sheds the connections it cannot take; nothing stops listening or spins."""

    async def main() -> None:
        limit = ("sh", "-c", 'ulimit -n 64; exec "$@"', "sh")
        async with child(0, *limit) as server:
            stream = await RawClient.connect(server.port)
            await stream.request("GET", "/slow")
            await stream.head()
            assert await stream.chunk() == b"first"
            crowd = [await _connected(server.port) for _ in range(150)]
            cpu = _cpu_s(server.process.pid)
            await asyncio.sleep(1)
            assert _cpu_s(server.process.pid) - cpu < 0.5
            for sock in crowd:
                sock.close()
            answered = 0

            async def ask() -> bool:
                nonlocal answered
                with contextlib.suppress(Exception):  # still crowded
                    async with await RawClient.connect(server.port) as client:
                        await client.request("GET", "/")
                        answered += (await client.response(patience_s=1)).status == 200
                return answered >= 5

            await eventually(ask, why="it did not recover")
            server.process.send_signal(signal.SIGTERM)
            assert await stream.chunk() == b"last"
            assert await server.status() == 0
            stream.close()

    run(main())


async def _connected(port: int) -> socket.socket:
    sock = socket.socket()
    sock.setblocking(False)
    async with asyncio.timeout(PATIENCE_S):
        await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", port))
        with contextlib.suppress(OSError):
            await asyncio.get_running_loop().sock_sendall(sock, encode("GET", "/slow"))
    return sock


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
