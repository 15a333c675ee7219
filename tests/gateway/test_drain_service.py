"""The process as a service: ready within a second or so, telling the service manager, and leaving in order."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
import time
from pathlib import Path

import pytest

from tests.fakes.engine import FakeEngine
from tests.fakes.raw_client import RawClient
from tests.fakes.running import in_loop, slack
from tests.gateway.reloading import held_stream
from tests.gateway.served import ROOT, serving

READY_S = 1.0  # the contract; a test allows ten times that


class Manager:
    """What systemd is to the process: a datagram socket."""

    def __init__(self, folder: Path) -> None:
        self.address = str(folder / "notify")
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.sock.bind(self.address)
        self.sock.setblocking(False)

    async def hears(self) -> dict[str, str]:
        async with asyncio.timeout(10 * slack()):
            data = await asyncio.get_running_loop().sock_recv(self.sock, 4096)
        return dict(line.split("=", 1) for line in data.decode().splitlines())


@pytest.mark.skipif(sys.platform != "linux", reason="systemd is Linux's")
@in_loop
async def test_the_service_manager_is_told_of_ready_reload_and_stop(tmp_path: Path) -> None:
    manager = Manager(tmp_path)
    async with FakeEngine(slots=1) as engine:
        engine.always(held_stream(release := asyncio.Event()))
        config = {"backends": [{"url": engine.url}]}
        environ = {"NOTIFY_SOCKET": manager.address}
        async with serving(tmp_path, config, environ) as served:
            assert (await manager.hears())["READY"] == "1"
            served.signal(signal.SIGHUP)
            reloading = await manager.hears()
            assert reloading["RELOADING"] == "1"
            assert int(reloading["MONOTONIC_USEC"]) <= time.monotonic_ns() // 1000
            assert (await manager.hears())["READY"] == "1"
            async with await served.asking(stream=True) as client:
                await engine.until_requests(1)
                served.signal(signal.SIGTERM)
                stopping = await manager.hears()
                assert stopping["STOPPING"] == "1"
                assert "1 request" in stopping["STATUS"]
                assert int(stopping["EXTEND_TIMEOUT_USEC"]) > 60e6, "the default of drain_s"
                release.set()
                assert (await client.response()).body.rstrip().endswith(b"[DONE]")
            assert await served.status() == 0
    manager.sock.close()


@in_loop
async def test_a_service_manager_that_does_not_listen_stops_nothing(tmp_path: Path) -> None:
    async with FakeEngine() as engine:
        environ = {"NOTIFY_SOCKET": str(tmp_path / "nobody")}
        async with serving(tmp_path, {"backends": [{"url": engine.url}]}, environ) as served:
            assert (await served.get("/readyz")).status == 200


@in_loop
async def test_it_is_ready_soon_after_exec_though_one_of_four_backends_is_dead(
    tmp_path: Path,
) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with socket.socket() as dead:
        dead.bind(("127.0.0.1", 0))
        dead_url = f"http://127.0.0.1:{dead.getsockname()[1]}"  # bound, and nobody listens
        async with FakeEngine() as one, FakeEngine("vllm") as two, FakeEngine("ollama") as three:
            file = tmp_path / "slotgate.yaml"
            urls = [one.url, two.url, three.url, dead_url]
            backends = [{"name": f"b{n}", "url": url} for n, url in enumerate(urls)]
            file.write_text(json.dumps({"listen": {"port": port}, "backends": backends}))
            since = time.monotonic()
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "gateway", "serve", "--config", str(file)),
                cwd=tmp_path,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
                stderr=asyncio.subprocess.DEVNULL,
            )
            try:
                await asyncio.wait_for(_ready(port), 10 * READY_S * slack())
                print(f"ready {time.monotonic() - since:.2f} s after exec")
            finally:
                process.kill()
                await process.wait()


async def _ready(port: int) -> None:
    while True:
        try:
            async with await RawClient.connect(port) as client:
                await client.request("GET", "/readyz")
                if (await client.response()).status == 200:
                    return
        except OSError:  # not listening yet
            pass
        await asyncio.sleep(0.01)
