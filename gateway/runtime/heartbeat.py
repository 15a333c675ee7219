"""A timer that beats four times a second: it tells how late the event loop is, and once a second that a second passed."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Final

BEAT_S: Final = 0.25
LAG_OVER_S: Final = 30.0  # longer than the usual scrape interval, so that no stall goes unseen
BEATS_PER_SECOND: Final = 4


class Heartbeat:
    """Owner of the timer. A beat that is late by x seconds means that something held the loop for about that long."""

    def __init__(self, each_second: Callable[[float], None]) -> None:
        self._each_second = each_second
        self._loop = asyncio.get_running_loop()
        self._lags: deque[tuple[float, float]] = deque()  # (when, how late), ever smaller
        self._due = 0.0
        self._beats = 0
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        self._arm()

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def lag_s(self) -> float:
        """The most that a beat was late in the last 30 seconds."""
        self._forget(self._loop.time())
        return self._lags[0][1] if self._lags else 0.0

    def _arm(self) -> None:
        self._due = self._loop.time() + BEAT_S
        self._timer = self._loop.call_at(self._due, self._beat)

    def _beat(self) -> None:
        now = self._loop.time()
        late = max(0.0, now - self._due)
        while self._lags and self._lags[-1][1] <= late:
            self._lags.pop()
        self._lags.append((now, late))
        self._forget(now)
        self._arm()
        self._beats += 1
        if self._beats % BEATS_PER_SECOND == 0:
            self._each_second(now)

    def _forget(self, now: float) -> None:
        while self._lags and self._lags[0][0] <= now - LAG_OVER_S:
            self._lags.popleft()
