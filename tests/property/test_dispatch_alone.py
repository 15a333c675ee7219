"""A request that finds an empty line is decided without a place in it: what comes out is the same."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import astuple

from gateway.core.chain import chain_of
from gateway.core.dispatch import Decision, Dispatch, Limits, Offer, Start, Used
from gateway.core.fleet import Advice, Fitness
from gateway.core.residence import Memory

NAMES = ("a", "b", "c")
POOLS = [frozenset("a"), frozenset("ab"), frozenset("abc"), frozenset("bc")]
PROMPTS = [chain_of([bytes([n]) * 4_000, b"x" * n]) for n in range(4)]


class AlwaysInLine(Dispatch):
    """The same laws, and everybody goes through the line."""

    def _start_alone(self, _now: float, _offer: Offer) -> None:
        return None


offers = st.tuples(
    st.just("offer"),
    st.builds(
        dict,
        key=st.sampled_from(["ann", "bob"]),
        pool=st.sampled_from(POOLS),
        permits=st.sampled_from([1, 1, 1, 2, 5]),
        prompt_bytes=st.integers(0, 60_000),
        batch=st.sampled_from([False, False, True]),
        weight=st.sampled_from([1.0, 4.0]),
        model=st.sampled_from(["m", "n"]),
        chain=st.sampled_from(PROMPTS),
        conversation=st.integers(0, 3),
        max_tokens=st.sampled_from([None, 0, 100]),
    ),
)
others = st.one_of(
    st.tuples(st.just("release"), st.integers(0, 9), st.booleans(), st.integers(0, 3_000)),
    st.tuples(st.just("report"), st.sampled_from(NAMES), st.sampled_from(list(Fitness))),
    st.tuples(st.just("busy"), st.sampled_from(NAMES), st.integers(0, 5)),
    st.tuples(st.just("failed"), st.sampled_from(NAMES)),
    st.tuples(st.just("resize"), st.sampled_from(NAMES), st.integers(1, 3)),
    st.tuples(st.just("wait"), st.sampled_from([0.01, 0.3, 2.0, 40.0])),
)


class Desk:
    """One dispatch and those who are in it."""

    def __init__(self, dispatch: Dispatch) -> None:
        self.dispatch = dispatch
        self.now = 100.0
        self.tickets = 0
        self.running: list[int] = []
        for number, name in enumerate(NAMES):
            dispatch.put(self.now, name, slots=2 + number, kv_limit=9_000 if name == "b" else None)
            dispatch.report(self.now, name, Fitness.UP, None, self.now)
        dispatch.hold("c", Memory(frozenset("m"), most=1), self.now)

    def do(self, what: str, *args: object) -> list[Decision]:
        self.now += 0.001
        decisions: list[Decision] = getattr(self, what)(*args)
        self.running += [one.ticket for one in decisions if isinstance(one, Start)]
        return decisions

    def offer(self, fields: dict) -> list[Decision]:
        self.tickets += 1
        return self.dispatch.offer(self.now, Offer(self.tickets, **fields))

    def release(self, index: int, served: bool, cached: int) -> list[Decision]:
        if not self.running:
            return []
        ticket = self.running.pop(index % len(self.running))
        self.dispatch.first_token(self.now, ticket)
        used = Used(1_000, min(cached, 1_000), 10)
        return self.dispatch.release(self.now, ticket, served=served, used=used)

    def report(self, name: str, fitness: Fitness) -> list[Decision]:
        return self.dispatch.report(self.now, name, fitness, None, self.now)

    def busy(self, name: str, running: int) -> list[Decision]:
        advice = Advice(self.now, running, 0)
        return self.dispatch.report(self.now, name, Fitness.UP, advice, self.now)

    def failed(self, name: str) -> list[Decision]:
        return self.dispatch.failed(self.now, name, at_once=True)

    def resize(self, name: str, slots: int) -> list[Decision]:
        return self.dispatch.put(self.now, name, slots=slots)

    def wait(self, seconds: float) -> list[Decision]:
        self.now += seconds
        return self.dispatch.tick(self.now)


def told(decisions: list[Decision]) -> list[object]:
    """What the caller sees of them; a price names its backend, which is another object in each desk."""
    out: list[object] = []
    for one in decisions:
        if isinstance(one, Start):
            prices = sorted((p.backend.name, *astuple(p)[1:]) for p in one.prices)
            out.append((one.ticket, one.backend, one.affinity, astuple(one.price)[1:], prices))
        else:
            out.append(one)
    return out


@given(st.lists(st.one_of(offers, offers, others), max_size=40))
def test_a_request_that_finds_an_empty_line_goes_where_it_would_go_from_the_line(
    events: list[tuple],
) -> None:
    at_once, in_line = Desk(Dispatch(Limits(queue=3))), Desk(AlwaysInLine(Limits(queue=3)))
    for event in events:
        assert told(at_once.do(*event)) == told(in_line.do(*event)), event
        assert at_once.dispatch.wake_at(at_once.now) == in_line.dispatch.wake_at(in_line.now)
