"""A server in a child process that never outlives us.

Laws of this file: what was started is stopped and reaped, whatever way its owner ends. The child leads a process group of
its own, which is ended as a whole (SIGTERM, then SIGKILL), and holds the read end of a pipe whose write end only we have: if we
are killed, the kernel closes the pipe, and the child, which watches it (`die_with_parent`), goes too. A Ctrl-C in the
terminal does not reach the child: its owner decides when it ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

START_TIMEOUT_S = 180.0
TERM_GRACE_S = 5.0


@dataclass(slots=True)
class ChildFailed(Exception):  # noqa: N818 - an ending that callers translate
    """The child ended, or said why it cannot serve, before it was ready.

    `status` is its exit status: negative for a signal. `reason` and `remedy` are the child's own words, if it had any.
    """

    status: int | None
    reason: str = ""
    remedy: str = ""


class ChildServer:
    """Owns one child process. It is told to serve by its command line, and says where in one JSON line on stdout."""

    def __init__(self, module: str, arguments: list[str], *, log_path: str | None = None) -> None:
        # -P: a stray json.py in the person's folder must not be imported instead of the real one.
        self._command = [sys.executable, "-P", "-m", module, *arguments]
        self._log_path = log_path or os.devnull
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> str:
        """Start the child and return its URL. Raises ChildFailed; then nothing is left running."""
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                with Path(self._log_path).open("ab") as log:  # noqa: ASYNC230 - a local file, once
                    self._process = await asyncio.create_subprocess_exec(
                        *self._command,
                        stdin=asyncio.subprocess.PIPE,
                        stdout=asyncio.subprocess.PIPE,
                        stderr=log,
                        env=_environment(),
                        start_new_session=True,
                    )
                return await self._first_word(self._process)
        except TimeoutError:
            await self.stop()
            raise ChildFailed(None, f"it was not ready within {START_TIMEOUT_S:.0f} s") from None
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        """End the whole process group and reap the child. Does nothing the second time."""
        process = self._process
        if process is None:
            return
        self._process = None
        reaping = asyncio.ensure_future(_end(process))
        try:
            await asyncio.shield(reaping)
        except asyncio.CancelledError:  # the second Ctrl-C: still nothing may be left behind
            _signal_group(process, signal.SIGKILL)
            await reaping
            raise

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    async def _first_word(self, process: asyncio.subprocess.Process) -> str:
        line = await process.stdout.readline() if process.stdout is not None else b""
        said: dict[str, Any] = {}
        with contextlib.suppress(ValueError):
            said = json.loads(line)
        if "url" in said:
            return str(said["url"])
        status = await process.wait()
        raise ChildFailed(status, str(said.get("reason", "")), str(said.get("remedy", "")))


def die_with_parent() -> None:
    """In the child: end the whole process group as soon as the parent is gone."""
    watch = threading.Thread(target=_watch_parent, daemon=True, name="parent watch")
    watch.start()


def say(**fields: str) -> None:
    """In the child: the one line on stdout that the parent waits for."""
    sys.stdout.write(json.dumps(fields) + "\n")
    sys.stdout.flush()


def _watch_parent() -> None:
    while os.read(0, 4096):  # the parent never writes: this returns when its end of the pipe closes
        pass
    os.killpg(os.getpgrp(), signal.SIGKILL)


def _environment() -> dict[str, str]:
    """Ours, so that the child finds this very package also when it was never installed."""
    home = str(Path(__file__).parents[2])
    inherited = os.environ.get("PYTHONPATH")
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (home, inherited)))}


async def _end(process: asyncio.subprocess.Process) -> None:
    _signal_group(process, signal.SIGTERM)
    try:
        async with asyncio.timeout(TERM_GRACE_S):
            await process.wait()
    except TimeoutError:
        pass
    _signal_group(process, signal.SIGKILL)  # also what the child may have started itself
    await process.wait()
    if process.stdin is not None:
        process.stdin.close()


def _signal_group(process: asyncio.subprocess.Process, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)
