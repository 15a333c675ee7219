"""The lease protocol under skewed clocks, slow and broken connections, pauses, kills and a ledger that forgets.

The law: all gateways together never have more in flight than the slots. The stated exception: a living gateway that
was cut off from the ledger for longer than its lease may exceed it, by its own share. Slowness is no excuse: a gateway
whose messages reach the ledger is not cut off, however late they come and whether or not it hears an answer.

And when all is well again, no slot is lost: whoever asks for all of them has them, also those of the dead.
"""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from gateway.core.lease import LEASE_S, SEEN_S
from tests.property.lease_world import BACKEND, STEP_S, Gateway, World

which = st.integers(0, 2)
delays = st.sampled_from([0.0, 0.1, 0.5, 0.9, 1.5, 3.0, 6.5, 10.0])


class LeaseMachine(RuleBasedStateMachine):
    """Time is that of the world, in seconds."""

    @initialize(
        slots=st.integers(1, 6),
        rates=st.lists(st.sampled_from([0.95, 1.0, 1.05]), min_size=2, max_size=3),
    )
    def fleet(self, slots: int, rates: list[float]) -> None:
        self.world = World(slots)
        for rate in rates:
            self.world.join(rate)
        self.advance(1.0)

    # ---------------------------------------------------------------- clients

    @rule(which=which, permits=st.sampled_from([1, 1, 1, 2]), count=st.integers(1, 6))
    def request(self, which: int, permits: int, count: int) -> None:
        gateway = self.pick(which)
        if not gateway.is_paused and permits <= self.world.slots:
            for _ in range(count):
                gateway.offer(self.world.t, permits)

    @rule(which=which, seconds=st.sampled_from([0.1, 0.3, 1.0]))
    def crowd(self, which: int, seconds: float) -> None:
        """More than it can have, for a while."""
        self.request(which, 1, self.world.slots + 1)
        self.advance(seconds)

    @rule(which=which, other=which, seconds=st.sampled_from([0.2, 1.0]))
    def shift(self, which: int, other: int, seconds: float) -> None:
        """The load moves from one gateway to another."""
        self.finish(which, self.world.slots)
        self.request(other, 1, self.world.slots)
        self.advance(seconds)

    @rule(which=which, count=st.integers(1, 3))
    def finish(self, which: int, count: int) -> None:
        """The engine is done. A stopped process has its answers in the socket and hears of it later."""
        gateway = self.pick(which)
        if not gateway.is_paused:
            gateway.finish(self.world.t, count)

    # ---------------------------------------------------------------- faults

    @rule(which=which, up=delays, down=delays)
    def slow_down(self, which: int, up: float, down: float) -> None:
        gateway = self.pick(which)
        gateway.delay_up, gateway.delay_down = up, down

    @rule(which=which)
    def become_quick(self, which: int) -> None:
        self.slow_down(which, 0.0, 0.0)

    @rule(which=which, lose=st.booleans())
    def connection_breaks(self, which: int, lose: bool) -> None:
        self.world.break_line(self.pick(which), lose=lose)

    @rule(which=which, reachable=st.booleans())
    def network(self, which: int, reachable: bool) -> None:
        self.pick(which).is_reachable = reachable

    @rule(which=which, seconds=st.sampled_from([1.0, 3.0, 7.5]))
    def ledger_stands_still(self, which: int, seconds: float) -> None:
        self.world.ledger_stands_until = self.world.t + seconds
        self.crowd(which, 1.0)

    @rule(which=which, seconds=st.sampled_from([0.0, 0.0, 3.0]), newcomer=st.booleans())
    def ledger_restarts_empty(self, which: int, seconds: float, newcomer: bool) -> None:
        self.world.restart(seconds)
        if newcomer:
            self.world.join(1.0)
            self.world.kill(self.pick(which))
        self.advance(seconds)
        self.crowd(which, 1.0)

    @rule(which=which, other=which, up=delays, down=delays, lose=st.booleans())
    def newer_connection_overtakes(
        self, which: int, other: int, up: float, down: float, lose: bool
    ) -> None:
        """What it said on the older one arrives late, and says less than what it has by then."""
        self.leave(which)
        self.crowd(other, 0.3)
        self.slow_down(which, up, down)
        self.advance(1.0)
        self.world.break_line(self.pick(which), lose=lose)
        self.become_quick(which)
        self.leave(other)
        self.crowd(which, 3.0)

    @rule(which=which, other=which, up=delays, down=delays)
    def hand_over_slowly(self, which: int, other: int, up: float, down: float) -> None:
        """It has slots, gives them back on a slow road, and wants them again when the others have them."""
        self.crowd(which, 1.0)
        self.slow_down(which, up, down)
        self.leave(which)
        self.crowd(other, 1.0)
        self.request(which, 1, 2)
        self.advance(3.0)

    @rule(which=which, other=which, seconds=st.sampled_from([3.0, 8.5]))
    def cut_off(self, which: int, other: int, seconds: float) -> None:
        """And back, with more in flight than there are slots."""
        self.crowd(which, 1.0)
        self.pick(which).is_reachable = False
        self.crowd(other, seconds)
        self.pick(which).is_reachable = True
        self.advance(1.0)
        self.finish(which, 2)

    @rule(which=which)
    def stop_process(self, which: int) -> None:
        self.pick(which).is_paused = True

    @rule(which=which, seconds=st.sampled_from([1.0, 5.5, 7.0, 9.0]), speaks=st.booleans())
    def stop_and_continue(self, which: int, seconds: float, speaks: bool) -> None:
        """What is in its sockets is seen before its timers fire, or after."""
        gateway = self.pick(which)
        gateway.is_paused = True
        self.advance(seconds)
        gateway.is_paused, gateway.speaks_first = False, speaks
        self.finish(which, 1)
        self.request(which, 1, 1)
        self.advance(STEP_S)

    @rule(which=which)
    def continue_process(self, which: int) -> None:
        self.pick(which).is_paused = False

    @rule(which=which, rate=st.sampled_from([0.95, 1.05]), up=delays, down=delays)
    def kill(self, which: int, rate: float, up: float, down: float) -> None:
        """Another one comes up in its place, and has work at once."""
        self.world.kill(self.pick(which))
        self.world.join(rate, up, down)
        self.request(len(self.world.gateways) - 1, 1, 2)

    def leave(self, which: int) -> None:
        """All its clients."""
        gateway = self.pick(which)
        if not gateway.is_paused:
            gateway.leave(self.world.t)
            gateway.finish(self.world.t, 100)

    # ---------------------------------------------------------------- time

    @rule(seconds=st.sampled_from([0.1, 0.3, 1.0, 3.0, 8.0]))
    def pass_time(self, seconds: float) -> None:
        self.advance(seconds)

    def advance(self, seconds: float) -> None:
        for _ in range(round(seconds / STEP_S)):
            self.world.step()
            self.law()
            self.the_ledger_grants_no_slot_twice()
            self.nobody_counts_on_more_than_the_ledger_has_for_it()

    # ---------------------------------------------------------------- the law

    @invariant()
    def law(self) -> None:
        world = self.world
        total = sum(one.held for one in world.gateways)
        excess = sum(one.excess for one in world.gateways)
        assert total <= world.slots + excess, (total, world.slots, excess)

    @invariant()
    def each_gateway_keeps_to_its_own_hold(self) -> None:
        for one in self.world.gateways:
            assert one.held <= self.world.slots, "more than all slots in one gateway"

    def nobody_counts_on_more_than_the_ledger_has_for_it(self) -> None:
        """Whether or not anybody asks for it just now."""
        world = self.world
        for one in world.gateways:
            has_ended = one.clock(world.t) >= one.lease.until
            may_be_forgotten = one.seen_at <= world.restarted_at
            if one.is_paused or has_ended or may_be_forgotten or one.is_cut_off(world.t):
                continue
            holding = one.lease._holdings[BACKEND]
            counts_on = max(holding.hold, one.dispatch.backends[BACKEND].share)
            assert counts_on <= world.granted(one), (one.name, counts_on, world.granted(one))

    @invariant()
    def the_ledger_grants_no_slot_twice(self) -> None:
        if not self.world.was_recalled_too_much:
            granted = sum(one.granted.get(BACKEND, 0) for one in self.world.ledger.members.values())
            assert granted <= self.world.slots, granted

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.all_is_well_again()

    def all_is_well_again(self) -> None:
        """Each gateway in turn wants all slots, and has them."""
        world = self.world
        for one in world.gateways:
            one.is_paused, one.is_reachable = False, True
            one.delay_up = one.delay_down = 0.0
            world.break_line(one, lose=True)
        world.strays.clear()
        world.ledger_stands_until = world.ledger_down_until = 0.0
        self.advance(1.0)
        self.work_off()
        self.advance(LEASE_S + SEEN_S + 1.0)  # what is over is gone
        for one in world.gateways:
            assert not one.lease.is_alone
            self.work_off()
            self.advance(1.5)
            for _ in range(world.slots):
                one.offer(world.t, 1)
            self.advance(1.0)
            assert one.held == world.slots, (one.name, one.held)

    def work_off(self) -> None:
        """Whoever waits leaves, and what runs is done."""
        for one in self.world.gateways:
            one.leave(self.world.t)
            one.finish(self.world.t, 100)

    def pick(self, which: int) -> Gateway:
        return self.world.gateways[which % len(self.world.gateways)]


TestLeases = LeaseMachine.TestCase
