"""The lease protocol under skewed clocks, lost and late messages, pauses, kills and a ledger that forgets.

The law: all gateways together never have more in flight than the slots. The stated exception: a living gateway that
was cut off from the ledger for longer than its lease may exceed it, by its own share.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from gateway.core.dispatch import Decision, Limits, Offer, Refuse, Start
from gateway.core.fleet import Fitness
from gateway.core.lease import ASK_S, LEASE_S, PAUSED_S, Lease, Message, Reply
from gateway.core.lease_dispatch import LeasedDispatch
from tests.property.lease_ledger import Ledger

STEP_S = 0.05
AGAIN_S = 0.3
BACKEND = "b"
POOL = frozenset({BACKEND})


@dataclass(eq=False)
class Gateway:
    """One process. Its clock runs at its own rate; what it cannot know is kept in `seen_at` and `excess`."""

    name: str
    rate: float
    born: float
    slots: int
    lease: Lease = field(init=False)
    dispatch: LeasedDispatch = field(init=False)
    excused: set[int] = field(default_factory=set)  # tickets of when it was cut off
    in_flight: dict[int, int] = field(default_factory=dict)  # ticket: permits
    waits_for: Message | None = None
    next_at: float = 0.0  # of its own clock
    is_paused: bool = False
    seen_at: float = -1e9  # when the ledger last heard it
    heard_at: float = -1e9  # when the last message left that it has the answer to
    cut_off: bool = False
    tickets: int = 0

    def __post_init__(self) -> None:
        self.lease = Lease(self.name)
        self.dispatch = LeasedDispatch(Limits(queue=100, max_wait_s=1e9))
        self.dispatch.put(0.0, BACKEND, slots=self.slots)
        self.dispatch.report(0.0, BACKEND, Fitness.UP, None, 0.0)

    def clock(self, t: float) -> float:
        return 1000.0 + (t - self.born) * self.rate

    @property
    def held(self) -> int:
        return sum(self.in_flight.values())

    @property
    def excess(self) -> int:
        return sum(n for ticket, n in self.in_flight.items() if ticket in self.excused)

    def take(self, t: float, decisions: list[Decision]) -> None:
        for one in decisions:
            assert not isinstance(one, Refuse) or one.reason != "no_backend"
            if isinstance(one, Start):
                lapsed = t > self.seen_at + LEASE_S and not self.lease.is_alone
                assert not lapsed, "started by a lease that had ended while the process stood still"
                if self.cut_off:
                    self.excused.add(one.ticket)
                self.in_flight[one.ticket] = self.dispatch.held[one.ticket].offer.permits

    def lend(self, t: float) -> None:
        self.take(t, self.dispatch.lend(self.clock(t), self.lease.shares, self.lease.until))


class LeaseMachine(RuleBasedStateMachine):
    """Time is that of the world, in seconds."""

    def __init__(self) -> None:
        super().__init__()
        self.t = 0.0
        self.ledger = Ledger()
        self.is_reachable = True
        self.restarted_at = -1e9
        self.sent: list[tuple[Gateway, Message]] = []  # on their way, maybe for long
        self.replies: list[tuple[Gateway, Message, Reply]] = []
        self.gateways: list[Gateway] = []
        self.names = 0
        self.epochs = 0
        self.slots = 0

    @initialize(
        slots=st.integers(1, 6),
        rates=st.lists(st.sampled_from([0.95, 1.0, 1.05]), min_size=2, max_size=3),
    )
    def fleet(self, slots: int, rates: list[float]) -> None:
        self.slots = slots
        for rate in rates:
            self.join(rate)
        self.advance(0.3)

    def join(self, rate: float) -> None:
        self.names += 1
        self.gateways.append(Gateway(f"g{self.names}", rate, self.t, self.slots))

    # ---------------------------------------------------------------- clients

    @rule(which=st.integers(0, 2), permits=st.sampled_from([1, 1, 1, 2]), count=st.integers(1, 6))
    def request(self, which: int, permits: int, count: int) -> None:
        gateway = self.pick(which)
        if gateway.is_paused or permits > self.slots:
            return
        for _ in range(count):
            gateway.tickets += 1
            offer = Offer(gateway.tickets, "ann", POOL, permits=permits)
            gateway.take(self.t, gateway.dispatch.offer(gateway.clock(self.t), offer))

    @rule(which=st.integers(0, 2), seconds=st.sampled_from([0.05, 0.2, 1.0]))
    def crowd(self, which: int, seconds: float) -> None:
        """More than it can have, for a while."""
        self.request(which, 1, self.slots + 1)
        self.advance(seconds)

    @rule(which=st.integers(0, 2), other=st.integers(0, 2), seconds=st.sampled_from([0.2, 1.0]))
    def shift(self, which: int, other: int, seconds: float) -> None:
        """The load moves from one gateway to another."""
        self.finish(which, self.slots)
        self.request(other, 1, self.slots)
        self.advance(seconds)

    @rule(which=st.integers(0, 2), count=st.integers(1, 3))
    def finish(self, which: int, count: int) -> None:
        """The engine is done. A stopped process has its answers in the socket and hears of it later."""
        gateway = self.pick(which)
        if gateway.is_paused:
            return
        for ticket in list(gateway.in_flight)[:count]:
            del gateway.in_flight[ticket]
            gateway.take(self.t, gateway.dispatch.release(gateway.clock(self.t), ticket))

    # ---------------------------------------------------------------- faults

    @rule(which=st.integers(0, 2))
    def stop_process(self, which: int) -> None:
        self.pick(which).is_paused = True

    @rule(which=st.integers(0, 2), seconds=st.sampled_from([1.0, 5.5, 7.0]))
    def stop_and_continue(self, which: int, seconds: float) -> None:
        """What is in its sockets is seen before its timers fire."""
        gateway = self.pick(which)
        gateway.is_paused = True
        self.advance(seconds)
        gateway.is_paused = False
        self.finish(which, 1)
        self.request(which, 1, 1)

    @rule(which=st.integers(0, 2))
    def continue_process(self, which: int) -> None:
        self.pick(which).is_paused = False

    @rule(which=st.integers(0, 2), rate=st.sampled_from([0.95, 1.05]))
    def kill(self, which: int, rate: float) -> None:
        """Its connections break, so the engine stops its work; another one comes up in its place."""
        gateway = self.pick(which)
        self.gateways.remove(gateway)
        self.sent = [one for one in self.sent if one[0] is not gateway]
        self.join(rate)

    @rule(reachable=st.booleans())
    def network(self, reachable: bool) -> None:
        self.is_reachable = reachable

    @rule()
    def ledger_restarts_empty(self) -> None:
        """Its sockets die with it."""
        self.sent.clear()
        self.epochs += 1
        self.ledger.restart(self.t, f"r{self.epochs}")
        self.restarted_at = self.t

    @precondition(lambda self: self.sent)
    @rule(which=st.integers(0, 50))
    def lose(self, which: int) -> None:
        self.sent.pop(which % len(self.sent))

    @precondition(lambda self: len(self.sent) > 1)
    @rule(which=st.integers(0, 50))
    def deliver_out_of_order(self, which: int) -> None:
        self.arrive(which % len(self.sent))

    # ---------------------------------------------------------------- time

    @rule(seconds=st.sampled_from([0.05, 0.2, 0.5, 1.0, 3.0, 8.0]), delay=st.booleans())
    def pass_time(self, seconds: float, delay: bool) -> None:
        """`delay`: nothing that is sent arrives meanwhile."""
        self.advance(seconds, delay=delay)

    def advance(self, seconds: float, *, delay: bool = False) -> None:
        for _ in range(round(seconds / STEP_S)):
            self.t += STEP_S
            for gateway in self.gateways:
                if not gateway.is_paused:
                    self.run(gateway)
            while self.sent and self.is_reachable and not delay:
                self.arrive(0)
            self.note_who_is_cut_off()
            self.law()

    def run(self, gateway: Gateway) -> None:
        """What its task does: as `Cluster._keep`."""
        now, lease = gateway.clock(self.t), gateway.lease
        gateway.take(self.t, gateway.dispatch.tick(now))
        message = gateway.waits_for
        if message is not None:
            answer = next((r for g, m, r in self.replies if g is gateway and m is message), None)
            self.replies = [one for one in self.replies if one[0] is not gateway]
            if answer is not None:
                lease.heard(now, message, answer, gateway.dispatch.uses())
                gateway.heard_at = self.t - (now - message.sent_at) / gateway.rate
            elif now - message.sent_at < ASK_S:
                return
            else:
                lease.lost(now, message.sent_at, gateway.dispatch.uses())
            before = gateway.held
            gateway.lend(self.t)
            stood_still = now - message.sent_at > ASK_S + PAUSED_S
            assert gateway.held == before or not stood_still, "it has to ask again first"
            gateway.waits_for = None
            gateway.next_at = now + (AGAIN_S if lease.is_alone else STEP_S)
        elif now >= gateway.next_at:
            gateway.waits_for = lease.ask(now, gateway.dispatch.uses())
            gateway.lend(self.t)
            self.sent.append((gateway, gateway.waits_for))

    def arrive(self, place: int) -> None:
        gateway, message = self.sent.pop(place)
        reply = self.ledger.hear(self.t, message)
        if reply is not None:
            gateway.seen_at = self.t
            self.replies.append((gateway, message, reply))

    # ---------------------------------------------------------------- the law

    def note_who_is_cut_off(self) -> None:
        for gateway in self.gateways:
            forgotten = (
                gateway.seen_at < self.restarted_at
                and self.t >= self.ledger.calm_until
                and gateway.name not in self.ledger.awaited
            )
            unheard = self.t > min(gateway.seen_at, gateway.heard_at) + LEASE_S
            gateway.cut_off = unheard or forgotten
            if gateway.cut_off:
                gateway.excused |= set(gateway.in_flight)
            gateway.excused &= set(gateway.in_flight)

    @invariant()
    def law(self) -> None:
        total = sum(one.held for one in self.gateways)
        excess = sum(one.excess for one in self.gateways)
        assert total <= self.slots + excess, (total, self.slots, excess)

    @invariant()
    def each_gateway_keeps_to_its_own_hold(self) -> None:
        for one in self.gateways:
            assert one.held <= self.slots, "more than all slots in one gateway"

    def pick(self, which: int) -> Gateway:
        return self.gateways[which % len(self.gateways)]


TestLeases = LeaseMachine.TestCase
