"""What a connection waits for: time, and room to write.

Law of this file: there is one timer per connection, whatever the number of requests and deadlines. It is
left to ring early and look, instead of being moved with every request; only an earlier deadline moves it.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Final

from gateway.api import tcp

_TICK_S: Final = 10.0  # the longest time between two looks
_VANISHED_S: Final = 20.0  # how long a peer's TCP may stay silent, from look to look
_LOOKS: Final = 8  # at a stalled client, in the time it has: by so much more it may get
_EARLY_S: Final = 0.002  # timers ring that much early: uvloop's clock counts whole milliseconds


class Watch:
    """The deadlines of one connection. Owns its timer.

    `on_deadline` is called once per `within`; `on_lost` when the client has not taken a byte for the time
    given to `stalled`, or has vanished from the network (noticed within 50 s).
    """

    __slots__ = (
        "_deadline",
        "_loop",
        "_moved_at",
        "_on_deadline",
        "_on_lost",
        "_silent_since",
        "_stall_deadline",
        "_stall_s",
        "_stopped",
        "_taken",
        "_timer",
        "_timer_at",
        "_transport",
    )

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        transport: asyncio.Transport,
        on_deadline: Callable[[], None],
        on_lost: Callable[[], None],
    ) -> None:
        self._loop = loop
        self._transport = transport
        self._on_deadline = on_deadline
        self._on_lost = on_lost
        self._deadline = math.inf
        self._stall_deadline = math.inf  # when to look at it again
        self._stall_s = 0.0
        self._moved_at = 0.0  # when it was last seen to have taken something
        self._taken = 0  # bytes, at the last look at a stall
        self._silent_since = math.inf
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = math.inf
        self._stopped = False

    def within(self, seconds: float) -> None:
        """Replace the deadline; 0 is none."""
        now = self._loop.time()
        when = now + seconds if seconds else math.inf
        self._deadline = when
        if self._timer is None or when < self._timer_at:
            self._ring_at(min(when, now + _TICK_S))

    def nothing(self) -> None:
        """The client owes us nothing now."""
        self._deadline = math.inf

    def stalled(self, seconds: float) -> None:
        """We wait for the client to take bytes; it has this long for each of them. 0 is no limit."""
        self._stall_s = seconds
        self._taken = tcp.bytes_taken(self._transport)
        self._moved_at = self._loop.time()
        when = self._moved_at + seconds / _LOOKS if seconds else math.inf
        self._stall_deadline = when
        if when < self._timer_at:
            self._ring_at(when)

    def flowing(self) -> None:
        """We wait for that no longer."""
        self._stall_deadline = math.inf

    def stop(self) -> None:
        """Look no more."""
        self._stopped = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        del self._on_deadline, self._on_lost  # reference cycles

    def _ring_at(self, when: float) -> None:
        if self._stopped:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at = when
        self._timer = self._loop.call_at(when, self._look)

    def _look(self) -> None:
        now = self._loop.time() + _EARLY_S
        self._timer = None
        if self._has_stalled(now) or self._has_vanished(now):
            self._on_lost()
        elif now >= self._deadline:
            self._deadline = math.inf
            self._on_deadline()
        if self._timer is None:
            self._ring_at(min(self._deadline, self._stall_deadline, now + _TICK_S))

    def _has_stalled(self, now: float) -> bool:
        if now < self._stall_deadline:
            return False
        before, self._taken = self._taken, tcp.bytes_taken(self._transport)
        if self._taken > before:
            self._moved_at = now
        self._stall_deadline = now + self._stall_s / _LOOKS
        return now - self._moved_at >= self._stall_s

    def _has_vanished(self, now: float) -> bool:
        if not tcp.is_unanswered(self._transport):
            self._silent_since = math.inf
            return False
        self._silent_since = min(self._silent_since, now)
        return now - self._silent_since >= _VANISHED_S


class Outflow:
    """Room to write. Owns the futures of those who wait for it."""

    __slots__ = ("_loop", "_waiters", "paused")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waiters: list[asyncio.Future[None]] = []
        self.paused = False

    def pause(self) -> None:
        self.paused = True

    def resume(self) -> None:
        """There is room, or nobody is there any more who could make some."""
        self.paused = False
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def room(self) -> None:
        while self.paused:
            waiter = self._loop.create_future()
            self._waiters.append(waiter)
            await waiter
