"""An engine that is a program: started in a process group of its own, and gone with the block that started it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path

import httpx2
import pytest

from tests.fakes.running import slack


@contextlib.asynccontextmanager
async def running_program(
    command: Sequence[str],
    url: str,
    *,
    log: Path,
    environ: Mapping[str, str] | None = None,
    within_s: float = 120,
) -> AsyncIterator[asyncio.subprocess.Process]:
    """Runs it until the block ends; begins when `url` answers 200. A program that ends by itself skips the test."""
    with log.open("wb") as out:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            env={**os.environ, **(environ or {})},
            start_new_session=True,
        )
    try:
        await _until_it_answers(process, url, log, within_s * slack())
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        try:
            await asyncio.wait_for(process.wait(), 10)
        except TimeoutError:
            os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
        with contextlib.suppress(ProcessLookupError):  # what it started itself
            os.killpg(process.pid, signal.SIGKILL)


async def _until_it_answers(
    process: asyncio.subprocess.Process, url: str, log: Path, within_s: float
) -> None:
    async with httpx2.AsyncClient(trust_env=False) as http:
        deadline = asyncio.get_running_loop().time() + within_s
        while process.returncode is None:
            with contextlib.suppress(httpx2.HTTPError):
                if (await http.get(url, timeout=2)).status_code == 200:
                    return
            if asyncio.get_running_loop().time() > deadline:
                raise AssertionError(f"not ready within {within_s:.0f} s:\n{_end_of(log)}")
            await asyncio.sleep(0.2)
    pytest.skip(f"it cannot run on this machine: {_end_of(log)}")


def _end_of(log: Path) -> str:
    return log.read_text(errors="replace")[-1500:]


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])
