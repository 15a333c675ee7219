"""Dispatch with a clock in hand: what a test of decisions says, and who is where afterwards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gateway.core.dispatch import Decision, Dispatch, Limits, Offer, Refuse, Start, Wait
from gateway.core.fleet import Advice, Fitness


class Desk:
    """Owns the time (seconds, from 100 on), the tickets, and what was decided about each."""

    def __init__(self, queue: int | None = None, max_wait_s: float = 30.0, **slots: int) -> None:
        """`slots`: the backends that are up, by name."""
        self.now = 100.0
        self.dispatch = Dispatch(Limits(queue, max_wait_s))
        self.running: dict[int, str] = {}  # ticket: backend
        self.refused: dict[int, Refuse] = {}
        self.started: list[int] = []  # in order
        self.keys: dict[int, str] = {}
        for name, count in slots.items():
            self.put(name, count)
            self.report(name)

    def put(self, name: str, slots: int, **how: Any) -> list[Decision]:
        return self._take(self.dispatch.put(self.now, name, slots=slots, **how))

    def report(
        self,
        name: str,
        fitness: Fitness = Fitness.UP,
        *,
        asked_at: float | None = None,
        **load: Any,
    ) -> list[Decision]:
        advice = Advice(self.now, **load) if load else None
        asked = self.now if asked_at is None else asked_at
        return self._take(self.dispatch.report(self.now, name, fitness, advice, asked))

    def offer(
        self, key: str = "ann", pool: str | None = None, ticket: int | None = None, **fields: Any
    ) -> int:
        """A new request; its ticket. `pool`: one-letter names of backends, all of them if not given."""
        ticket = len(self.keys) + 1 if ticket is None else ticket
        self.keys[ticket] = key
        names = frozenset(self.dispatch.backends if pool is None else pool)
        decisions = self.dispatch.offer(self.now, Offer(ticket, key, names, **fields))
        assert decisions[0].ticket == ticket, "the decision about the newcomer comes first"
        self._take(decisions)
        return ticket

    def offers(self, count: int, key: str = "ann", **fields: Any) -> list[int]:
        return [self.offer(key, **fields) for _ in range(count)]

    def end(self, ticket: int, *, after_s: float = 0.0, **how: Any) -> list[Decision]:
        """It was served (or `cancelled=True`) and gives its permits back."""
        self.now += after_s
        self.running.pop(ticket, None)
        how.setdefault("served", not how.get("cancelled", False))
        return self._take(self.dispatch.release(self.now, ticket, **how))

    def leave(self, ticket: int) -> list[Decision]:
        self.running.pop(ticket, None)
        return self._take(self.dispatch.cancel(self.now, ticket))

    def retry(self, ticket: int) -> list[Decision]:
        self.running.pop(ticket)
        return self._take(self.dispatch.retry(self.now, ticket))

    def wait(self, seconds: float) -> None:
        """Time passes as the dispatcher lets it: tick by tick, when dispatch asks for one."""
        until = self.now + seconds
        while (due := self.dispatch.wake_at(self.now)) is not None and due <= until:
            self.now = max(due, self.now + 0.001)
            self._take(self.dispatch.tick(self.now))
        self.now = until

    def serve_all(self, rounds: int, service_s: float = 1.0) -> list[str]:
        """The oldest request ends, again and again; the keys of who started, in order."""
        before = len(self.started)
        for _ in range(rounds):
            self.end(next(iter(self.running)), after_s=service_s)
        return [self.keys[ticket] for ticket in self.started[before:]]

    def waits(self, ticket: int) -> bool:
        return ticket not in self.running and ticket not in self.refused

    def reason(self, ticket: int) -> str | None:
        return self.refused[ticket].reason if ticket in self.refused else None

    def _take(self, decisions: Sequence[Decision]) -> list[Decision]:
        for one in decisions:
            if isinstance(one, Start):
                backend = self.dispatch.backends[one.backend]
                assert backend.in_flight + backend.settling_permits <= backend.slots
                self.running[one.ticket] = one.backend
                self.started.append(one.ticket)
            elif isinstance(one, Refuse):
                self.running.pop(one.ticket, None)
                self.refused[one.ticket] = one
            else:
                assert isinstance(one, Wait)
        return list(decisions)
