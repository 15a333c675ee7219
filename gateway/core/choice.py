"""Which waiting request starts next, and where.

Law of this file (law 2): a free slot and a waiting request that could use it do not coexist, unless that request is
better off waiting for its warm backend; and then for half a second at most.

A slot counts for that half second if there is one beyond doubt. Where the number is only assumed (or probed upwards, as a
vLLM's is), a backend at work may have none left: requests of a warm backend that were sent there waited in the engine's own
queue with a cold prompt. In virtual time, engines of 4 slots taken for 16: mean TTFT of scenario C 2.98 s, with this 2.29 s.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet

from gateway.core import cost
from gateway.core.cost import Price
from gateway.core.fleet import Backend
from gateway.core.openings import Openings
from gateway.core.prefix import PrefixIndex
from gateway.core.queue import Queue
from gateway.core.tickets import Waiting

PATIENCE_S = 0.5  # longest that a free slot waits for a request that prefers another backend
GIVE_UP_S = 0.9 * PATIENCE_S  # a timer may be late
BATCH_EVERY = 8


class Choice:
    """Looks at who waits and what is free. Owned by `core.dispatch`, as is all that it looks at."""

    def __init__(self, backends: dict[str, Backend], index: PrefixIndex, queue: Queue) -> None:
        self._backends = backends
        self._index = index
        self._queue = queue
        self._openings = Openings(backends, queue)

    def next(self, now: float) -> tuple[Waiting, Price] | None:
        """Who starts now, and at what price; None: nobody can, or is better off waiting."""
        if not self._queue.waiting:
            self._end_idle_but(frozenset(), now)
            return None
        self._end_vain_reservations()
        free = {b.name for b in self._backends.values() if b.free > 0}
        self._end_idle_but(free, now)
        return self._choose(now, free) if free else None

    def alone(self, now: float, newcomer: Waiting) -> Price | None:
        """The cheapest backend for a request while nobody is in line, if that has the slots for it now."""
        self._openings.look()
        prices = newcomer.prices = self._prices(now, newcomer, {})
        if not prices:
            return None
        best = cost.cheapest(prices, newcomer.offer.conversation)
        return best if best.wait_s == 0 else None  # whoever has the slots makes nobody wait

    def patience_ends(self) -> list[float]:
        """When idle slots that are wanted go to whoever can use them."""
        since = [b.idle_wanted_since for b in self._backends.values()]
        return [at + GIVE_UP_S for at in since if at is not None]

    def idle_spells(self) -> list[float]:
        """Those that have ended and were not told yet, in seconds."""
        spells: list[float] = []
        for backend in self._backends.values():
            spells += backend.idle_spells
            backend.idle_spells.clear()
        return spells

    def batch_waits_for(self, name: str) -> bool:
        return any(
            line.batch and any(name in one.offer.pool for one in line.waiting)
            for line in self._queue.lines.lines_waiting()
        )

    def _choose(self, now: float, free: set[str]) -> tuple[Waiting, Price] | None:
        """The first waiting request, in fairness order, whose own cheapest backend has a slot for it.

        1 it cannot start on what is free: the next one; if it is first and needs several slots, or what runs there
          has to end before it (`core.openings`), it reserves
        2 its cheapest backend has the slots: start there
        3 it was overtaken enough: start on what there is
        4 it is better off waiting for its warm backend: the next one
        Nobody started, and a slot has been idle for half a second: to whom it costs least compared with waiting.
        """
        self._openings.look()
        due = {n for n in free if self._backends[n].since_batch >= BATCH_EVERY - 1}
        wanted: set[str] = set()
        ahead: set[str] = set()
        promised = self._promised()
        before: dict[str, int] = {}  # who waits for each backend and is ahead
        stays: list[tuple[Waiting, set[str]]] = []
        for waiting in self._queue.lines.order(batch_first=bool(due)):
            ready = self._ready(now, waiting, free, due)
            if ready:
                price = self._accept(now, waiting, ready, promised, before)
                if price is not None:
                    return waiting, price
                wanted |= {name for name in ready if self._backends[name].surely_idle}
                stays.append((waiting, ready))
            elif not ahead & waiting.offer.pool:
                self._reserve(now, waiting, free, promised)
            ahead |= waiting.offer.pool
            if waiting.best is not None:
                before[waiting.best] = before.get(waiting.best, 0) + 1
        spent = {name for name in free if self._patience_over(now, name)}
        if spent & wanted:
            return self._least_regret(stays, spent)
        self._watch_idle(now, free, wanted)
        return None

    def _end_idle_but(self, free: AbstractSet[str], now: float) -> None:
        """A slot that was lost to a resize or a failure is not idle any more: its timer would be due for ever."""
        for backend in self._backends.values():
            if backend.idle_wanted_since is not None and backend.name not in free:
                backend.end_idle(now)

    def _ready(self, now: float, waiting: Waiting, free: set[str], due: set[str]) -> set[str]:
        """Backends that have all the slots it needs, now."""
        offer = waiting.offer
        usable = free & (offer.pool - waiting.tried)
        if due and waiting.line.batch:
            usable &= due
        free_for, backends = self._openings.free_for, self._backends
        return {name for name in usable if free_for(now, waiting, backends[name]) >= offer.permits}

    def _accept(
        self,
        now: float,
        waiting: Waiting,
        ready: set[str],
        promised: dict[str, int],
        before: dict[str, int],
    ) -> Price | None:
        prices = waiting.prices = self._prices(now, waiting, promised, before)
        best = cost.cheapest(prices, waiting.offer.conversation)
        self._prefer(waiting, best.backend.name, promised)
        if best.backend.name in ready:
            return best
        if waiting.overdue:
            near = [one for one in prices if one.backend.name in ready]
            return cost.cheapest(near, waiting.offer.conversation)
        return None

    @staticmethod
    def _least_regret(
        stays: list[tuple[Waiting, set[str]]], spent: set[str]
    ) -> tuple[Waiting, Price]:
        """Slots whose patience is over: who loses least by starting there instead of waiting; in order among equals."""
        offers = [
            (one.total_s - min(other.total_s for other in waiting.prices), place, waiting, one)
            for place, (waiting, ready) in enumerate(stays)
            for one in waiting.prices
            if one.backend.name in ready & spent
        ]
        _, _, waiting, price = min(offers, key=lambda item: item[:2])
        return waiting, price

    def _watch_idle(self, now: float, free: set[str], wanted: set[str]) -> None:
        """Since when has a slot been free that somebody who waits could use?"""
        for name in free:
            backend = self._backends[name]
            if name not in wanted:
                backend.end_idle(now)
            elif backend.idle_wanted_since is None:
                backend.idle_wanted_since = now

    def _prices(
        self,
        now: float,
        waiting: Waiting,
        promised: dict[str, int],
        before: dict[str, int] | None = None,
    ) -> list[Price]:
        """What each backend that could take it would cost."""
        offer, out = waiting.offer, []
        permits, free_for, match = offer.permits, self._openings.free_for, self._index.match
        for name in offer.pool - waiting.tried if waiting.tried else offer.pool:
            backend = self._backends.get(name)
            if backend is None or backend.slots < permits or not backend.takes_work:
                continue
            crowd = promised.get(name, 0) - (waiting.best == name)
            free = free_for(now, waiting, backend)
            out.append(
                cost.price(
                    backend,
                    now,
                    offer.prompt_bytes,
                    match(name, offer.chain, busy_too=free < permits),
                    permits=permits,
                    promised=crowd,
                    ahead=crowd if before is None else before.get(name, 0),
                    free=free,
                    must_load=backend.must_load(offer.ids.get(name, offer.model)),
                )
            )
        return out

    def _promised(self) -> dict[str, int]:
        """Q_b: how many waiting requests have this backend as their own cheapest."""
        promised: dict[str, int] = {}
        for waiting in self._queue:
            if waiting.best is not None:
                promised[waiting.best] = promised.get(waiting.best, 0) + 1
        return promised

    @staticmethod
    def _prefer(waiting: Waiting, best: str, promised: dict[str, int]) -> None:
        if waiting.best != best:
            if waiting.best is not None:
                promised[waiting.best] -= 1
            promised[best] = promised.get(best, 0) + 1
            waiting.best = best

    def _reserve(
        self, now: float, waiting: Waiting, free: set[str], promised: dict[str, int]
    ) -> None:
        """First in order, but what is free is not enough: keep what gets free on its cheapest backend."""
        offer = waiting.offer
        among = set(offer.pool)
        if offer.permits == 1:
            among = self._openings.in_the_way(now, waiting, free & (offer.pool - waiting.tried))
        if not among or any(
            backend.reserved_by == offer.ticket for backend in self._backends.values()
        ):
            return
        prices = [
            one
            for one in self._prices(now, waiting, promised)
            if one.backend.name in among
            and one.backend.reserved_by is None
            and one.backend.lendable >= offer.permits
        ]
        if prices:
            cheapest = cost.cheapest(prices, offer.conversation)
            cheapest.backend.reserved_by = offer.ticket
            waiting.reserves = True

    def _end_vain_reservations(self) -> None:
        """A backend that is down or on trial cannot give so many: kept slots would be lost to all, its ramp too."""
        for backend in self._backends.values():
            if backend.reserved_by is None:
                continue
            keeper = self._queue.waiting.get(backend.reserved_by)
            if keeper is None or not backend.takes_work or backend.lendable < keeper.offer.permits:
                backend.reserved_by = None

    def could_start(self, now: float, waiting: Waiting, name: str) -> bool:
        """Is there a slot that this request could use now?"""
        self._openings.look()
        backend = self._backends[name]
        return self._openings.free_for(now, waiting, backend) >= waiting.offer.permits

    def _patience_over(self, now: float, name: str) -> bool:
        since = self._backends[name].idle_wanted_since
        return since is not None and now >= since + GIVE_UP_S
