"""Admission and choice of backend as one synchronous step: events in, decisions out.

Laws held here (spec.md section 6), each by the part that this file puts together:
  1  permits                   `core.permits`
  2  no idle slot              `core.choice`
  8  fairness between keys     `core.fairness`
Nothing here waits, logs, or looks at a clock: every event brings its `now` (monotonic seconds).
"""

from __future__ import annotations

from collections.abc import Iterable

from gateway.core.choice import PATIENCE_S, Choice
from gateway.core.fleet import Advice, Backend, Fitness, Habits
from gateway.core.permits import Permits, others_for
from gateway.core.prefix import PrefixIndex
from gateway.core.queue import Queue
from gateway.core.residence import Memory
from gateway.core.tickets import (
    Affinity,
    Decision,
    Held,
    Limits,
    Offer,
    Reason,
    Refuse,
    Start,
    Used,
    Wait,
    Waiting,
)

__all__ = [
    "PATIENCE_S",
    "Affinity",
    "Decision",
    "Dispatch",
    "Held",
    "Limits",
    "Offer",
    "Reason",
    "Refuse",
    "Start",
    "Used",
    "Wait",
    "Waiting",
]

TICK_S = 0.25


class Dispatch:
    """The state machine. One owner of all permits and waiting places, for all models."""

    def __init__(self, limits: Limits | None = None, habits: Habits | None = None) -> None:
        self.limits = limits or Limits()  # one object for all parts: a reload changes its fields
        self.habits = habits or Habits()
        self.backends: dict[str, Backend] = {}
        self.index = PrefixIndex()
        self.queue = Queue(self.limits, self.backends)
        self.permits = Permits(self.index, self.queue.lines)
        self.held = self.permits.held  # requests that have their permits, by ticket
        self._choice = Choice(self.backends, self.index, self.queue)

    # ------------------------------------------------------------------ events about requests

    def offer(self, now: float, offer: Offer) -> list[Decision]:
        """A new request. The decision about it comes first; others may follow.

        1 nobody of its pool is up: refuse      2 needs more permits than any backend has: refuse
        3 a slot is free: start                 4 the line has room, and it is short enough: wait
        5 a flooding key gives way: wait        6 refuse

        With an empty line, 3 is looked at first: that is the usual case, and there is nobody else to think of.
        """
        if not self.queue.waiting and (start := self._start_alone(now, offer)) is not None:
            return [start]
        pool = [self.backends[name] for name in offer.pool if name in self.backends]
        hopeful = [backend for backend in pool if backend.is_hopeful]
        if not hopeful:
            return [Refuse(offer.ticket, "no_backend", 0.0)]
        if offer.permits > max(backend.slots for backend in hopeful):
            return [Refuse(offer.ticket, "too_many_choices", 0.0)]
        return self._line_up(now, offer, hopeful)

    def cancel(self, now: float, ticket: int) -> list[Decision]:
        """The client left while waiting, or at the instant of its start."""
        waiting = self.queue.waiting.get(ticket)
        if waiting is None:
            return self.release(now, ticket, cancelled=True)
        self.queue.leave(waiting)
        return self._fill(now)

    def first_token(self, now: float, ticket: int) -> None:
        """Its prefill is over: it is nobody's backlog any more, and it teaches the prefill rate."""
        self.permits.first_token(now, ticket)

    def release(
        self,
        now: float,
        ticket: int,
        *,
        cancelled: bool = False,
        served: bool = False,
        used: Used | None = None,
    ) -> list[Decision]:
        """The request ended and gives its permits back. Repeating it does nothing.

        `cancelled`: we broke the connection, so a llama-server or Ollama slot is still settling.
        `served`: a whole answer, whose length teaches the service time; `used`: what the engine reports.
        """
        held = self.permits.take_back(now, ticket, cancelled=cancelled)
        if held is None:
            return []
        if served:
            held.backend.breaker.serve(held.backend.slots)
            self.permits.learn(now, held, used)
        return self._fill(now)

    def retry(self, now: float, ticket: int, *, loading: bool = False) -> list[Decision]:
        """The backend refused without doing work: back to the head of its line, for another backend.

        `loading`: it only has to load its model first, so this very backend is waited for too. Refuse(exhausted)
        when no backend of its pool may be tried. Raises KeyError for an unknown ticket.
        """
        held = self.held[ticket]
        self.permits.take_back(now, ticket, cancelled=False)
        if loading:
            held.tried -= {held.backend.name}
        hopeful = others_for(held, self.backends)
        if not hopeful or now >= held.deadline:
            return [Refuse(ticket, "exhausted", 0.0), *self._fill(now)]
        waiting = self.queue.enter(now, held.offer, hopeful, held.deadline, first=True)
        waiting.tried = held.tried
        decisions = self._fill(now)
        if ticket in self.queue.waiting:
            return [Wait(ticket), *decisions]
        return sorted(decisions, key=lambda one: one.ticket != ticket)

    def pressed(self, now: float, ticket: int) -> None:
        """Its backend said that it is busy: it gets less from us for a while (law 7)."""
        held = self.held[ticket]
        held.backend.pressure.press(now, held.backend.in_flight - held.offer.permits)

    # ------------------------------------------------------------------ events about backends

    def put(
        self,
        now: float,
        name: str,
        *,
        slots: int,
        draining: bool = False,
        settles: bool = False,
        pooled: bool = False,
        kv_tokens: int | None = None,
        kv_limit: int | None = None,
        assumed: bool = False,
    ) -> list[Decision]:
        """A backend is new, resized, or drained. In-flight work above a smaller size goes on.

        `settles`: a cancelled slot is not free at once. `pooled`: its cache is one pool of blocks, of `kv_tokens`.
        `kv_limit`: tokens that its running requests may need together; None: each slot has its own.
        `assumed`: nobody said how many slots it has.
        """
        backend = self.backends.get(name)
        if backend is None:
            backend = self.permits.returning(name) or Backend(name, self.habits)
            self.backends[name] = backend
        backend.slots, backend.draining, backend.settles = slots, draining, settles
        backend.slots_assumed = assumed
        backend.room.tokens = kv_limit
        capacity = None
        if kv_tokens is not None:
            capacity = round(kv_tokens * backend.bytes_per_token.value)
        self.index.put(name, pooled=pooled, slots=slots, capacity=capacity)
        return [*self._fill(now), *self.queue.hopeless()]

    def forget_cache(self, name: str) -> None:
        """The engine restarted: whatever it had cached is gone."""
        self.index.forget(name)

    def hold(self, name: str, memory: Memory, asked_at: float) -> None:
        """The engine said which of its models are in memory."""
        backend = self.backends.get(name)
        if backend is not None and backend.residence.hear(memory, asked_at):
            self.index.forget(name)

    def remove(self, name: str) -> list[Decision]:
        """A backend is gone from the configuration. What it has in flight still comes back.

        Until it has, a backend of this name that is put again is the same one: its engine is still at work (law 1).
        """
        backend = self.backends.pop(name, None)
        self.index.remove(name)
        if backend is not None:
            self.permits.part_from(backend)
        return [*self.queue.hopeless()]

    def report(
        self, now: float, name: str, fitness: Fitness, advice: Advice | None, asked_at: float
    ) -> list[Decision]:
        """A probe was answered, or not. Advice corrects what we believe; it never refuses a request."""
        backend = self.backends.get(name)
        if backend is None:
            return []
        backend.fitness = fitness
        if fitness is not Fitness.DOWN:
            backend.breaker.probe()
        if advice is not None:
            backend.hear(advice, asked_at)
        return [*self._fill(now), *self.queue.hopeless()]

    def failed(
        self, now: float, name: str, *, at_once: bool, alone: bool = False
    ) -> list[Decision]:
        """A broken connection or a 5xx of this backend; `at_once` when it refused the connection.

        `alone`: no other backend that is up serves any of its models.
        """
        backend = self.backends.get(name)
        if backend is None:
            return []
        backend.breaker.fail(now, at_once=at_once, alone=alone)
        if at_once:  # nobody listens: the next word is the poller's
            backend.fitness = Fitness.DOWN
        return [*self.queue.hopeless()]

    def tick(self, now: float) -> list[Decision]:
        """Time passed: deadlines, settling slots, breakers, patience."""
        for backend in self.backends.values():
            backend.expire_settling(now)
            backend.breaker.tick(now)
            backend.pressure.ease(now, backend.slots)
        return [*self.queue.late(now), *self._fill(now)]

    def wake_at(self, now: float) -> float | None:
        """When `tick` is due next; None when nothing waits and nothing settles."""
        times: list[float] = []
        for backend in self.backends.values():
            if backend.settling:
                times += [one.until for one in backend.settling]
            if backend.breaker.is_open:
                times.append(backend.breaker.until)
            if backend.pressure.cap is not None:
                times.append(backend.pressure.until)
        if self.queue.waiting:
            times.append(now + TICK_S)
            times += [one.deadline for one in self.queue]
            times += self._choice.patience_ends()
        return min(times) if times else None

    # ------------------------------------------------------------------ views

    @property
    def queued(self) -> int:
        return len(self.queue.waiting)

    def full_for(self, now: float, key: str, pools: Iterable[frozenset[str]]) -> Refuse | None:
        """A refusal that needs no body: every pool that the key could use is full, and nobody would give way."""
        return self.queue.full_for(now, key, pools)

    def idle_spells(self) -> list[float]:
        """How long slots were free and wanted by somebody who waited for a warmer one: seconds, each told once."""
        return self._choice.idle_spells()

    def depth(self, pool: frozenset[str]) -> int:
        """Requests that wait for any backend of this pool."""
        return self.queue.depth(pool)

    def limit(self, pool: frozenset[str]) -> int:
        """Most requests that may wait for the backends of this pool."""
        return self.queue.limit(pool)

    def has_other(self, now: float, ticket: int) -> bool:
        """Would `retry` find another backend to wait for?"""
        held = self.held[ticket]
        return now < held.deadline and bool(others_for(held, self.backends))

    def could_start(self, now: float, ticket: int, backend: str) -> bool:
        """Is there a free slot that this waiting request could use?"""
        return self._choice.could_start(now, self.queue.waiting[ticket], backend)

    # ------------------------------------------------------------------ the decision

    def _start_alone(self, now: float, offer: Offer) -> Start | None:
        """Start this newcomer without a place in line, as `_fill` would; None where `_fill` has to look."""
        if offer.batch:  # those may be kept to some of the free slots
            return None
        newcomer = self.queue.newcomer(now, offer, now + self.limits.max_wait_s)
        price = self._choice.alone(now, newcomer)
        if price is None:
            return None
        affinity = self.permits.lend(now, newcomer, price)
        return Start(offer.ticket, price.backend.name, price, affinity, newcomer.prices)

    def _line_up(self, now: float, offer: Offer, hopeful: list[Backend]) -> list[Decision]:
        """Take a place in line, and see who starts, waits and is refused now."""
        waiting = self.queue.enter(now, offer, hopeful, now + self.limits.max_wait_s)
        decisions = self._fill(now)
        if offer.ticket not in self.queue.waiting:
            decisions.sort(key=lambda one: one.ticket != offer.ticket)
            return decisions
        refusal = self.queue.overflow(now, waiting)
        if refusal is None:
            return [Wait(offer.ticket), *decisions]
        if refusal.ticket != offer.ticket:  # somebody else gave way
            return [Wait(offer.ticket), refusal, *decisions]
        return [refusal, *decisions]

    def _fill(self, now: float) -> list[Decision]:
        """Start whoever may start. Called after every event that frees or adds."""
        decisions: list[Decision] = []
        while (chosen := self._choice.next(now)) is not None:
            waiting, price = chosen
            self.queue.leave(waiting)
            affinity = self.permits.lend(now, waiting, price)
            backend = price.backend
            if waiting.line.batch:
                backend.since_batch = 0
            elif self._choice.batch_waits_for(backend.name):
                backend.since_batch += 1
            decisions.append(
                Start(waiting.offer.ticket, backend.name, price, affinity, waiting.prices)
            )
        return decisions
