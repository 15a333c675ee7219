"""Admission and choice of backend as one synchronous step: events in, decisions out.

Laws held here (spec.md section 6):
  1  a backend never has more of our permits in flight than its slots; every permit that was lent comes back
  2  a free slot and a waiting request that could use it do not coexist, unless that request is better off waiting
     for its warm backend; and then for half a second at most
  8  fairness between keys (`core.fairness`)
Nothing here waits, logs, or looks at a clock: every event brings its `now` (monotonic seconds).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from gateway.core import cost
from gateway.core.cost import Price
from gateway.core.fairness import Line, Lines
from gateway.core.fleet import DECODE_SETTLE_S, Advice, Backend, Fitness, Habits
from gateway.core.prefix import BLOCK_BYTES, EMPTY, Chain, PrefixIndex

PATIENCE_S = 0.5  # longest that a free slot waits for a request that prefers another backend
TICK_S = 0.25
BATCH_EVERY = 8
MEASURED = 8  # requests of a pool before its expected wait may refuse anybody

Reason: TypeAlias = Literal[
    "gateway_queue_full", "gateway_queue_timeout", "no_backend", "too_many_choices", "exhausted"
]
Affinity: TypeAlias = Literal["hit", "miss", "moved", "none"]


@dataclass(frozen=True, slots=True, eq=False)
class Offer:
    """What dispatch needs to know of a request."""

    ticket: int
    key: str
    pool: frozenset[str]  # names of the backends that can serve it
    model: str = ""  # for the caller's own use: its metric label
    permits: int = 1
    weight: float = 1.0
    batch: bool = False
    prompt_bytes: int = 0
    conversation: int = 0  # seed of the rendezvous hash
    chain: Chain = EMPTY  # its prompt, for the caches; empty: no affinity


@dataclass(frozen=True, slots=True)
class Used:
    """Tokens that an engine reports of one answer. `cached_tokens` None: it does not say."""

    prompt_tokens: int
    cached_tokens: int | None


@dataclass(frozen=True, slots=True)
class Start:
    ticket: int
    backend: str
    price: Price
    affinity: Affinity = "none"


@dataclass(frozen=True, slots=True)
class Refuse:
    ticket: int
    reason: Reason
    retry_after_s: float  # how long until a place is likely to be free; not yet clamped or spread


@dataclass(frozen=True, slots=True)
class Wait:
    ticket: int


Decision: TypeAlias = Start | Refuse | Wait


@dataclass(slots=True, eq=False)
class Waiting:
    """A request in line. Owned by dispatch."""

    offer: Offer
    line: Line
    arrival: float
    deadline: float
    expected_s: float
    pool_slots: int
    tried: frozenset[str] = frozenset()
    best: str | None = None  # its own cheapest backend at the last look
    overdue: bool = False


@dataclass(slots=True, eq=False)
class Held:
    """A request that has its permits. Owned by dispatch."""

    offer: Offer
    backend: Backend
    line: Line
    since: float
    deadline: float  # of its queueing, for another attempt
    expected_s: float
    tokens: int  # uncached prompt tokens still counted in the backend's backlog
    work_tokens: int  # uncached prompt tokens, as predicted at the start
    ahead_tokens: int  # the backend's backlog at the start
    matched: int  # bytes of the prompt that were believed to be cached
    tried: frozenset[str]
    first_token_at: float | None = None


@dataclass(slots=True)
class Limits:
    """How many may wait, and for how long. `queue` None: as many as the pool has slots."""

    queue: int | None = None
    max_wait_s: float = 30.0


@dataclass(slots=True)
class Dispatch:
    """The state machine. One owner of all permits and waiting places, for all models."""

    limits: Limits = field(default_factory=Limits)
    habits: Habits = field(default_factory=Habits)
    index: PrefixIndex = field(default_factory=PrefixIndex)
    backends: dict[str, Backend] = field(default_factory=dict)
    lines: Lines = field(default_factory=Lines)
    held: dict[int, Held] = field(default_factory=dict)
    _waiting: dict[int, Waiting] = field(default_factory=dict)
    _pools: dict[frozenset[str], int] = field(default_factory=dict)  # waiting requests by pool

    # ------------------------------------------------------------------ events about requests

    def offer(self, now: float, offer: Offer) -> list[Decision]:
        """A new request. The decision about it comes first; others may follow.

        1 nobody of its pool is up: refuse      2 needs more permits than any backend has: refuse
        3 a slot is free: start                 4 the line has room, and it is short enough: wait
        5 a flooding key gives way: wait        6 refuse
        """
        pool = [self.backends[name] for name in offer.pool if name in self.backends]
        hopeful = [backend for backend in pool if backend.is_hopeful]
        if not hopeful:
            return [Refuse(offer.ticket, "no_backend", 0.0)]
        if offer.permits > max(backend.slots for backend in hopeful):
            return [Refuse(offer.ticket, "too_many_choices", 0.0)]
        waiting = self._enter(now, offer, hopeful, now + self.limits.max_wait_s)
        decisions = self._fill(now)
        if offer.ticket not in self._waiting:
            decisions.sort(key=lambda one: one.ticket != offer.ticket)
            return decisions
        refusal = self._overflow(now, waiting)
        if refusal is None:
            return [Wait(offer.ticket), *decisions]
        if refusal.ticket != offer.ticket:  # somebody else gave way
            return [Wait(offer.ticket), refusal, *decisions]
        return [refusal, *decisions]

    def cancel(self, now: float, ticket: int) -> list[Decision]:
        """The client left while waiting, or at the instant of its start."""
        waiting = self._waiting.get(ticket)
        if waiting is None:
            return self.release(now, ticket, cancelled=True) if ticket in self.held else []
        self._leave(waiting)
        return self._fill(now)

    def first_token(self, now: float, ticket: int) -> None:
        """Its prefill is over: it is nobody's backlog any more, and it teaches the prefill rate."""
        held = self.held.get(ticket)
        if held is None or held.first_token_at is not None:
            return
        held.first_token_at = now
        self._drop_backlog(held)

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
        held = self.held.pop(ticket, None)
        if held is None:
            return []
        self._give_back(now, held, cancelled=cancelled)
        if served:
            held.backend.service_s.learn(now - held.since)
            held.backend.breaker.serve(held.backend.slots)
            self._learn(held, used)
        return self._fill(now)

    def retry(self, now: float, ticket: int) -> list[Decision]:
        """The backend refused without doing work: back to the head of its line, for another backend.

        Refuse(exhausted) when no other backend of its pool may be tried.
        """
        held = self.held.pop(ticket)
        self._give_back(now, held, cancelled=False)
        hopeful = self._others_for(held)
        if not hopeful or now >= held.deadline:
            return [Refuse(ticket, "exhausted", 0.0), *self._fill(now)]
        waiting = self._enter(now, held.offer, hopeful, held.deadline, first=True)
        waiting.tried = held.tried
        decisions = self._fill(now)
        if ticket in self._waiting:
            return [Wait(ticket), *decisions]
        return sorted(decisions, key=lambda one: one.ticket != ticket)

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
    ) -> list[Decision]:
        """A backend is new, resized, or drained. In-flight work above a smaller size goes on.

        `settles`: a cancelled slot is not free at once. `pooled`: its cache is one pool of blocks, of `kv_tokens`.
        """
        backend = self.backends.get(name)
        if backend is None:
            backend = self.backends[name] = Backend(name, self.habits)
        backend.slots, backend.draining, backend.settles = slots, draining, settles
        capacity = None
        if kv_tokens is not None:
            capacity = round(kv_tokens * backend.bytes_per_token.value)
        self.index.put(name, pooled=pooled, slots=slots, capacity=capacity)
        return self._fill(now) + self._refuse_hopeless()

    def forget_cache(self, name: str) -> None:
        """The engine restarted: whatever it had cached is gone."""
        self.index.forget(name)

    def remove(self, name: str) -> list[Decision]:
        """A backend is gone from the configuration. What it has in flight still comes back."""
        self.backends.pop(name, None)
        self.index.forget(name)
        return self._refuse_hopeless()

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
        return self._fill(now) + self._refuse_hopeless()

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
        return self._refuse_hopeless()

    def tick(self, now: float) -> list[Decision]:
        """Time passed: deadlines, settling slots, breakers, patience."""
        for backend in self.backends.values():
            backend.expire_settling(now)
            backend.breaker.tick(now)
        late = [one for one in self._waiting.values() if one.deadline <= now]
        decisions: list[Decision] = []
        for waiting in late:
            self._leave(waiting)
            again = self._drain_s(waiting.offer)
            decisions.append(Refuse(waiting.offer.ticket, "gateway_queue_timeout", again))
        return decisions + self._fill(now)

    def wake_at(self, now: float) -> float | None:
        """When `tick` is due next; None when nothing waits and nothing settles."""
        times = [until for b in self.backends.values() for _, until, _ in b.settling]
        times += [b.breaker.until for b in self.backends.values() if b.breaker.is_open]
        if self._waiting:
            times.append(now + TICK_S)
            times += [one.deadline for one in self._waiting.values()]
            since = [b.idle_wanted_since for b in self.backends.values()]
            times += [at + PATIENCE_S * 0.9 for at in since if at is not None]
        return min(times) if times else None

    # ------------------------------------------------------------------ views

    def full_for(self, now: float, key: str, pools: Iterable[frozenset[str]]) -> Refuse | None:
        """A refusal that needs no body: every pool that the key could use is full, and nobody would give way."""
        refusal: Refuse | None = None
        for pool in pools:
            offer = Offer(-1, key, pool)
            if not self._is_full(offer, 0) or self._gives_way(offer, now) is not None:
                return None
            known = [self.backends[n] for n in pool if n in self.backends]
            if not any(b.is_hopeful for b in known) or any(self._free_for(b, -1) for b in known):
                return None
            refusal = Refuse(-1, "gateway_queue_full", self._drain_s(offer))
        return refusal

    def depth(self, pool: frozenset[str]) -> int:
        """Requests that wait for any backend of this pool."""
        if len(self._pools) == 1 and pool in self._pools:
            return self._pools[pool]
        return sum(count for other, count in self._pools.items() if other & pool)

    def limit(self, pool: frozenset[str]) -> int:
        """Most requests that may wait for the backends of this pool."""
        if self.limits.queue is not None:
            return self.limits.queue
        return sum(b.slots for n in pool if (b := self.backends.get(n)) and b.is_hopeful)

    def has_other(self, now: float, ticket: int) -> bool:
        """Would `retry` find another backend to wait for?"""
        held = self.held[ticket]
        return now < held.deadline and bool(self._others_for(held))

    @property
    def queued(self) -> int:
        return len(self._waiting)

    # ------------------------------------------------------------------ the decision

    def _fill(self, now: float) -> list[Decision]:
        """Start whoever may start. Called after every event that frees or adds."""
        decisions: list[Decision] = []
        while self._waiting:
            free = {b.name for b in self.backends.values() if b.free > 0}
            chosen = self._choose(now, free) if free else None
            if chosen is None:
                break
            decisions.append(self._start(now, *chosen))
        if not self._waiting:
            for backend in self.backends.values():
                backend.idle_wanted_since = None
        return decisions

    def _choose(self, now: float, free: set[str]) -> tuple[Waiting, Price] | None:
        """The first waiting request, in fairness order, whose own cheapest backend has a slot for it.

        1 it cannot start on what is free: the next one; if it needs several slots and is first, it reserves
        2 its cheapest backend has the slots: start there
        3 it was overtaken enough, or a slot it could use has been idle for half a second: start on that one
        4 it is better off waiting for its warm backend: the next one
        """
        due = {n for n in free if self.backends[n].since_batch >= BATCH_EVERY - 1}
        wanted: set[str] = set()
        ahead: set[str] = set()
        promised = self._promised()
        for waiting in self.lines.order(batch_first=bool(due)):
            ready = self._ready(waiting, free, due)
            if ready:
                price = self._accept(now, waiting, ready, promised)
                if price is not None:
                    return waiting, price
                wanted |= ready
            elif waiting.offer.permits > 1 and not ahead & waiting.offer.pool:
                self._reserve(now, waiting, promised)
            ahead |= waiting.offer.pool
        self._watch_idle(now, free, wanted)
        return None

    def _ready(self, waiting: Waiting, free: set[str], due: set[str]) -> set[str]:
        """Backends that have all the slots it needs, now."""
        offer = waiting.offer
        usable = free & (offer.pool - waiting.tried)
        if due and waiting.line.batch:
            usable &= due
        return {
            name
            for name in usable
            if self._free_for(self.backends[name], offer.ticket) >= offer.permits
        }

    def _accept(
        self, now: float, waiting: Waiting, ready: set[str], promised: dict[str, int]
    ) -> Price | None:
        prices = self._prices(now, waiting, promised)
        best = cost.cheapest(prices, waiting.offer.conversation)
        self._prefer(waiting, best.backend.name, promised)
        if best.backend.name in ready:
            return best
        if waiting.overdue or any(self._patience_over(now, name) for name in ready):
            near = [one for one in prices if one.backend.name in ready]
            return cost.cheapest(near, waiting.offer.conversation)
        return None

    def _watch_idle(self, now: float, free: set[str], wanted: set[str]) -> None:
        """Since when has a slot been free that somebody who waits could use?"""
        for name in free:
            backend = self.backends[name]
            if name not in wanted:
                backend.idle_wanted_since = None
            elif backend.idle_wanted_since is None:
                backend.idle_wanted_since = now

    def _prices(self, now: float, waiting: Waiting, promised: dict[str, int]) -> list[Price]:
        """What each backend that could take it would cost."""
        offer, out = waiting.offer, []
        for name in offer.pool - waiting.tried:
            backend = self.backends.get(name)
            if backend is not None and backend.takes_work and backend.slots >= offer.permits:
                crowd = promised.get(name, 0) - (waiting.best == name)
                busy_too = backend.free < offer.permits
                matched = self.index.match(name, offer.chain, busy_too=busy_too)
                out.append(
                    cost.price(
                        backend,
                        now,
                        offer.prompt_bytes,
                        matched,
                        permits=offer.permits,
                        promised=crowd,
                    )
                )
        return out

    def _promised(self) -> dict[str, int]:
        """Q_b: how many waiting requests have this backend as their own cheapest."""
        promised: dict[str, int] = {}
        for waiting in self._waiting.values():
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

    def _start(self, now: float, waiting: Waiting, price: Price) -> Start:
        offer, backend = waiting.offer, price.backend
        reserved = backend.reserved_by
        self._leave(waiting)
        expected = backend.service_s.value * offer.permits
        tokens = price.own_tokens
        affinity = self._affinity(offer, price)
        self.held[offer.ticket] = Held(
            offer,
            backend,
            waiting.line,
            now,
            waiting.deadline,
            expected,
            tokens,
            tokens,
            backend.backlog_tokens,
            price.matched,
            waiting.tried | {backend.name},
        )
        self.index.start(backend.name, offer.ticket, offer.chain)
        backend.in_flight += offer.permits
        backend.backlog_tokens += tokens
        backend.idle_wanted_since = None
        if reserved == offer.ticket:
            backend.reserved_by = None
        backend.since_batch = 0 if waiting.line.batch else backend.since_batch
        if not waiting.line.batch and self._batch_waits_for(backend.name):
            backend.since_batch += 1
        self.lines.started(waiting.line, expected, backend.name)
        return Start(offer.ticket, backend.name, price, affinity)

    def _affinity(self, offer: Offer, price: Price) -> Affinity:
        """Did it go where most of its prefix is?"""
        if not offer.chain.hashes:
            return "none"
        most = max(self.index.match(name, offer.chain, busy_too=True) for name in offer.pool)
        if most == 0:
            return "miss"
        return "hit" if price.matched + BLOCK_BYTES > most else "moved"

    # ------------------------------------------------------------------ the line

    def _enter(
        self,
        now: float,
        offer: Offer,
        hopeful: list[Backend],
        deadline: float,
        *,
        first: bool = False,
    ) -> Waiting:
        line = self.lines.line(offer.key, offer.weight, batch=offer.batch)
        slots = sum(backend.slots for backend in hopeful)
        expected = hopeful[0].service_s.value
        waiting = Waiting(offer, line, now, deadline, expected, slots)
        self.lines.add(line, waiting, first=first)
        self._waiting[offer.ticket] = waiting
        self._pools[offer.pool] = self._pools.get(offer.pool, 0) + 1
        return waiting

    def _leave(self, waiting: Waiting) -> None:
        offer = waiting.offer
        self.lines.remove(waiting)
        del self._waiting[offer.ticket]
        left = self._pools[offer.pool] - 1
        if left:
            self._pools[offer.pool] = left
        else:
            del self._pools[offer.pool]
        for name in offer.pool if offer.permits > 1 else ():
            backend = self.backends.get(name)
            if backend is not None and backend.reserved_by == offer.ticket:
                backend.reserved_by = None

    def _overflow(self, now: float, waiting: Waiting) -> Refuse | None:
        """Does the line have room for this newcomer? None, or whom to refuse: it, or who gives way."""
        offer = waiting.offer
        loser: Waiting | None = None
        if self._is_full(offer, 1):
            loser = self._gives_way(offer, now) or waiting
        elif self._expected_wait(offer) > self.limits.max_wait_s:
            loser = waiting
        if loser is None:
            return None
        again = self._drain_s(offer)
        self._leave(loser)
        return Refuse(loser.offer.ticket, "gateway_queue_full", again)

    def _is_full(self, offer: Offer, already_counted: int) -> bool:
        return self.depth(offer.pool) - already_counted >= self.limit(offer.pool)

    def _gives_way(self, offer: Offer, now: float) -> Waiting | None:
        """The newest waiting request of the key with the most waiting, for a key that has none waiting.

        Only if it has waited for less than half of max_wait_s, and competes for the same backends.
        """
        mine = self.lines.line(offer.key, offer.weight, batch=offer.batch)
        if any(one.offer.ticket != offer.ticket for one in mine.waiting):
            return None
        rivals = [
            [one for one in line.waiting if one.offer.pool & offer.pool]
            for line in self.lines.lines_waiting()
            if line is not mine
        ]
        crowd = max(rivals, key=len, default=[])
        if len(crowd) < 2:
            return None
        newest = crowd[-1]
        return newest if now - newest.arrival < self.limits.max_wait_s / 2 else None

    def _expected_wait(self, offer: Offer) -> float:
        """Seconds until this newcomer would start, or 0 while fewer than eight requests were measured.

        Ahead of it in a fair order: at most as many of each key as it has itself.
        """
        pool = [b for n in offer.pool if (b := self.backends.get(n)) and b.takes_work]
        if sum(b.service_s.samples for b in pool) < MEASURED:
            return 0.0
        lines = self.lines.lines_waiting()
        mine = next((len(line.waiting) for line in lines if line.key == offer.key), 1)
        ahead = sum(min(len(line.waiting), mine) for line in lines)
        rate = sum(b.lendable / b.service_s.value for b in pool)
        return ahead / rate if rate else 0.0

    def _drain_s(self, offer: Offer) -> float:
        """Seconds in which the line of this pool drains at its learned pace."""
        pool = [b for n in offer.pool if (b := self.backends.get(n)) and b.is_hopeful]
        rate = sum(b.slots / b.service_s.value for b in pool)
        return (self.depth(offer.pool) + offer.permits) / rate if rate else 0.0

    def _refuse_hopeless(self) -> list[Decision]:
        """Waiting requests whose pool has no living backend left are told at once."""
        decisions: list[Decision] = []
        for waiting in list(self._waiting.values()):
            left = waiting.offer.pool - waiting.tried
            if not any(n in self.backends and self.backends[n].is_hopeful for n in left):
                self._leave(waiting)
                reason: Reason = "exhausted" if waiting.tried else "no_backend"
                decisions.append(Refuse(waiting.offer.ticket, reason, 0.0))
        return decisions

    # ------------------------------------------------------------------ permits

    def _free_for(self, backend: Backend, ticket: int) -> int:
        """Free permits, unless they are being kept for somebody else."""
        return backend.free if backend.reserved_by in (None, ticket) else 0

    def _reserve(self, now: float, waiting: Waiting, promised: dict[str, int]) -> None:
        """First in order, needs several permits: keep what gets free on its cheapest backend."""
        ticket = waiting.offer.ticket
        for backend in self.backends.values():
            if backend.reserved_by == ticket:
                if backend.takes_work:
                    return
                backend.reserved_by = None
        prices = self._prices(now, waiting, promised)
        prices = [one for one in prices if one.backend.reserved_by is None]
        if prices:
            cheapest = cost.cheapest(prices, waiting.offer.conversation)
            cheapest.backend.reserved_by = ticket

    def _patience_over(self, now: float, name: str) -> bool:
        since = self.backends[name].idle_wanted_since
        return since is not None and now - since >= PATIENCE_S * 0.9

    def _batch_waits_for(self, name: str) -> bool:
        return any(
            line.batch and any(name in one.offer.pool for one in line.waiting)
            for line in self.lines.lines_waiting()
        )

    def _give_back(self, now: float, held: Held, *, cancelled: bool) -> None:
        backend, permits = held.backend, held.offer.permits
        backend.in_flight -= permits
        self.index.end(backend.name, held.offer.ticket)
        backend.released.append((now, permits))
        self.lines.released(held.line, (now - held.since) * permits - held.expected_s)
        if cancelled and backend.settles:
            rest = DECODE_SETTLE_S
            if held.first_token_at is None:
                prefill = held.work_tokens / backend.prefill_rate.value
                rest = max(rest, prefill - (now - held.since))
            backend.settle(now, rest, permits)
        self._drop_backlog(held)

    def _others_for(self, held: Held) -> list[Backend]:
        left = (self.backends.get(name) for name in held.offer.pool - held.tried)
        return [b for b in left if b and b.is_hopeful and b.slots >= held.offer.permits]

    def _learn(self, held: Held, used: Used | None) -> None:
        """What a whole answer teaches: tokens in a byte, the truth about the cache, the prefill rate.

        Rate: what was ahead of it and its own uncached tokens were computed until its first token.
        """
        backend, offer, work = held.backend, held.offer, held.work_tokens
        if used is not None and used.prompt_tokens >= 16 and offer.prompt_bytes:
            per_token = offer.prompt_bytes / used.prompt_tokens
            backend.bytes_per_token.learn(per_token)
            if used.cached_tokens is not None:
                work = used.prompt_tokens - used.cached_tokens
                cached = round(used.cached_tokens * per_token)
                self.index.correct(backend.name, offer.chain, cached)
        if held.first_token_at is not None and work + held.ahead_tokens >= 64:
            seconds = max(held.first_token_at - held.since, 1e-3)
            backend.prefill_rate.learn((work + held.ahead_tokens) / seconds)

    def _drop_backlog(self, held: Held) -> None:
        held.backend.backlog_tokens -= held.tokens
        held.tokens = 0
