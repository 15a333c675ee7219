"""Who waits, for how many there is room, and who is refused instead.

Law of this file: a line holds no more than its backends have room for, and nobody waits for what cannot come.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from gateway.core.fairness import Line, Lines
from gateway.core.fleet import Backend
from gateway.core.tickets import Limits, Offer, Reason, Refuse, Waiting

MEASURED = 8  # requests of a pool before its expected wait may refuse anybody


class Queue:
    """The waiting requests of all pools. Owned by `core.dispatch`."""

    def __init__(self, limits: Limits, backends: dict[str, Backend]) -> None:
        self.lines = Lines()
        self.waiting: dict[int, Waiting] = {}  # by ticket
        self.pools: dict[frozenset[str], int] = {}  # waiting requests by pool
        self._limits = limits
        self._backends = backends

    def __len__(self) -> int:
        return len(self.waiting)

    def __iter__(self) -> Iterator[Waiting]:
        return iter(self.waiting.values())

    def enter(
        self,
        now: float,
        offer: Offer,
        hopeful: list[Backend],
        deadline: float,
        *,
        first: bool = False,
    ) -> Waiting:
        """Take a place in line; the head of its own line with `first`."""
        waiting = self.newcomer(now, offer, deadline)
        waiting.pool_slots = sum(backend.slots for backend in hopeful)
        waiting.expected_s = hopeful[0].service_s.value
        self.lines.add(waiting.line, waiting, first=first)
        self.waiting[offer.ticket] = waiting
        self.pools[offer.pool] = self.pools.get(offer.pool, 0) + 1
        return waiting

    def newcomer(self, now: float, offer: Offer, deadline: float) -> Waiting:
        """A request as it would stand in line, without a place there yet."""
        line = self.lines.line(offer.key, offer.weight, batch=offer.batch)
        return Waiting(offer, line, now, deadline)

    def leave(self, waiting: Waiting) -> None:
        """Give the place back, and whatever was reserved for it."""
        offer = waiting.offer
        self.lines.remove(waiting)
        del self.waiting[offer.ticket]
        left = self.pools[offer.pool] - 1
        if left:
            self.pools[offer.pool] = left
        else:
            del self.pools[offer.pool]
        for name in offer.pool if waiting.reserves else ():
            backend = self._backends.get(name)
            if backend is not None and backend.reserved_by == offer.ticket:
                backend.reserved_by = None

    def depth(self, pool: frozenset[str]) -> int:
        """Requests that wait for any backend of this pool."""
        if len(self.pools) == 1 and pool in self.pools:
            return self.pools[pool]
        return sum(count for other, count in self.pools.items() if other & pool)

    def limit(self, pool: frozenset[str]) -> int:
        """Most requests that may wait for the backends of this pool."""
        if self._limits.queue is not None:
            return self._limits.queue
        return sum(b.slots for b in self._known(pool) if b.is_hopeful)

    def overflow(self, now: float, waiting: Waiting) -> Refuse | None:
        """Does the line have room for this newcomer? None, or whom to refuse: it, or who gives way."""
        offer = waiting.offer
        loser: Waiting | None = None
        if self.is_full(offer, 1):
            loser = self.gives_way(offer, now) or waiting
        elif self._expected_wait(offer) > self._limits.max_wait_s:
            loser = waiting
        if loser is None:
            return None
        again = self.drain_s(offer)
        self.leave(loser)
        return Refuse(loser.offer.ticket, "gateway_queue_full", again)

    def is_full(self, offer: Offer, already_counted: int) -> bool:
        return self.depth(offer.pool) - already_counted >= self.limit(offer.pool)

    def full_for(self, now: float, key: str, pools: Iterable[frozenset[str]]) -> Refuse | None:
        """A refusal that needs no body: every pool that the key could use is full, and nobody would give way."""
        refusal: Refuse | None = None
        for pool in pools:
            offer = Offer(-1, key, pool)
            if not self.is_full(offer, 0) or self.gives_way(offer, now) is not None:
                return None
            known = self._known(pool)
            if not any(b.is_hopeful for b in known) or any(b.free_for(-1) for b in known):
                return None
            refusal = Refuse(-1, "gateway_queue_full", self.drain_s(offer))
        return refusal

    def gives_way(self, offer: Offer, now: float) -> Waiting | None:
        """The newest waiting request of the key with the most waiting, for a key that has none waiting.

        Only if it has waited for less than half of max_wait_s, and competes for the same backends.
        """
        mine = self.lines.line(offer.key, offer.weight, batch=offer.batch)
        if any(one.offer.ticket != offer.ticket for one in mine.waiting):
            return None
        rivals = [
            self._rivals(line, offer) for line in self.lines.lines_waiting() if line is not mine
        ]
        crowd = max(rivals, key=len, default=[])
        if len(crowd) < 2:
            return None
        newest = crowd[-1]
        return newest if now - newest.arrival < self._limits.max_wait_s / 2 else None

    def drain_s(self, offer: Offer) -> float:
        """Seconds in which the line of this pool drains at its learned pace."""
        pool = [b for b in self._known(offer.pool) if b.is_hopeful]
        rate = sum(b.slots / b.service_s.value for b in pool)
        return (self.depth(offer.pool) + offer.permits) / rate if rate else 0.0

    def hopeless(self) -> list[Refuse]:
        """Waiting requests whose pool has no living backend left are told at once."""
        refused: list[Refuse] = []
        for waiting in list(self):
            if not any(b.is_hopeful for b in self._known(waiting.offer.pool - waiting.tried)):
                self.leave(waiting)
                reason: Reason = "exhausted" if waiting.tried else "no_backend"
                refused.append(Refuse(waiting.offer.ticket, reason, 0.0))
        return refused

    def late(self, now: float) -> list[Refuse]:
        """Waiting requests whose deadline has come."""
        refused: list[Refuse] = []
        for waiting in [one for one in self if one.deadline <= now]:
            self.leave(waiting)
            again = self.drain_s(waiting.offer)
            refused.append(Refuse(waiting.offer.ticket, "gateway_queue_timeout", again))
        return refused

    def _expected_wait(self, offer: Offer) -> float:
        """Seconds until this newcomer would start, or 0 while fewer than eight requests were measured.

        Ahead of it in a fair order: at most as many of each key as it has itself.
        """
        pool = [b for b in self._known(offer.pool) if b.takes_work]
        if sum(b.service_s.samples for b in pool) < MEASURED:
            return 0.0
        rivals = {line.key: self._rivals(line, offer) for line in self.lines.lines_waiting()}
        mine = len(rivals.get(offer.key, ())) or 1
        ahead = sum(min(len(waiting), mine) for waiting in rivals.values())
        rate = sum(b.lendable / b.service_s.value for b in pool)
        return ahead / rate if rate else 0.0

    def _rivals(self, line: Line, offer: Offer) -> list[Waiting]:
        """Those in this line that wait for a backend which the offer could use too."""
        if len(self.pools) == 1 and offer.pool in self.pools:
            return line.waiting
        return [one for one in line.waiting if one.offer.pool & offer.pool]

    def _known(self, pool: Iterable[str]) -> list[Backend]:
        return [b for n in pool if (b := self._backends.get(n)) is not None]
