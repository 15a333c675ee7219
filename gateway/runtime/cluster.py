"""A gateway among several: it tells the ledger what it uses and takes its share, in the background.

Law of this file: no request ever waits for Redis. What dispatch may lend is in memory; while Redis cannot be reached
it stays what it was, and whoever asks hears of it once.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from random import Random
from typing import Final
from uuid import uuid4

from gateway.core.lease import Lease, Use
from gateway.core.lease_dispatch import LeasedDispatch
from gateway.core.lease_limits import SharedLimits
from gateway.core.limits import Limits
from gateway.runtime.backends import Backends
from gateway.runtime.cluster_keys import SharedKeys
from gateway.runtime.cluster_ledger import Heard, Ledger, LedgerError
from gateway.runtime.cluster_words import Words
from gateway.runtime.dispatcher import Dispatcher
from gateway.runtime.log import LineLog

TICK_S: Final = 0.02  # how soon it is seen that somebody is short of slots
CALM_TICKS: Final = 3  # between two messages while nobody is
AGAIN_S: Final = 0.25  # between two attempts while Redis cannot be reached, and up to twice that
TOLD_EVERY_S: Final = 5.0
LEAVE_S: Final = 0.5


class Cluster:
    """Owner of the lease, of the task that keeps it, and of whether Redis answers."""

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
        self._words = Words(self.lease.me, SharedLimits(limits), backends, self.keys)
        self._dispatcher = dispatcher
        self._dispatch = dispatch
        self._line_log = log
        self._rng = rng
        self._draining = draining
        backends.may_weigh = self._may_weigh
        backends.used_elsewhere = self.lease.used_elsewhere
        self._log = logging.getLogger("slotgate.cluster")
        self._clock = asyncio.get_running_loop().time
        self.is_up = False
        self._why = ""
        self._first = asyncio.Event()
        self._told: bool | None = None  # what the log last said of Redis
        self._told_at = 0.0
        self._task: asyncio.Task[None] | None = None

    async def start(self, first_s: float) -> None:
        """Begin; returns when the first message was answered or has failed, or after `first_s`."""
        self._task = asyncio.create_task(self._keep(), name="cluster")
        with suppress(TimeoutError):
            async with asyncio.timeout(first_s):
                await self._first.wait()

    async def stop(self) -> None:
        """Give the slots back to the others, if Redis can be told in half a second."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        with suppress(LedgerError, TimeoutError):  # then its lease ends by itself
            async with asyncio.timeout(LEAVE_S):
                await self._ledger.leave(self.lease.ask(self._clock(), {}))
        with suppress(LedgerError):
            await self._ledger.aclose()

    async def _keep(self) -> None:
        while True:
            try:
                await self._round()
                self._tell()
            except Exception:  # noqa: BLE001
                # Noticed by: the log, and redis_up, which is 0 while no round succeeds.
                self._log.exception("a round with the other gateways failed")
                self._fail(self._clock(), "a bug in the gateway")
            self._first.set()
            await self._rest()

    async def _round(self) -> None:
        since = self._clock()
        try:
            if not self.is_up:
                await self._ledger.connect()
            since = self._clock()
            message = self.lease.ask(since, self._uses())
            self._lend()  # before anybody hears what was let go
            heard = await self._ledger.tell(message, self._words.own(since))
        except LedgerError as error:
            self._fail(since, str(error))
            return
        self.lease.heard(self._clock(), message, heard.reply, self._uses())
        self._lend()
        self.is_up, self._why = True, ""
        await self._listen(heard)

    async def _listen(self, heard: Heard) -> None:
        try:
            await self._words.hear(self._clock(), heard)
        except LedgerError as error:
            self._why = str(error)
            self.is_up = False

    def _fail(self, since: float, why: str) -> None:
        """An attempt failed: by Redis, or because this process stood still meanwhile."""
        if not self.lease.lost(self._clock(), since, self._uses()):
            return  # what was lent has ended by itself; the next attempt says more
        self._words.lost()
        self._lend()
        self.is_up, self._why = False, why

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

    async def _rest(self) -> None:
        if self.lease.is_alone:
            await asyncio.sleep(AGAIN_S * (1 + self._rng.random()))
            return
        for _ in range(CALM_TICKS):
            await asyncio.sleep(TICK_S)
            if self.lease.is_short(self._uses()):
                return

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
            self._line_log.event("warning", "redis", up=False, reason=self._why, note=note)
        elif not first:
            self._line_log.event("info", "redis", up=True)
