"""How long a backend may take, and the one timer per connection that watches it."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

import msgspec


class Deadlines(msgspec.Struct, frozen=True):
    """How long a backend may take, in seconds; 0 is for ever.

    `first_byte_s` runs from the request sent to the first body byte (while the request is being sent, from the last
    progress of that), `between_bytes_s` between later reads off the wire. Neither runs while we do not read.
    """

    connect_s: float = 5.0
    first_byte_s: float = 1800.0
    between_bytes_s: float = 600.0


class Alarm:
    """Goes off when nobody put it off in time. Owns a loop timer, set late and seldom.

    `since` is the loop's time from which it runs: to put it off, as every read does, is to move that number, and the
    timer looks at it when it fires.
    """

    __slots__ = ("_call", "_closed", "_loop", "_seconds", "_timer", "_timer_at", "since")

    def __init__(self, loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> None:
        self._loop = loop
        self._call = call
        self.since = 0.0
        self._seconds = math.inf
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = math.inf
        self._closed = False

    def set(self, seconds: float) -> None:
        """Go off `seconds` from now, not before; 0: never."""
        if seconds <= 0 or self._closed:
            self.off()
            return
        self._seconds = seconds
        self.since = now = self._loop.time()
        if now + seconds < self._timer_at:
            self._start_timer()

    def off(self) -> None:
        """Do not go off until it is set again."""
        self._seconds = math.inf

    def close(self) -> None:
        """Never go off again."""
        self._closed = True
        self.off()
        self._stop_timer()

    def _start_timer(self) -> None:
        self._stop_timer()
        self._timer_at = self.since + self._seconds
        self._timer = self._loop.call_at(self._timer_at, self._on_timer)

    def _stop_timer(self) -> None:
        self._timer_at = math.inf
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _on_timer(self) -> None:
        self._timer = None
        self._timer_at = math.inf
        if self._seconds == math.inf:
            return
        if self._loop.time() < self.since + self._seconds:
            self._start_timer()
        else:
            self.off()
            self._call()
