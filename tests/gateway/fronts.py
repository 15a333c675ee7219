"""nginx and Caddy in front of a gateway, with the configuration that deploy/ ships: only addresses and files are replaced.

Law of this file: what is replaced is found exactly once, so a test never runs a configuration that nobody ships; a
proxy is stopped by its own process id and never outlives the block that started it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
import socket
import subprocess
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.fakes.running import slack

DEPLOY = Path(__file__).parents[2] / "deploy"
CERTS = Path(__file__).parent / "upstream_certs"
NGINX = DEPLOY / "nginx" / "slotgate.conf"
CADDY = DEPLOY / "caddy" / "Caddyfile"
KINDS = ("nginx", "caddy")

_AROUND = """\
daemon off;
master_process off;
pid {folder}/nginx.pid;
error_log {folder}/error.log info;
events {{ worker_connections 256; }}
http {{
  access_log off;
  {temporary}
  include {folder}/slotgate.conf;
}}
"""
_TEMPORARY = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")


@dataclass(frozen=True, slots=True)
class Front:
    """A proxy that listens. `tls_port` is None for Caddy, whose certificates come from outside."""

    kind: str
    port: int
    tls_port: int | None


def host_of(at: Front) -> dict[str, str]:
    """The Host header that a client of it sends."""
    return {"Host": f"127.0.0.1:{at.port}"}


def program(name: str) -> str:
    """The path of a program; skips the test when it is not installed. nginx is often in sbin only."""
    path = os.environ.get("PATH", os.defpath) + os.pathsep + "/usr/sbin"
    found = shutil.which(name, path=path)
    if found is None:
        pytest.skip(f"no {name} on PATH (apt-get install {name})")
    return found


def caddy_version() -> tuple[int, ...]:
    """Of the Caddy on PATH; skips the test when there is none."""
    told = subprocess.run([program("caddy"), "version"], capture_output=True, text=True, check=True)
    return tuple(int(part) for part in re.findall(r"\d+", told.stdout)[:2])


def nginx_files(
    folder: Path, *, gateway: int, port: int, tls_port: int, others: Sequence[int] = ()
) -> Path:
    """The shipped configuration for these ports, and one around it that needs no root.

    `others` are more gateways, which nginx asks in turn.
    """
    folder.mkdir(exist_ok=True)
    ports = (gateway, *others)
    servers = "".join(f"    server 127.0.0.1:{one} max_fails=0;\n" for one in ports)
    text = _with(
        NGINX.read_text(),
        ("    server 127.0.0.1:8088 max_fails=0;\n", servers),
        ("listen 443 ssl", f"listen 127.0.0.1:{port};\n    listen 127.0.0.1:{tls_port} ssl"),
        ("/etc/ssl/slotgate/server.pem", str(CERTS / "server.pem")),
        ("/etc/ssl/slotgate/server.key", str(CERTS / "server.key")),
    )
    (folder / "slotgate.conf").write_text(text)
    temporary = " ".join(f"{one}_temp_path {folder}/{one};" for one in _TEMPORARY)
    file = folder / "nginx.conf"
    file.write_text(_AROUND.format(folder=folder, temporary=temporary))
    return file


def caddy_file(folder: Path, *, gateway: int, port: int) -> Path:
    """The shipped configuration for these ports, without certificates and without the port of its own control."""
    folder.mkdir(exist_ok=True)
    text = _with(
        CADDY.read_text(),
        ("\nllm.example.org {", f"\nhttp://127.0.0.1:{port} {{"),
        ("reverse_proxy 127.0.0.1:8088 {", f"reverse_proxy 127.0.0.1:{gateway} {{"),
    )
    file = folder / "Caddyfile"
    file.write_text("{\n\tadmin off\n}\n" + text)
    return file


@contextlib.asynccontextmanager
async def front(
    kind: str, gateway: int, folder: Path, others: Sequence[int] = ()
) -> AsyncIterator[Front]:
    """A proxy of this kind in front of the gateway at this port (nginx: and others). Skips when it is not installed."""
    found = program(kind)
    port, tls_port = _free_ports(2)
    if kind == "nginx":
        file = nginx_files(
            folder / kind, gateway=gateway, port=port, tls_port=tls_port, others=others
        )
        command = [found, "-p", str(folder), "-e", str(folder / "early.log"), "-c", str(file)]
    else:
        file = caddy_file(folder / kind, gateway=gateway, port=port)
        command = [found, "run", "--adapter", "caddyfile", "--config", str(file)]
    async with _running(command, folder, port):
        yield Front(kind, port, tls_port if kind == "nginx" else None)


@contextlib.asynccontextmanager
async def _running(command: Sequence[str], folder: Path, port: int) -> AsyncIterator[None]:
    log = folder / "front.log"
    home = {"HOME": str(folder), "XDG_CONFIG_HOME": str(folder), "XDG_DATA_HOME": str(folder)}
    with log.open("wb") as out:
        process = await asyncio.create_subprocess_exec(
            *command, stdout=out, stderr=out, env={**os.environ, **home}
        )
    try:
        await _until_it_listens(process, port, log)
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def _until_it_listens(process: asyncio.subprocess.Process, port: int, log: Path) -> None:
    async with asyncio.timeout(20 * slack()):
        while True:
            assert process.returncode is None, _told(log)
            with contextlib.suppress(ConnectionRefusedError):
                _, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.close()
                await writer.wait_closed()
                return
            await asyncio.sleep(0.02)


def _told(log: Path) -> str:
    return log.read_text()


def _free_ports(count: int) -> list[int]:
    """Free a moment ago: these programs cannot be told to take any."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def _with(text: str, *changes: tuple[str, str]) -> str:
    for old, new in changes:
        assert text.count(old) == 1, f"{old!r} is there {text.count(old)} times"
        text = text.replace(old, new)
    return text
