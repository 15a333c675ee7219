"""The dispatch machine under everything that can happen to it, with the laws as invariants."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from gateway.core.dispatch import PATIENCE_S, Dispatch, Limits, Offer, Refuse, Start, Wait
from gateway.core.fleet import Advice, Fitness
from gateway.core.residence import Memory

NAMES = ("a", "b", "c")
POOLS = [frozenset("a"), frozenset("ab"), frozenset("abc"), frozenset("bc")]
KEYS = ("ann", "bob", "cat")
MODELS = ("m", "n")
SHARED_TOKENS = 4_000  # the KV cache that the slots of b share; c holds one model at a time
MAX_WAIT_S = 30.0


class DispatchMachine(RuleBasedStateMachine):
    """Offers, releases, cancels, deaths, resizes and time, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 100.0
        self.next_ticket = 0
        self.dispatch = Dispatch(Limits(queue=None, max_wait_s=MAX_WAIT_S))
        self.offers: dict[int, Offer] = {}
        self.state: dict[int, str] = {}  # waiting, running; absent when over
        self.arrived: dict[int, float] = {}
        self.where: dict[int, str] = {}
        self.slots_when_started: dict[str, int] = {}
        self.first_in_line_since: dict[int, int] = {}

    @initialize(slots=st.lists(st.integers(1, 4), min_size=3, max_size=3))
    def fleet(self, slots: list[int]) -> None:
        for name, count in zip(NAMES, slots, strict=True):
            self.put(name, count, draining=False)
            self.take(self.dispatch.report(self.now, name, Fitness.UP, None, self.now))
        self.dispatch.hold("c", Memory(frozenset("m"), most=1), self.now)

    def put(self, name: str, slots: int, *, draining: bool) -> None:
        limit = SHARED_TOKENS if name == "b" else None
        settles = name in "ab"
        self.take(
            self.dispatch.put(
                self.now, name, slots=slots, draining=draining, settles=settles, kv_limit=limit
            )
        )

    # ---------------------------------------------------------------- what happens

    @rule(
        key=st.sampled_from(KEYS),
        pool=st.sampled_from(POOLS),
        permits=st.sampled_from([1, 1, 1, 1, 1, 2, 3]),
        size=st.integers(0, 60_000),
        batch=st.booleans(),
        weight=st.sampled_from([1.0, 1.0, 4.0]),
        model=st.sampled_from(MODELS),
        max_tokens=st.sampled_from([None, 0, 100, 100_000]),
    )
    def offer(
        self,
        key: str,
        pool: frozenset[str],
        permits: int,
        size: int,
        batch: bool,
        weight: float,
        model: str,
        max_tokens: int | None,
    ) -> None:
        self.next_ticket += 1
        ticket = self.next_ticket
        offer = Offer(
            ticket,
            key,
            pool,
            permits=permits,
            prompt_bytes=size,
            batch=batch,
            weight=weight,
            conversation=ticket,
            model=model,
            max_tokens=max_tokens,
        )
        self.offers[ticket] = offer
        self.arrived[ticket] = self.now
        decisions = self.dispatch.offer(self.now, offer)
        assert decisions, "an offer is always answered"
        assert decisions[0].ticket == ticket, "the decision about the offer comes first"
        if isinstance(decisions[0], Wait):
            self.state[ticket] = "waiting"
        self.take(decisions)

    def pick(self, state: str, index: int) -> int:
        candidates = sorted(t for t, s in self.state.items() if s == state)
        return candidates[index % len(candidates)]

    def any_in(self, state: str) -> bool:
        return state in self.state.values()

    @precondition(lambda self: self.any_in("running"))
    @rule(index=st.integers(0, 30), served=st.booleans(), first=st.booleans())
    def release(self, index: int, served: bool, first: bool) -> None:
        ticket = self.pick("running", index)
        if first:
            self.dispatch.first_token(self.now, ticket)
        del self.state[ticket]
        self.take(self.dispatch.release(self.now, ticket, cancelled=not served, served=served))
        assert self.dispatch.release(self.now, ticket) == [], "a second release does nothing"

    @precondition(lambda self: self.any_in("waiting"))
    @rule(index=st.integers(0, 30))
    def leave_the_line(self, index: int) -> None:
        ticket = self.pick("waiting", index)
        del self.state[ticket]
        self.take(self.dispatch.cancel(self.now, ticket))
        assert self.dispatch.cancel(self.now, ticket) == [], "a second cancel does nothing"

    @precondition(lambda self: self.any_in("running"))
    @rule(index=st.integers(0, 30))
    def nack(self, index: int) -> None:
        """The backend said 503: it goes to another one, or is told that there is none."""
        ticket = self.pick("running", index)
        tried = self.dispatch.held[ticket].tried
        backend = self.dispatch.held[ticket].backend
        self.dispatch.pressed(self.now, ticket)
        assert backend.pressure.limit(backend.slots) >= 1, "back-pressure leaves at least one"
        other = self.dispatch.has_other(self.now, ticket)
        self.state[ticket] = "waiting"
        decisions = self.dispatch.retry(self.now, ticket)
        own = decisions[0]
        assert own.ticket == ticket
        assert other is not isinstance(own, Refuse)
        if isinstance(own, Start):
            assert own.backend not in tried, "at most once for each backend"
        self.take(decisions)

    @rule(
        name=st.sampled_from(NAMES),
        slots=st.integers(1, 4),
        draining=st.sampled_from([False, False, False, True]),
    )
    def resize(self, name: str, slots: int, draining: bool) -> None:
        self.put(name, slots, draining=draining)

    @rule(model=st.sampled_from(MODELS), ago=st.sampled_from([0.0, 1.0]))
    def memory(self, model: str, ago: float) -> None:
        """The engine tells what it holds: what is at work there, else anything."""
        working = frozenset(self.dispatch.backends["c"].residence.running)
        self.dispatch.hold("c", Memory(working or frozenset([model]), most=1), self.now - ago)

    @rule(
        name=st.sampled_from(NAMES),
        fitness=st.sampled_from(
            [Fitness.UP] * 8 + [Fitness.DOWN, Fitness.LOADING, Fitness.SLEEPING]
        ),
        running=st.none() | st.integers(0, 9),
    )
    def report(self, name: str, fitness: Fitness, running: int | None) -> None:
        advice = None if running is None else Advice(self.now, running, 0)
        self.take(self.dispatch.report(self.now, name, fitness, advice, self.now - 0.1))

    @rule(name=st.sampled_from(NAMES), at_once=st.booleans())
    def fault(self, name: str, at_once: bool) -> None:
        self.take(self.dispatch.failed(self.now, name, at_once=at_once))

    @rule(seconds=st.sampled_from([0.01, 0.1, 0.3, 1.0, 5.0, 40.0]))
    def wait(self, seconds: float) -> None:
        """Time passes the way the dispatcher lets it: tick by tick, when dispatch asks for it."""
        until = self.now + seconds
        for _ in range(10_000):
            due = self.dispatch.wake_at(self.now)
            if due is None or due >= until:
                break
            self.now = max(due, self.now + 0.001)
            self.take(self.dispatch.tick(self.now))
        self.now = until
        self.take(self.dispatch.tick(self.now))

    # ---------------------------------------------------------------- bookkeeping

    def take(self, decisions: list[Start | Refuse | Wait]) -> None:
        for decision in decisions:
            ticket = decision.ticket
            if isinstance(decision, Start):
                backend = self.dispatch.backends[decision.backend]
                assert decision.backend in self.offers[ticket].pool
                assert backend.takes_work, "nothing starts on a backend that takes no work"
                assert backend.in_flight + backend.settling_permits <= backend.slots
                self.assert_it_fits(ticket, decision.backend)
                self.state[ticket] = "running"
                self.where[ticket] = decision.backend
            elif isinstance(decision, Refuse):
                self.state.pop(ticket, None)
                if decision.reason == "gateway_queue_timeout":
                    assert self.now - self.arrived[ticket] >= MAX_WAIT_S - 1e-6

    def assert_it_fits(self, ticket: int, name: str) -> None:
        """What was promised of a shared KV cache is within it, or one request is alone there."""
        backend = self.dispatch.backends[name]
        if backend.room.tokens is not None:
            settling = sum(one.tokens for one in backend.settling)
            alone = backend.in_flight == self.offers[ticket].permits and not backend.settling
            assert alone or backend.room.promised + settling <= backend.room.tokens

    # ---------------------------------------------------------------- the laws

    @invariant()
    def what_is_promised_is_what_runs(self) -> None:
        for name, backend in self.dispatch.backends.items():
            held = [one for one in self.dispatch.held.values() if one.backend is backend]
            assert backend.room.promised == sum(one.promised_tokens for one in held)
            assert sum(backend.residence.running.values()) == len(held), name

    @invariant()
    def no_model_at_work_is_pushed_out(self) -> None:
        assert len(self.dispatch.backends["c"].residence.running) <= 1

    @invariant()
    def law_1_in_flight_is_what_runs(self) -> None:
        for name, backend in self.dispatch.backends.items():
            held = sum(
                self.offers[t].permits
                for t, s in self.state.items()
                if s == "running" and self.where[t] == name
            )
            assert backend.in_flight == held
            assert backend.backlog_tokens >= 0
        assert {t for t, s in self.state.items() if s == "running"} == set(self.dispatch.held)

    @invariant()
    def law_1_nothing_waits_unknown(self) -> None:
        waiting = sum(1 for s in self.state.values() if s == "waiting")
        assert self.dispatch.queued == waiting == self.dispatch.queue.lines.count

    @invariant()
    def law_2_no_idle_slot(self) -> None:
        """A free slot with a waiting request that fits exists only within its patience, or is being saved up."""
        for ticket, state in self.state.items():
            if state != "waiting":
                continue
            waiting = self.dispatch.queue.waiting[ticket]
            for name in waiting.offer.pool - waiting.tried:
                backend = self.dispatch.backends[name]
                if not self.dispatch.could_start(self.now, ticket, name):
                    continue
                since = backend.idle_wanted_since
                assert since is not None, "an idle slot that is wanted is watched"
                assert self.now - since <= PATIENCE_S + 1e-6

    @invariant()
    def an_empty_backend_is_of_use_to_somebody_who_waits(self) -> None:
        """Neither a full KV cache nor another model keeps everybody out for good."""
        queue = self.dispatch.queue.waiting
        for name, backend in self.dispatch.backends.items():
            if backend.in_flight or backend.settling:
                continue
            who = [t for t, w in queue.items() if name in w.offer.pool - w.tried]
            who = [t for t in who if backend.free_for(t) >= self.offers[t].permits]
            assert not who or any(self.dispatch.could_start(self.now, t, name) for t in who)

    @invariant()
    def a_deadline_is_kept(self) -> None:
        for ticket, state in self.state.items():
            if state == "waiting":
                assert self.now <= self.dispatch.queue.waiting[ticket].deadline + 1e-6

    @invariant()
    def a_reservation_belongs_to_somebody_who_waits(self) -> None:
        for backend in self.dispatch.backends.values():
            if backend.reserved_by is not None:
                assert self.state.get(backend.reserved_by) == "waiting"

    @invariant()
    def the_line_has_room_for_whom_it_holds(self) -> None:
        pools = sum(self.dispatch.queue.pools.values())
        assert pools == self.dispatch.queued

    def teardown(self) -> None:
        """After everybody left, nothing is held."""
        for ticket in list(self.state):
            self.dispatch.cancel(self.now, ticket)
        assert all(b.in_flight == 0 for b in self.dispatch.backends.values())
        assert all(b.backlog_tokens == 0 for b in self.dispatch.backends.values())
        assert self.dispatch.queued == 0
        assert self.dispatch.queue.pools == {}


TestDispatchMachine = DispatchMachine.TestCase
