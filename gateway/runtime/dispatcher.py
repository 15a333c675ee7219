"""Carries out what `core.dispatch` decides: wakes who starts, tells who is refused, keeps the one timer.

Owner of the pending futures. Who takes permits gives them back: `place` is an `async with`, held by the coroutine
that also awaits `send`, so every way a request can end passes the same exit.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from random import Random
from types import TracebackType
from typing import Self

import msgspec

from gateway.core.cost import Price
from gateway.core.dispatch import (
    Affinity,
    Decision,
    Dispatch,
    Offer,
    Reason,
    Refuse,
    Start,
    Used,
    Wait,
)
from gateway.core.errors import GatewayError

RETRY_AFTER_MAX_S = 48.0
MESSAGES: dict[Reason, str] = {
    "gateway_queue_full": "Server overloaded: all slots are busy and the queue is full. Please try again in {s}s.",
    "gateway_queue_timeout": (
        "Server overloaded: no slot became free within {wait:g}s. Please try again in {s}s."
    ),
    "no_backend": "Server overloaded: no backend of this model is up. Please try again in {s}s.",
    "too_many_choices": (
        "This request asks for more choices or prompts at once than any backend has slots; ask for fewer."
    ),
    "exhausted": "The backend could not be reached, and no other backend of this model is left to try.",
}


class Dispatcher:
    """The asyncio side of `core.dispatch`. All methods are called on the loop's own thread."""

    def __init__(self, dispatch: Dispatch, rng: Random) -> None:
        self.dispatch = dispatch
        self._rng = rng
        self.on_settling: Callable[[str], None] = lambda _backend: None  # `Backends` sets it
        self._loop = asyncio.get_running_loop()
        self.now = self._loop.time  # monotonic seconds
        self._pending: dict[int, asyncio.Future[Start | Refuse]] = {}
        self._timer: asyncio.Handle | None = None
        self._due = 0.0  # when the timer fires
        self._tickets = 0

    def ticket(self) -> int:
        self._tickets += 1
        return self._tickets

    def place(self, offer: Offer) -> Place:
        """`async with dispatcher.place(offer) as placement`: waits in line, raises GatewayError."""
        return Place(self, offer)

    def apply(self, decisions: list[Decision]) -> None:
        """Hand decisions to those who wait for them. Called with what every dispatch event returned."""
        for decision in decisions:
            if isinstance(decision, Wait):
                continue
            future = self._pending.pop(decision.ticket, None)
            if future is not None and not future.done():
                # done: cancelled at this very instant, and its exit gives the permits back
                future.set_result(decision)
        self._arm()

    def refusal(self, refused: Refuse) -> GatewayError:
        """The refusal in words, with a Retry-After that spreads: x 0.75..1.25, so clients do not return as one."""
        if refused.reason == "no_backend":
            again: float | None = 5.0
        elif refused.reason in ("too_many_choices", "exhausted"):
            again = None
        else:
            again = self.spread_s(refused.retry_after_s)
        text = MESSAGES[refused.reason].format(
            s=max(1, -int(-(again or 0) // 1)), wait=self.dispatch.limits.max_wait_s
        )
        key = "upstream_failed" if refused.reason == "exhausted" else refused.reason
        return GatewayError(key, text, retry_after_s=again)

    def spread_s(self, seconds: float) -> float:
        """The estimate within 1..48 s, times 0.75..1.25."""
        return min(max(seconds, 1.0), RETRY_AFTER_MAX_S) * self._rng.uniform(0.75, 1.25)

    def decided(self, offer: Offer, decisions: list[Decision]) -> Start | None:
        """The decision about this ticket, if the first of `decisions` is it; None: to be waited for. Raises its refusal."""
        own = decisions[0] if decisions else None
        if own is None or own.ticket != offer.ticket or isinstance(own, Wait):
            return None
        if len(decisions) > 1 or self.dispatch.queue.waiting:
            self.apply(decisions[1:])  # else nobody waits, and nothing is due because of it
        if isinstance(own, Refuse):
            raise self.refusal(own)
        return own

    async def waited(self, offer: Offer, decisions: list[Decision]) -> Start:
        """Wait for the decision about this ticket; `decisions` are about others. Raises its refusal."""
        future = self._pending[offer.ticket] = self._loop.create_future()
        self.apply(decisions)
        try:
            decision: Start | Refuse = await future
        finally:
            self._pending.pop(offer.ticket, None)
        if isinstance(decision, Refuse):
            raise self.refusal(decision)
        return decision

    def _arm(self) -> None:
        """Keep the one timer at the earliest time something is due."""
        now = self._loop.time()
        due = self.dispatch.wake_at(now)
        if due is None:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            return
        if self._timer is not None:
            if self._due <= due + 0.001:
                return
            self._timer.cancel()
        # what is due already comes back from uvloop as a handle without `when()`, so the time is kept here
        self._due = due
        self._timer = self._loop.call_at(due, self._on_time)

    def _on_time(self) -> None:
        self._timer = None
        self.apply(self.dispatch.tick(self._loop.time()))

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class Place(msgspec.Struct, eq=False):
    """One request's stay: in line, then on a backend. Its exit gives back whatever it holds."""

    _dispatcher: Dispatcher
    offer: Offer
    backend: str = ""
    queued_s: float = 0.0
    affinity: Affinity = "none"
    price: Price | None = None  # of the last choice
    prices: list[Price] = []  # of all that it was chosen from
    attempts: int = 0
    served: bool = False
    used: Used | None = None
    _cancelled: bool = True

    async def __aenter__(self) -> Self:
        dispatcher = self._dispatcher
        now = dispatcher.now()
        try:
            decisions = dispatcher.dispatch.offer(now, self.offer)
            start = dispatcher.decided(self.offer, decisions)
            self._take(now, start or await dispatcher.waited(self.offer, decisions))
        except BaseException:
            self._give_back()
            raise
        return self

    async def elsewhere(self, *, loading: bool = False) -> None:
        """The backend refused without doing work: wait for another one. Raises GatewayError if there is none.

        `loading`: until it has its model, wait for this one too.
        """
        dispatcher = self._dispatcher
        now = dispatcher.now()
        decisions = dispatcher.dispatch.retry(now, self.offer.ticket, loading=loading)
        self._cancelled = True
        start = dispatcher.decided(self.offer, decisions)
        self._take(now, start or await dispatcher.waited(self.offer, decisions))

    def may_go_elsewhere(self) -> bool:
        """Is there another backend of its pool, not tried yet, that may take it within its deadline?"""
        return self._dispatcher.dispatch.has_other(self._dispatcher.now(), self.offer.ticket)

    def may_wait(self) -> bool:
        """Is it still within the deadline of its queueing?"""
        dispatcher = self._dispatcher
        return dispatcher.now() < dispatcher.dispatch.held[self.offer.ticket].deadline

    def again_s(self) -> float:
        """When a client that is sent away by the backend itself may come back."""
        dispatcher = self._dispatcher
        return dispatcher.spread_s(dispatcher.dispatch.queue.drain_s(self.offer))

    def pressed(self) -> None:
        """The engine said that it is busy."""
        self._dispatcher.dispatch.pressed(self._dispatcher.now(), self.offer.ticket)

    def first_token(self) -> None:
        """Its prefill is over."""
        self._dispatcher.dispatch.first_token(self._dispatcher.now(), self.offer.ticket)

    def finished(self, *, served: bool, used: Used | None = None) -> None:
        """The engine is done with it, so its slot is free at once, not settling. `used`: as it reports."""
        self._cancelled = False
        self.served = served
        self.used = used

    async def __aexit__(
        self,
        _type: type[BaseException] | None,
        _value: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        self._give_back()

    def _take(self, since: float, start: Start) -> None:
        self.backend, self.affinity = start.backend, start.affinity
        self.price, self.prices = start.price, start.prices
        self.queued_s += self._dispatcher.now() - since
        self.attempts += 1

    def _give_back(self) -> None:
        dispatcher, ticket = self._dispatcher, self.offer.ticket
        now = dispatcher.now()
        if ticket in dispatcher.dispatch.held:
            decisions = dispatcher.dispatch.release(
                now, ticket, cancelled=self._cancelled, served=self.served, used=self.used
            )
            if self._cancelled:
                dispatcher.on_settling(self.backend)
        else:
            decisions = dispatcher.dispatch.cancel(now, ticket)
        if decisions or self._cancelled or dispatcher.dispatch.queue.waiting:  # else nothing is due
            dispatcher.apply(decisions)
