"""A fleet and its ledger in simulated time: messages that take long, connections that break, processes that stand still.

What is asked of it is in test_lease_machine.py. Time is that of the world, in seconds; each gateway's clock runs at its
own rate. A connection keeps its order, as TCP does; what left on an older one may come after what left on a newer.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from gateway.core.dispatch import Decision, Limits, Offer, Refuse, Start
from gateway.core.fleet import Fitness
from gateway.core.lease import LEASE_S, RENEW_S, UNSEEN, Lease, Message, Reply, Use
from gateway.core.lease_dispatch import LeasedDispatch
from tests.property.lease_ledger import Ledger

STEP_S = 0.1
AGAIN_S = 0.3
PATIENCE_S = 12.0
BACKEND = "b"
POOL = frozenset({BACKEND})


@dataclass(eq=False)
class Line:
    """One connection. `up` and `down`: what is on its way, and when it arrives; down also when it left."""

    opens_at: float
    up: list[tuple[float, Message]] = field(default_factory=list)
    down: list[tuple[float, float, Message, Reply | None]] = field(default_factory=list)
    unanswered: list[Message] = field(default_factory=list)
    is_broken: bool = False
    is_open: bool = False
    sent_at: float = -1e9  # by the gateway's clock


@dataclass(eq=False)
class Gateway:
    """One process, as `runtime.cluster` runs it; and what it cannot know: `seen_at`, `excused`."""

    name: str
    rate: float
    born: float
    slots: int
    delay_up: float = 0.0
    delay_down: float = 0.0
    is_reachable: bool = True
    is_paused: bool = False
    speaks_first: bool = False
    lease: Lease = field(init=False)
    dispatch: LeasedDispatch = field(init=False)
    in_flight: dict[int, int] = field(default_factory=dict)  # ticket: permits
    excused: set[int] = field(default_factory=set)  # tickets of when it was cut off
    line: Line | None = None
    speaks_at: float = 0.0
    was_answered: bool = False
    seen_at: float = -1e9  # when the ledger last heard it
    over_at: float = -1e9  # when its lease was last over at the ledger, or not known there
    heard_at: float = -1e9  # when the last answer came
    told_at: float = -1e9  # when the ledger gave that answer
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

    @property
    def uses(self) -> dict[str, Use]:
        return self.dispatch.uses()

    def offer(self, t: float, permits: int) -> None:
        self.tickets += 1
        offer = Offer(self.tickets, "ann", POOL, permits=permits)
        self.take(t, self.dispatch.offer(self.clock(t), offer))

    def finish(self, t: float, count: int) -> None:
        for ticket in list(self.in_flight)[:count]:
            del self.in_flight[ticket]
            self.excused.discard(ticket)
            self.take(t, self.dispatch.release(self.clock(t), ticket))

    def leave(self, t: float) -> None:
        """All its clients that wait do."""
        for ticket in list(self.dispatch.queue.waiting):
            self.take(t, self.dispatch.cancel(self.clock(t), ticket))

    def take(self, t: float, decisions: list[Decision]) -> None:
        for one in decisions:
            assert not isinstance(one, Refuse) or one.reason != "no_backend"
            if isinstance(one, Start):
                self.in_flight[one.ticket] = self.dispatch.held[one.ticket].offer.permits
                unheard = t > self.seen_at + LEASE_S
                assert self.lease.is_alone or not unheard, "started by a lease that had ended"
                if self.is_cut_off(t):
                    self.excused.add(one.ticket)

    def is_cut_off(self, t: float) -> bool:
        """May it exceed the law? The ledger did not hear it for longer than its lease, and nothing that the ledger said
        since has reached it; or it holds nothing (or never heard what), and in all that time there was no answer.
        """
        lease = self.lease
        holding = lease._holdings[BACKEND]
        has_nothing = holding.floor > holding.hold or lease._epoch == UNSEEN
        unanswered = t > (self.heard_at if lease._epoch != UNSEEN else self.asked_at) + LEASE_S
        return lease.is_alone and (self.told_at < self.over_at or (has_nothing and unanswered))

    @property
    def asked_at(self) -> float:
        """When the oldest message left that may still be answered."""
        asked = self.line.unanswered if self.line is not None else []
        return asked[0].sent_at - 1000.0 + self.born if asked else -1e9

    def lend(self, t: float) -> None:
        self.take(t, self.dispatch.lend(self.clock(t), self.lease.shares, self.lease.until))


@dataclass
class World:
    slots: int
    t: float = 0.0
    ledger: Ledger = field(default_factory=Ledger)
    ledger_stands_until: float = 0.0
    ledger_down_until: float = 0.0  # nobody listens at its port
    was_recalled_too_much: bool = False  # after a restart, by somebody who had been cut off
    restarted_at: float = -1e9
    gateways: list[Gateway] = field(default_factory=list)
    strays: list[tuple[float, Gateway, Message]] = field(default_factory=list)
    born: int = 0
    epochs: int = 0

    # ---------------------------------------------------------------- events

    def join(self, rate: float, up: float = 0.0, down: float = 0.0) -> None:
        self.born += 1
        self.gateways.append(Gateway(f"g{self.born}", rate, self.t, self.slots, up, down))

    def kill(self, gateway: Gateway) -> None:
        """Its connections break, so the engine stops its work. What it has sent may still arrive."""
        self.gateways.remove(gateway)
        self.hang_up(gateway)

    def hang_up(self, gateway: Gateway, *, lose: bool = False) -> None:
        """Its connection is no more. What is on the way to the ledger arrives all the same, or is lost."""
        line, gateway.line = gateway.line, None
        if line is not None and not lose:
            self.strays += [(at, gateway, message) for at, message in line.up]

    def break_line(self, gateway: Gateway, *, lose: bool) -> None:
        """The gateway hears of it when it next listens."""
        line = gateway.line
        if line is not None:
            if not lose:
                self.strays += [(at, gateway, message) for at, message in line.up]
            line.up.clear()
            line.down.clear()
            line.is_broken = True

    def restart(self, after: float = 0.0) -> None:
        """The ledger is another process, and has forgotten everything; its sockets died with it."""
        for gateway in self.gateways:
            self.break_line(gateway, lose=True)
        self.strays.clear()
        self.epochs += 1
        self.restarted_at = self.ledger_stands_until = self.ledger_down_until = self.t + after
        self.ledger.restart(self.restarted_at, f"r{self.epochs}")
        self.was_recalled_too_much = False

    # ---------------------------------------------------------------- time

    def step(self) -> None:
        self.t += STEP_S
        if self.t >= self.ledger_stands_until:
            self.deliver_up()
        for gateway in self.gateways:
            if not gateway.is_paused:
                self.run(gateway)
        for gateway in self.gateways:
            self.note_who_is_cut_off(gateway)

    def deliver_up(self) -> None:
        for one in [one for one in self.strays if one[0] <= self.t]:
            self.strays.remove(one)
            self.hear(one[1], one[2])
        for gateway in self.gateways:
            line = gateway.line
            while line is not None and gateway.is_reachable and line.up and line.up[0][0] <= self.t:
                _, message = line.up.pop(0)
                reply = self.hear(gateway, message)
                before = line.down[-1][0] if line.down else 0.0
                line.down.append((max(self.t + gateway.delay_down, before), self.t, message, reply))

    def hear(self, gateway: Gateway, message: Message) -> Reply | None:
        is_recall = message.epoch != self.ledger.epoch
        reply = self.ledger.hear(self.t, message)
        if reply is not None:
            gateway.seen_at = self.t
            self.was_recalled_too_much |= is_recall and gateway.told_at < gateway.over_at
        return reply

    def granted(self, gateway: Gateway) -> int:
        """What the ledger has granted it."""
        member = self.ledger.members.get(gateway.name)
        return member.granted.get(BACKEND, 0) if member is not None else 0

    def run(self, gateway: Gateway) -> None:
        """A turn of its loop: timers and sockets in either order."""
        now = gateway.clock(self.t)
        gateway.take(self.t, gateway.dispatch.tick(now))
        for turn in (
            (self.speak, self.listen) if gateway.speaks_first else (self.listen, self.speak)
        ):
            turn(gateway, now)

    def speak(self, gateway: Gateway, now: float) -> None:
        if now < gateway.speaks_at and not gateway.was_answered:
            return
        gateway.speaks_at, gateway.was_answered = now + RENEW_S, False
        lease, line = gateway.lease, gateway.line
        if lease.tick(now, gateway.uses):
            gateway.lend(self.t)
        if line is None or not line.is_open:
            return
        if not line.unanswered or now >= line.sent_at + RENEW_S:
            message = lease.ask(now, gateway.uses)
            gateway.lend(self.t)
            before = line.up[-1][0] if line.up else 0.0
            line.up.append((max(self.t + gateway.delay_up, before), message))
            line.unanswered.append(message)
            line.sent_at = now

    def listen(self, gateway: Gateway, now: float) -> None:
        line = gateway.line
        if line is None:  # time to connect again
            round_trip = gateway.delay_up + gateway.delay_down
            gateway.line = Line(self.t + AGAIN_S + round_trip)
            return
        if (
            line.is_broken
            or self.t < self.ledger_down_until
            or (line.unanswered and now > line.unanswered[0].sent_at + PATIENCE_S * gateway.rate)
        ):
            self.fail(gateway, now)
            return
        if not line.is_open:
            stands = gateway.is_reachable and self.t >= self.ledger_stands_until
            if self.t >= line.opens_at and stands:
                line.is_open = True
                gateway.lease.hung_up()
                gateway.was_answered = True
            elif self.t > line.opens_at + PATIENCE_S:
                self.fail(gateway, now)
            return
        while line.down and line.down[0][0] <= self.t and gateway.is_reachable:
            _, told_at, message, reply = line.down.pop(0)
            line.unanswered.remove(message)
            if reply is None:
                self.fail(gateway, now)
                return
            gateway.told_at = told_at
            gateway.heard_at = self.t
            gateway.lease.heard(now, message, reply, gateway.uses)
            gateway.lend(self.t)
            gateway.was_answered = True

    def fail(self, gateway: Gateway, now: float) -> None:
        self.hang_up(gateway)
        gateway.lease.hung_up()
        gateway.lease.lost(now, gateway.uses)
        gateway.lend(self.t)

    def note_who_is_cut_off(self, gateway: Gateway) -> None:
        """What it has in flight by then may be too much."""
        forgotten = (
            gateway.seen_at <= self.restarted_at
            and self.t >= self.ledger.calm_until
            and gateway.name not in self.ledger.awaited
        )
        if self.t > gateway.seen_at + LEASE_S or forgotten:
            gateway.over_at = self.t
            gateway.excused |= set(gateway.in_flight)
