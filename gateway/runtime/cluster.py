"""A gateway among several: it tells the ledger what it uses and takes its share, in the background.

Law of this file: no request ever waits for Redis. What dispatch may lend is in memory; while Redis cannot be reached
it stays what it was, and whoever asks hears of it once.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from random import Random
from typing import Final
from uuid import uuid4

from gateway.core.lease import ASK_S, RENEW_S, Lease, Message, Use
from gateway.core.lease_dispatch import LeasedDispatch
from gateway.core.lease_limits import SharedLimits
from gateway.core.limits import Limits
from gateway.runtime.backends import Backends
from gateway.runtime.cluster_keys import SharedKeys
from gateway.runtime.cluster_ledger import Heard, Ledger, LedgerError, Line
from gateway.runtime.cluster_words import Words
from gateway.runtime.dispatcher import Dispatcher
from gateway.runtime.log import LineLog

TICK_S: Final = 0.02  # how soon it is seen that somebody is short of slots
CALM_TICKS: Final = 3  # between an answer and the next message while nobody is
AGAIN_S: Final = 0.25  # between two attempts while Redis cannot be reached, and up to twice that
TOLD_EVERY_S: Final = 5.0
LEAVE_S: Final = 0.5


class Cluster:
    """Owner of the lease, of the tasks that speak and listen for it, and of whether Redis answers."""

    def __init__(
        self,
        url: str,
        dispatcher: Dispatcher,
        dispatch: LeasedDispatch,
        *,
        backends: Backends,
        limits: Limits,
        log: LineLog,
        draining: Callable[[], bool],
        rng: Random,
    ) -> None:
        """Nothing is lent before `start`. Raises ValueError for a URL that is none."""
        self.lease = Lease(uuid4().hex[:12])
        self._ledger = Ledger(url)
        self.keys = SharedKeys(self._ledger)
        self._words = Words(self.lease.me, SharedLimits(limits), backends, dispatch.homes)
        self._dispatcher = dispatcher
        self._dispatch = dispatch
        self._line_log = log
        self._rng = rng
        self._draining = draining
        backends.may_weigh = self._may_weigh
        backends.used_elsewhere = self.lease.used_elsewhere
        self._log = logging.getLogger("slotgate.cluster")
        self._clock = asyncio.get_running_loop().time
        self._why = "not asked yet"  # why Redis is away; empty while it is not
        self._keys_why = ""  # the same of the keys alone
        self._line: Line | None = None
        self._answered = asyncio.Event()
        self._first = asyncio.Event()
        self._told: bool | None = None  # what the log last said of Redis
        self._told_at = 0.0
        self._tasks: list[asyncio.Task[None]] = []
        self._following: asyncio.Task[None] | None = None  # the keys

    @property
    def is_up(self) -> bool:
        return not (self._why or self._keys_why)

    async def start(self, first_s: float) -> None:
        """Begin; returns when the first message was answered or has failed, or after `first_s`."""
        for one in (self._speak, self._listen):
            self._tasks.append(asyncio.create_task(self._always(one), name="cluster"))
        with suppress(TimeoutError):
            async with asyncio.timeout(first_s):
                await self._first.wait()

    async def stop(self) -> None:
        """Give the slots back to the others, if Redis can be told in half a second."""
        tasks = self._tasks + ([self._following] if self._following else [])
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        with suppress(LedgerError, TimeoutError):  # then its lease ends by itself
            async with asyncio.timeout(LEAVE_S):
                await self._ledger.leave(self.lease.ask(self._clock(), {}))
        with suppress(LedgerError):
            await self._ledger.aclose()

    async def _always(self, turn: Callable[[], Awaitable[None]]) -> None:
        while True:
            try:
                await turn()
            except Exception:  # noqa: BLE001
                # Noticed by: the log, and redis_up, which is 0 while no turn succeeds.
                self._log.exception("a round with the other gateways failed")
                self._fail("a bug in the gateway")
                await asyncio.sleep(AGAIN_S)

    # ------------------------------------------------------------------ speaking

    async def _speak(self) -> None:
        """A message, and a while without one."""
        now = self._clock()
        if self.lease.tick(now, self._uses()):
            self._alone(f"no answer within {ASK_S:g} s")
        line = self._line
        if line is not None and (not line.unanswered or now >= line.sent_at + RENEW_S):
            await self._send(line)
        if self._first.is_set():
            self._tell()
        await self._rest()

    async def _send(self, line: Line) -> None:
        now = self._clock()
        message = self.lease.ask(now, self._uses())
        self._lend()  # before anybody hears what was let go
        try:
            async with asyncio.timeout(RENEW_S):
                await line.send(message, self._words.own(now))
        except (LedgerError, TimeoutError):
            self._line = None  # whoever listens there hears of it too

    async def _rest(self) -> None:
        """While all are content, a little after the answer; soon after it when somebody is short of slots."""
        if self._line is None or self._line.unanswered:
            with suppress(TimeoutError):
                async with asyncio.timeout(RENEW_S):
                    await self._answered.wait()
        self._answered.clear()
        for _ in range(CALM_TICKS):
            await asyncio.sleep(TICK_S)
            if self.lease.is_short(self._uses()):
                return

    # ------------------------------------------------------------------ listening

    async def _listen(self) -> None:
        """On one line, for as long as it holds."""
        try:
            async with self._ledger.line() as line:
                self.lease.hung_up()
                self._line = line
                self._answered.set()
                while True:
                    message, heard = await line.answer()
                    self._hear(message, heard)
        except LedgerError as error:
            self._fail(str(error))
        finally:
            self._line = None
        await asyncio.sleep(AGAIN_S * (1 + self._rng.random()))

    def _hear(self, message: Message, heard: Heard) -> None:
        now = self._clock()
        self.lease.heard(now, message, heard.reply, self._uses())
        self._lend()
        self._answered.set()
        if not self.lease.is_alone:
            self._why = ""
            self._words.hear(now, heard)
        if self.keys.is_behind(heard) and (self._following is None or self._following.done()):
            self._following = asyncio.create_task(self._follow(heard), name="cluster keys")
        elif self._following is None:
            self._first.set()

    async def _follow(self, heard: Heard) -> None:
        try:
            await self.keys.follow(heard)
            self._keys_why = ""
        except LedgerError as error:
            self._keys_why = str(error)
        self._first.set()
        if self._keys_why:
            await asyncio.sleep(AGAIN_S)

    # ------------------------------------------------------------------ alone

    def _fail(self, why: str) -> None:
        """The line is gone, or there is none."""
        self.lease.hung_up()
        self.lease.lost(self._clock(), self._uses())
        self._alone(why)
        self._first.set()

    def _alone(self, why: str) -> None:
        self._words.lost()
        self._lend()
        self._why = why

    def _lend(self) -> None:
        lease = self.lease
        self._dispatcher.apply(self._dispatch.lend(self._clock(), lease.shares, lease.until))

    def _may_weigh(self, name: str) -> bool:
        return self._words.may_weigh(name, self._clock())

    def _uses(self) -> dict[str, Use]:
        uses = self._dispatch.uses()
        if self._draining():
            uses = {n: Use(one.slots, one.used, one.waiting, False) for n, one in uses.items()}
        return uses

    def _tell(self) -> None:
        """One line when Redis goes, one when it is back; a Redis that comes and goes gets one in five seconds."""
        now = self._clock()
        if self.is_up is self._told or (
            self._told is not None and now < self._told_at + TOLD_EVERY_S
        ):
            return
        first, self._told, self._told_at = self._told is None, self.is_up, now
        if not self.is_up:
            note = (
                "each gateway goes on with its last share of the slots, and with limits of its own"
            )
            self._line_log.event(
                "warning", "redis", up=False, reason=self._why or self._keys_why, note=note
            )
        elif not first:
            self._line_log.event("info", "redis", up=True)
