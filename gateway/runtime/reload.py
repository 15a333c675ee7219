"""Watching the configuration's files: a change, or a SIGHUP, and everything is read again.

Law of this file: a file is taken up only once it has stopped changing (two looks alike), so that a half-written or
briefly empty one is not; what cannot be used changes nothing and is reported once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

LOOK_S = 0.5

Stamp = tuple[int, int, int] | None  # None: there is no such file


class Watcher:
    """Owner of the watching task. `reload` is called after a change, and when a signal asks for it.

    `reload` may change which files there are; those that are new count as just read.
    """

    def __init__(
        self, files: Callable[[], Sequence[str]], reload: Callable[[], Awaitable[None]]
    ) -> None:
        self._files = files
        self._reload = reload
        self._asked = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._taken = self._seen = self._stamps()  # as near as can be to when they were read

    def start(self) -> None:
        self._task = asyncio.create_task(self._watch(), name="reload")

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def ask(self) -> None:
        """SIGHUP: read everything now, changed or not."""
        self._asked.set()

    async def _watch(self) -> None:
        while True:
            asked = await self._pause()
            now = self._stamps()
            settled, self._seen = now == self._seen, now
            if asked or (settled and now != self._taken):
                await self._reload()
                self._taken = self._seen = {**self._stamps(), **_common(now, self._files())}

    async def _pause(self) -> bool:
        try:
            async with asyncio.timeout(LOOK_S):
                await self._asked.wait()
        except TimeoutError:
            return False
        self._asked.clear()
        return True

    def _stamps(self) -> dict[str, Stamp]:
        return {name: _stamp(name) for name in self._files()}


def _common(stamps: dict[str, Stamp], names: Sequence[str]) -> dict[str, Stamp]:
    return {name: stamps[name] for name in names if name in stamps}


def _stamp(name: str) -> Stamp:
    try:
        found = Path(name).stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
