"""Slotgate and its peers, started the same way in front of the same engines: each pinned to the proxy's core.

A peer is found on PATH, or in the directory of `--peers DIR` or $BENCH_PEERS (`DIR/bin/sglang-router`, …): the routers bring
dependencies of their own, so a virtual environment of their own is the right place for them:

    python3 -m venv /tmp/peers && /tmp/peers/bin/pip install sglang-router vllm-router

nginx comes with the operating system's packages.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from bench import machine

KEYS = {name: f"sk-sg-bench-{name}-0123456789abcdef" for name in ("a", "b", "c", "d")}
KEY = KEYS["a"]

NGINX = """
daemon off; master_process off; worker_processes 1; pid {dir}/nginx.pid; error_log stderr warn;
events {{ worker_connections 16384; }}
http {{
  access_log off; client_max_body_size 64m; client_body_buffer_size 64k; keepalive_requests 1000000;
  client_body_temp_path {dir}/body; proxy_temp_path {dir}/proxy; fastcgi_temp_path {dir}/f; uwsgi_temp_path {dir}/u; scgi_temp_path {dir}/s;
  upstream engines {{ least_conn; {servers} keepalive 256; keepalive_requests 1000000; }}
  server {{
    listen 127.0.0.1:{port} backlog=4096;
    location / {{
      proxy_pass http://engines; proxy_http_version 1.1; proxy_set_header Connection "";
      proxy_buffering off; proxy_read_timeout 600s;
    }}
  }}
}}
"""

SLOTGATE = """
listen: {{host: 127.0.0.1, port: {port}}}
auth: {{keys_file: keys.yaml}}
admission: {{queue: {queue}, max_wait_s: {max_wait}}}
log: {{level: info, format: json}}
backends:
"""


@dataclass(frozen=True, slots=True)
class Setup:
    """What a proxy is to stand in front of. `slots` per engine, as the operator would tell Slotgate."""

    engines: tuple[int, ...]
    slots: int = 64
    queue: str = "auto"
    max_wait_s: float = 30.0


@dataclass(frozen=True, slots=True)
class Proxy:
    """A running proxy. `pids` are it and its children."""

    name: str
    port: int
    pids: list[int]


class NotInstalled(Exception):  # noqa: N818  (a state of the machine)
    """A peer is not there; the message says why, for the table."""


Command = Callable[[Setup, int, Path], tuple[list[str], str]]


def slotgate(setup: Setup, port: int, where: Path) -> tuple[list[str], str]:
    lines = SLOTGATE.format(port=port, queue=setup.queue, max_wait=setup.max_wait_s)
    for n, engine in enumerate(setup.engines):
        lines += f"  - {{name: e{n}, url: 'http://127.0.0.1:{engine}', slots: {setup.slots}}}\n"
    (where / "slotgate.yaml").write_text(lines)
    keys = "".join(
        f"- {{name: {name}, hash: 'sha256:{sha256(key.encode()).hexdigest()}'}}\n"
        for name, key in KEYS.items()
    )
    (where / "keys.yaml").write_text(keys)
    (where / "keys.yaml").chmod(0o600)
    return [
        sys.executable, "-m", "gateway", "serve", "--config", str(where / "slotgate.yaml"),
    ], "/readyz"  # fmt: skip


def nginx(setup: Setup, port: int, where: Path) -> tuple[list[str], str]:
    servers = " ".join(f"server 127.0.0.1:{engine} max_fails=0;" for engine in setup.engines)
    conf = where / "nginx.conf"
    conf.write_text(NGINX.format(dir=where, servers=servers, port=port))
    return [_found("nginx"), "-c", str(conf), "-p", str(where)], "/v1/models"


def sglang_router(setup: Setup, port: int, _where: Path) -> tuple[list[str], str]:
    return [_found("sglang-router"), "launch", *_router(setup, port)], "/v1/models"


def vllm_router(setup: Setup, port: int, _where: Path) -> tuple[list[str], str]:
    return [_found("vllm-router"), *_router(setup, port)], "/v1/models"


def relay(setup: Setup, port: int, _where: Path) -> tuple[list[str], str]:
    return [
        sys.executable, "-m", "bench.relay", str(port), str(setup.engines[0]),
    ], "/v1/models"  # fmt: skip


ALL: dict[str, Command] = {
    "nginx": nginx,
    "bare relay": relay,
    "sglang-router": sglang_router,
    "vllm-router": vllm_router,
    "slotgate": slotgate,
}


@contextmanager
def running(name: str, setup: Setup, where: Path) -> Iterator[Proxy]:
    """The proxy of this name while the block runs. Raises NotInstalled, or RuntimeError if it does not come up."""
    port = machine.free_port()
    where = where / name.replace(" ", "-")
    where.mkdir(parents=True, exist_ok=True)
    command, ready = ALL[name](setup, port, where)
    log = where / "log"
    process = machine.start(command, machine.PROXY_CORE, log)
    try:
        if not machine.wait_until(port, ready, process):
            raise RuntimeError(f"{name} did not come up: {log.read_text()[-500:]}")
        yield Proxy(name, port, machine.family(process.pid))
    finally:
        machine.stop(process)


@contextmanager
def engines(count: int, where: Path, *arguments: str) -> Iterator[tuple[int, ...]]:
    """Engines in one process on the load's core."""
    ports = tuple(machine.free_port() for _ in range(count))
    command = [sys.executable, "-m", "bench.engines", *map(str, ports), *arguments]
    process: subprocess.Popen[bytes] = machine.start(
        command, machine.LOAD_CORE, where / f"engines-{ports[0]}.log"
    )
    try:
        if not machine.wait_until(ports[-1], "/v1/models", process):
            raise RuntimeError("the engines did not come up")
        yield ports
    finally:
        machine.stop(process)


def _router(setup: Setup, port: int) -> list[str]:
    urls = [f"http://127.0.0.1:{engine}" for engine in setup.engines]
    return [
        "--host", "127.0.0.1", "--port", str(port), "--worker-urls", *urls, "--policy", "cache_aware",
        "--prometheus-port", str(machine.free_port()), "--log-level", "error",
    ]  # fmt: skip


def _found(name: str) -> str:
    own = os.environ.get("BENCH_PEERS", "")
    places = [f"{own}/bin", own] if own else []
    path = shutil.which(
        name, path=os.pathsep.join([*places, os.environ.get("PATH", ""), "/usr/sbin"])
    )
    if path is None:
        raise NotInstalled(f"not installed: no `{name}` on PATH or in $BENCH_PEERS")
    return path
