"""Dispatch in one gateway of several: it lends its share of each backend's slots, for as long as its lease lasts.

Law of this file: after the end of the lease nothing new is lent, by whichever event comes first. A process that was
stopped and goes on finds its sockets full of events before any timer of its own fires.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gateway.core.dispatch import Decision, Dispatch, Limits, Offer
from gateway.core.fleet import Advice, Fitness
from gateway.core.lease import Use
from gateway.core.lease_homes import Homes
from gateway.core.tickets import Used

MANY = 64  # waiting requests; beyond, they are not looked at one by one


class LeasedDispatch(Dispatch):
    """The same events; before the first `lend` it lends nothing."""

    _until = 0.0

    def __init__(self, limits: Limits) -> None:
        super().__init__(limits)
        self.homes = Homes()

    def lend(self, now: float, shares: Mapping[str, int], until: float) -> list[Decision]:
        """What it may lend of each backend until then. What is in flight above a smaller share goes on."""
        self._until = until
        for name, backend in self.backends.items():
            backend.share = shares.get(name, 0)
        return self.tick(now)  # which looks whether the lease has ended already

    def uses(self) -> dict[str, Use]:
        """How much of each backend's slots is in use, and how many more are waited for."""
        waiting, starved = self._waiting(), self._starved()
        return {
            name: Use(
                slots=backend.slots,
                used=backend.in_flight + backend.settling_permits,
                waiting=waiting.get(name, 0) if backend.takes_work else 0,
                spare=backend.takes_work,
                starved=name in starved,
            )
            for name, backend in self.backends.items()
        }

    def offer(self, now: float, offer: Offer) -> list[Decision]:
        self._look(now)
        self._take_home(offer)
        return super().offer(now, offer)

    def cancel(self, now: float, ticket: int) -> list[Decision]:
        self._look(now)
        return super().cancel(now, ticket)

    def release(self, now: float, ticket: int, **how: Any) -> list[Decision]:
        self._look(now)
        self._note_home(ticket, how.get("used"))
        return super().release(now, ticket, **how)

    def forget_cache(self, name: str) -> None:
        self.homes.forget(name)
        super().forget_cache(name)

    def remove(self, name: str) -> list[Decision]:
        self.homes.forget(name)
        return super().remove(name)

    def retry(self, now: float, ticket: int, **how: Any) -> list[Decision]:
        self._look(now)
        return super().retry(now, ticket, **how)

    def put(self, now: float, name: str, **size: Any) -> list[Decision]:
        self._look(now)
        is_new = name not in self.backends
        decisions = super().put(now, name, **size)  # a new one is down, so nothing starts there
        if is_new:
            self.backends[name].share = 0
        return decisions

    def report(
        self, now: float, name: str, fitness: Fitness, advice: Advice | None, asked_at: float
    ) -> list[Decision]:
        self._look(now)
        return super().report(now, name, fitness, advice, asked_at)

    def tick(self, now: float) -> list[Decision]:
        self._look(now)
        return super().tick(now)

    def _look(self, now: float) -> None:
        if now >= self._until:
            for backend in self.backends.values():
                backend.share = 0

    def _note_home(self, ticket: int, used: Used | None) -> None:
        """An engine that says what was cached has the whole prompt now. Where there is no choice, nobody needs to know."""
        held = self.held.get(ticket)
        if held is None or used is None or used.cached_tokens is None:
            return
        if held.offer.chain.hashes and len(held.offer.pool) > 1:
            self.homes.note(held.backend.name, held.offer.chain)

    def _take_home(self, offer: Offer) -> None:
        """Believe what another gateway said of this prompt, as if it had run there for this one."""
        home = self.homes.of(offer.chain) if offer.chain.hashes else None
        if home is None:
            return
        name, chain = home
        if name in offer.pool and self.index.match(name, chain, busy_too=True) < chain.size:
            self.index.start(name, -offer.ticket, chain)
            self.index.end(name, -offer.ticket)

    def _starved(self) -> set[str]:
        """One backend for each pool that is waited for and of which this gateway may lend nothing."""
        found: set[str] = set()
        for pool in self.queue.pools:
            fit = sorted(n for n in pool if n in self.backends and self.backends[n].takes_work)
            if fit and not any(self.backends[name].share for name in fit):
                found.add(fit[0])
        return found

    def _waiting(self) -> dict[str, int]:
        """Permits that are waited for on each backend: a request counts on all that it could use."""
        if (
            len(self.queue.waiting) > MANY
        ):  # then it is more than anybody will get, whoever wants how many
            wanted = list(self.queue.pools.items())
        else:
            wanted = [
                (one.offer.pool - one.tried, one.offer.permits)
                for one in self.queue.waiting.values()
            ]
        waiting: dict[str, int] = {}
        for pool, permits in wanted:
            for name in pool:
                waiting[name] = waiting.get(name, 0) + permits
        return waiting
