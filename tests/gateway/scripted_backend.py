"""A backend for poller tests: answers GETs from a table, and keeps count of every question.

async with ScriptedBackend({"/health": b'{"status":"ok"}'}) as backend:
    backend.table["/health"] = HANG      # from now on
    backend.asked                        # [(seconds, path, headers), ...]
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Final, Self

HANG: Final = "hang"  # takes the question and never answers
BREAK: Final = "break"  # takes the question and closes
DRIP: Final = "drip"  # begins an answer that never ends


@dataclass(frozen=True)
class Page:
    """One answer."""

    body: bytes = b""
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Asked:
    """One question: when it came (time.monotonic seconds), and what."""

    at: float
    path: str
    headers: Mapping[str, str]


Table = dict[str, Page | str]


class ScriptedBackend:
    """Owns one listening socket. A path that is not in the table is a 404; `otherwise` replaces that."""

    def __init__(self, table: Mapping[str, Page | str], *, port: int = 0) -> None:
        self.table: Table = dict(table)
        self.otherwise: Page | str = Page(b"not found", 404)
        self.port = port
        self.asked: list[Asked] = []
        self.peak = 0  # most questions under way at one moment
        self._under_way = 0
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def paths(self) -> list[str]:
        return [one.path for one in self.asked]

    def times(self, path: str) -> list[float]:
        return [one.at for one in self.asked if one.path == path]

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._server is not None
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        try:
            while await self._answer(reader, writer):
                pass
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            writer.transport.abort()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").splitlines()
        pairs = (line.partition(":") for line in head[1:] if line)
        headers = {name.lower(): value.strip() for name, _, value in pairs}
        self.asked.append(Asked(time.monotonic(), head[0].split()[1], headers))
        self._under_way += 1
        self.peak = max(self.peak, self._under_way)
        try:
            return await self._play(
                self.table.get(self.asked[-1].path, self.otherwise), reader, writer
            )
        finally:
            self._under_way -= 1

    async def _play(
        self, page: Page | str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> bool:
        if page == BREAK:
            return False
        if page == HANG:
            await reader.read()  # until the asker goes away
            return False
        if isinstance(page, str):
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")
            while not reader.at_eof():
                writer.write(b"{")
                await writer.drain()
                await asyncio.sleep(0.1)
            return False
        head = f"HTTP/1.1 {page.status} X\r\nContent-Length: {len(page.body)}\r\n"
        head += "".join(f"{name}: {value}\r\n" for name, value in page.headers.items())
        writer.write(head.encode() + b"\r\n" + page.body)
        await writer.drain()
        return True
