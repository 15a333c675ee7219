"""`slotgate serve` as a child process, the way an operator runs it: started, told to stop, and waited for.

Law of this file: a child is stopped by its own process id and never outlives the block that started it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import sys
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.fakes.raw_client import RawClient, RawResponse
from tests.fakes.running import slack
from tests.gateway.line_talk import CHAT, body_for

ROOT = Path(__file__).parents[2]


@dataclass(slots=True)
class Served:
    """A gateway in a process of its own."""

    process: asyncio.subprocess.Process
    port: int
    log: list[str] = field(default_factory=list)

    async def get(self, path: str) -> RawResponse:
        async with await RawClient.connect(self.port) as client:
            await client.request("GET", path)
            return await client.response()

    async def asking(self, path: str = CHAT, **fields: Any) -> RawClient:
        """A client that has sent its whole request."""
        client = await RawClient.connect(self.port)
        await client.request("POST", path, body=json.dumps(body_for(path, **fields)).encode())
        return client

    def signal(self, number: int = signal.SIGTERM) -> None:
        self.process.send_signal(number)

    async def status(self, within_s: float = 10) -> int:
        """Its exit status."""
        return await asyncio.wait_for(self.process.wait(), within_s * slack())


@contextlib.asynccontextmanager
async def serving(
    folder: Path, config: Mapping[str, Any], environ: Mapping[str, str] | None = None
) -> AsyncIterator[Served]:
    """`python -m gateway serve --config F` on any free port, from its ready line on."""
    file = folder / "slotgate.yaml"
    file.write_text(json.dumps({"listen": {"port": 0}, "log": {"format": "json"}, **config}))
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "gateway", "serve", "--config", str(file)),
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), **(environ or {})},
        stderr=asyncio.subprocess.PIPE,
    )
    served = Served(process, 0)
    reading = asyncio.create_task(_read(process, served.log))
    try:
        served.port = await asyncio.wait_for(_port(served), 20 * slack())
        yield served
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
        await reading


async def _read(process: asyncio.subprocess.Process, log: list[str]) -> None:
    assert process.stderr is not None
    while line := await process.stderr.readline():
        log.append(line.decode())


async def _port(served: Served) -> int:
    while True:
        for line in served.log:
            if (found := re.search(r"ready at \S+:(\d+)", line)) is not None:
                return int(found[1])
        assert served.process.returncode is None, "".join(served.log)
        await asyncio.sleep(0.01)
