"""A certificate that is renewed on disk is what the next handshake sees. Connections that stand are not touched."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import socket
import ssl
from pathlib import Path
from typing import Self

from tests.fakes.engine import FakeEngine
from tests.fakes.running import eventually, in_loop
from tests.gateway.reloading import Reloading, write

OLD = Path(__file__).parent / "upstream_certs" / "server"
NEW = Path(__file__).parent / "edge_certs" / "renewed"


def use(folder: Path, *, cert: Path, key: Path) -> None:
    shutil.copy(cert.with_suffix(".pem"), folder / "cert.pem")
    shutil.copy(key.with_suffix(".key"), folder / "key.pem")


def der(pem: Path) -> bytes:
    text = pem.with_suffix(".pem").read_text()
    begin = text.index("-----BEGIN CERTIFICATE")
    return ssl.PEM_cert_to_DER_cert(text[begin : text.index("-----END CERTIFICATE-----") + 25])


async def shown(port: int, name: str | None) -> bytes:
    """The certificate that a client sees which names this host, or none."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    _, writer = await asyncio.open_connection(
        "127.0.0.1", port, ssl=context, server_hostname=name or ""
    )
    found: bytes = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.close()
    return found


@in_loop
async def test_a_renewed_certificate_is_shown_without_a_restart(tmp_path: Path) -> None:
    file = tmp_path / "slotgate.yaml"
    use(tmp_path, cert=OLD, key=OLD)
    async with FakeEngine() as engine:
        write(file, engine.url, listen={"port": 0, "tls": {"cert": "cert.pem", "key": "key.pem"}})
        async with Reloading(file) as slotgate:
            port = slotgate.gateway.server.port
            assert (await slotgate.ask()).status_code == 200
            assert await shown(port, "localhost") == der(OLD)
            use(tmp_path, cert=NEW, key=NEW)

            async def renewed() -> bool:
                return await shown(port, "localhost") == der(NEW)

            await eventually(renewed, why="the old certificate is still shown")
            assert await shown(port, None) == der(NEW), "also to who names no host"
            assert (await slotgate.ask()).status_code == 200, "the old connection lives on"


@in_loop
async def test_a_certificate_without_its_key_changes_nothing(tmp_path: Path) -> None:
    """Half a renewal: the new certificate is there, its key is not yet."""
    file = tmp_path / "slotgate.yaml"
    use(tmp_path, cert=OLD, key=OLD)
    async with FakeEngine() as engine:
        write(file, engine.url, listen={"port": 0, "tls": {"cert": "cert.pem", "key": "key.pem"}})
        async with Reloading(file) as slotgate:
            port = slotgate.gateway.server.port
            use(tmp_path, cert=NEW, key=OLD)
            await slotgate.until("config_reload_success", 0)
            assert await shown(port, "localhost") == der(OLD)
            use(tmp_path, cert=NEW, key=NEW)
            await slotgate.until("config_reload_success", 1)
            assert await shown(port, "localhost") == der(NEW)


@in_loop
async def test_a_renewed_authority_of_a_backend_is_believed_without_a_restart(
    tmp_path: Path,
) -> None:
    file, ca = tmp_path / "slotgate.yaml", tmp_path / "ca.pem"
    shutil.copy(OLD.with_name("ca.pem"), ca)
    async with FakeEngine() as engine, Front(engine.port, OLD) as front:
        write(file, {"url": f"https://localhost:{front.port}", "ca": str(ca)})
        async with Reloading(file) as slotgate:
            await slotgate.until("backend_up", 1)
            assert (await slotgate.ask()).status_code == 200
            await front.change(NEW)
            shutil.copy(NEW.with_suffix(".pem"), ca)

            async def served() -> bool:
                return (await slotgate.ask()).status_code == 200

            await eventually(served, within_s=20, why="the renewed authority is not believed")
            await slotgate.until("backend_up", 1)


class Front:
    """TLS in front of an engine."""

    def __init__(self, port: int, pair: Path) -> None:
        self._behind = port
        self._pair = pair
        self.port = 0
        self._writers: list[asyncio.StreamWriter] = []

    async def __aenter__(self) -> Self:
        await self.change(self._pair)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._end()

    async def change(self, pair: Path) -> None:
        """Start (again) with this certificate, on the same port."""
        if self.port:
            await self._end()
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(pair.with_suffix(".pem"), pair.with_suffix(".key"))
        self._server = await asyncio.start_server(
            self._serve, "localhost", self.port, ssl=context, family=socket.AF_INET
        )
        self.port = self._server.sockets[0].getsockname()[1]

    async def _end(self) -> None:
        self._server.close()
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()
        await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", self._behind)
        self._writers += [writer, back]
        await asyncio.gather(_pipe(reader, back), _pipe(there, writer))


async def _pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    writer.close()


@in_loop
async def test_tls_is_neither_begun_nor_ended_by_a_reload(tmp_path: Path) -> None:
    file = tmp_path / "slotgate.yaml"
    use(tmp_path, cert=OLD, key=OLD)
    async with FakeEngine() as engine:
        write(file, engine.url)
        async with Reloading(file) as slotgate:
            tls = {"cert": "cert.pem", "key": "key.pem"}
            write(file, engine.url, listen={"port": 0, "tls": tls})
            await slotgate.gateway.reload()
            assert slotgate.gateway.base_url.startswith("http://")
            assert (await slotgate.ask()).status_code == 200
