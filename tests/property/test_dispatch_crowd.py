"""A crowd before a few healthy backends: what law by law must hold, by a count of our own and not by dispatch's.

The big machine (`test_dispatch_machine`) lets everything happen, so backends are seldom full and warm at once. Here they are.
"""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from gateway.core.chain import BLOCK_BYTES, Chain
from gateway.core.dispatch import Decision, Dispatch, Limits, Offer, Refuse, Start, Used
from gateway.core.fleet import DECODE_SETTLE_S, Fitness

SLOTS = {"one": 1, "two": 2}
BOTH, ONLY_TWO = frozenset(SLOTS), frozenset(["two"])
MAX_WAIT_S = 4.0
PATIENCE_S = 0.5
LATE = 1e-6


def talk(number: int, turns: int) -> Chain:
    """A conversation of so many turns, eight blocks each."""
    ids = tuple(hash((number, n)) for n in range(8 * turns))
    return Chain(ids, tuple(BLOCK_BYTES * (n + 1) for n in range(len(ids))))


class CrowdMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now = 50.0
        self.dispatch = Dispatch(Limits(queue=1000, max_wait_s=MAX_WAIT_S))
        self.offers: dict[int, Offer] = {}
        self.waiting: dict[int, float] = {}  # ticket: when it came
        self.running: dict[int, str] = {}
        self.tried: dict[int, set[str]] = {}
        self.settling: list[tuple[float, str, int]] = []  # until at least, where, permits
        self.idle_since: dict[str, float] = {}

    @initialize()
    def fleet(self) -> None:
        for name, slots in SLOTS.items():
            self.dispatch.put(self.now, name, slots=slots, settles=True)
            self.dispatch.report(self.now, name, Fitness.UP, None, self.now)
            backend = self.dispatch.backends[name]
            for _ in range(
                20
            ):  # slow to read, quick to answer: a warm backend is worth waiting for
                backend.prefill_rate.learn(200.0)
                backend.answer_s.learn(1.0)
                backend.service_s.learn(1.0)

    # ---------------------------------------------------------------- what happens

    @rule(
        pool=st.sampled_from([BOTH, BOTH, ONLY_TWO]),
        permits=st.sampled_from([1, 1, 1, 2]),
        number=st.integers(0, 3),
        turns=st.integers(1, 4),
    )
    def offer(self, pool: frozenset[str], permits: int, number: int, turns: int) -> None:
        ticket = len(self.offers) + 1
        chain = talk(number, turns)
        offer = Offer(
            ticket, "k", pool, permits=permits, prompt_bytes=chain.size, conversation=number, chain=chain
        )  # fmt: skip
        self.offers[ticket], self.tried[ticket] = offer, set()
        self.waiting[ticket] = self.now
        self.take(self.dispatch.offer(self.now, offer))

    @rule(count=st.integers(2, 5), number=st.integers(0, 3))
    def crowd(self, count: int, number: int) -> None:
        """Several turns of one conversation at once: all of them have the same home."""
        for turns in range(1, count + 1):
            self.offer(BOTH, 1, number, turns)

    @rule(number=st.integers(0, 3), seconds=st.sampled_from([0.3, 0.6, 1.2]))
    def crowd_that_waits(self, number: int, seconds: float) -> None:
        """Nobody leaves for a while: patience is what moves."""
        for ticket in list(self.running):
            self.finish(ticket, cancelled=False)
        self.crowd(4, number)
        self.pass_time(seconds)

    @precondition(lambda self: self.running)
    @rule(index=st.integers(0, 9), cancelled=st.booleans(), took=st.sampled_from([0.0, 0.2, 1.5]))
    def end(self, index: int, cancelled: bool, took: float) -> None:
        self.pass_time(took)
        ticket = self.one_of(self.running, index)
        if ticket is not None:
            self.finish(ticket, cancelled=cancelled)

    def finish(self, ticket: int, *, cancelled: bool) -> None:
        name, offer = self.running.pop(ticket), self.offers[ticket]
        if cancelled:
            self.settling.append((self.now + DECODE_SETTLE_S - LATE, name, offer.permits))
            self.take(self.dispatch.release(self.now, ticket, cancelled=True))
        else:
            used = Used(offer.prompt_bytes // 4, 0)
            self.take(self.dispatch.release(self.now, ticket, served=True, used=used))

    @precondition(lambda self: self.running)
    @rule(index=st.integers(0, 9))
    def nack(self, index: int) -> None:
        """Its backend says busy: it may go where it has not been, and nowhere else."""
        ticket = self.one_of(self.running, index)
        offer = self.offers[ticket]
        del self.running[ticket]
        waits_since = self.now
        left = {n for n in offer.pool - self.tried[ticket] if SLOTS[n] >= offer.permits}
        said = self.dispatch.has_other(self.now, ticket)
        self.waiting[ticket] = waits_since
        decisions = self.dispatch.retry(self.now, ticket)
        own = decisions[0]
        assert own.ticket == ticket
        if not left:
            assert isinstance(own, Refuse), "nobody is left to try"
            assert not said
        elif said:
            assert not isinstance(own, Refuse)
        self.take(decisions)

    @precondition(lambda self: self.waiting)
    @rule(index=st.integers(0, 9))
    def leave(self, index: int) -> None:
        ticket = self.one_of(self.waiting, index)
        del self.waiting[ticket]
        self.take(self.dispatch.cancel(self.now, ticket))

    @rule(seconds=st.sampled_from([0.05, 0.3, 0.6, 1.0, 5.0]))
    def wait(self, seconds: float) -> None:
        self.pass_time(seconds)

    def pass_time(self, seconds: float) -> None:
        """The way the dispatcher lets it pass: a tick whenever dispatch asks for one, and never twice at one time."""
        until = self.now + seconds
        while True:
            due = self.dispatch.wake_at(self.now)
            if due is None or due > until:
                break
            assert due > self.now - LATE, "what was due has been done"
            self.now = max(self.now + 1e-4, due)
            self.take(self.dispatch.tick(self.now))
            self.no_slot_is_idle_for_long()
        self.now = max(self.now, until)
        self.take(self.dispatch.tick(self.now))

    def one_of(self, tickets: dict, index: int) -> int | None:
        return sorted(tickets)[index % len(tickets)] if tickets else None

    # ---------------------------------------------------------------- the laws

    def take(self, decisions: list[Decision]) -> None:
        batch = {one.ticket for one in decisions}
        for one in decisions:
            if isinstance(one, Start):
                self.assert_nothing_kept_is_lost(one.ticket, one.backend, batch)
                self.start(one.ticket, one.backend)
            elif isinstance(one, Refuse):
                self.waiting.pop(one.ticket, None)

    def assert_nothing_kept_is_lost(self, ticket: int, name: str, batch: set[int]) -> None:
        """Whoever is first in line, and needs both slots of the larger backend, is not overtaken there.

        Decisions of one event are not told in the order in which they were taken, so first is who came before all that
        waited at that event; one that goes back to the head of the line is before everybody.
        """
        line = {*self.waiting, *batch}
        if name != "two" or any(self.tried[one] for one in line):
            return
        first = self.offers[min(line)]
        if first.permits == 2 and ticket != first.ticket:
            assert min(line) not in self.waiting, "slots kept for the first in line went to another"

    def start(self, ticket: int, name: str) -> None:
        offer = self.offers[ticket]
        del self.waiting[ticket]
        assert name not in self.tried[ticket], "at most once for each backend"
        self.running[ticket] = name
        self.tried[ticket].add(name)
        busy = sum(self.offers[t].permits for t, where in self.running.items() if where == name)
        busy += sum(n for until, where, n in self.settling if where == name and until > self.now)
        assert busy <= SLOTS[name], "a slot that is at work, or settling, was lent again"
        assert offer.permits <= SLOTS[name]

    @invariant()
    def nobody_waits_beyond_the_deadline(self) -> None:
        for since in self.waiting.values():
            assert self.now - since <= MAX_WAIT_S + 0.01
        assert self.dispatch.queued == len(self.waiting)

    @invariant()
    def no_slot_is_idle_for_long(self) -> None:
        """Law 2, by the clock: free, wanted by a request for one slot, and kept for nobody who waits for two."""
        many = any(self.offers[t].permits > 1 for t in self.waiting)
        for name, backend in self.dispatch.backends.items():
            wanted = any(
                name in self.offers[t].pool and name not in self.tried[t] for t in self.waiting
            )
            if many or not wanted or not backend.free:
                self.idle_since.pop(name, None)
            else:
                since = self.idle_since.setdefault(name, self.now)
                assert self.now - since <= PATIENCE_S + 0.01, f"{name} was idle, and wanted"

    @invariant()
    def who_has_no_other_choice_does_not_wait_for_nothing(self) -> None:
        """Law 2: a request that could only ever go to one backend has no warmer one to wait for."""
        if any(self.offers[t].permits > 1 for t in self.waiting):
            return
        for ticket in self.waiting:
            if self.offers[ticket].pool - self.tried[ticket] == ONLY_TWO:
                assert self.dispatch.backends["two"].free == 0

    def teardown(self) -> None:
        for ticket in [*self.waiting, *self.running]:
            self.dispatch.cancel(self.now, ticket)
        assert self.dispatch.queued == 0
        assert all(backend.in_flight == 0 for backend in self.dispatch.backends.values())


TestCrowd = CrowdMachine.TestCase


def test_a_slot_idle_for_half_a_second_goes_to_who_waits_for_a_warm_backend() -> None:
    machine = CrowdMachine()
    machine.fleet()
    machine.offer(BOTH, 1, 0, 4)
    (home,) = machine.running.values()
    machine.finish(1, cancelled=False)
    for turns in (5, 6, 7):
        machine.offer(BOTH, 1, 0, turns)
    while machine.dispatch.backends[home].free:
        machine.offer(BOTH, 1, 0, 4)
    free = sum(backend.free for backend in machine.dispatch.backends.values())
    assert machine.waiting, "somebody is better off waiting"
    assert free, "and a slot is idle meanwhile"
    before = len(machine.running)
    machine.pass_time(PATIENCE_S - 0.1)
    assert len(machine.running) == before
    machine.pass_time(0.1)
    assert len(machine.running) > before


def test_a_slot_that_was_wanted_and_is_lost_to_a_resize_leaves_no_timer_due() -> None:
    machine = CrowdMachine()
    machine.fleet()
    machine.crowd(4, 0)
    backend = machine.dispatch.backends["two"]
    backend.idle_wanted_since = backend.idle_wanted_since or machine.now
    machine.take(machine.dispatch.put(machine.now, "two", slots=1, settles=True))
    assert not backend.free
    machine.pass_time(1.0)  # which holds that nothing stays due
