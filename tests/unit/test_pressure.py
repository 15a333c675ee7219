"""Law 7: an engine's 429 or 503 lowers what we send it, for a while, and is no fault."""

from __future__ import annotations

from tests.unit.dispatch_desk import Desk


def test_a_refusal_of_the_engine_lowers_what_it_is_lent_to_what_it_was_bearing() -> None:
    desk = Desk(queue=9, a=4)
    first, second, third = desk.offers(3)
    desk.dispatch.pressed(desk.now, third)
    backend = desk.dispatch.backends["a"]
    desk.end(third)
    late = desk.offer()
    assert backend.lendable == 2
    assert late not in desk.running
    desk.end(first, after_s=0.1)
    assert late in desk.running, "a place that gets free is lent again"
    assert second in desk.running


def test_it_gets_one_permit_more_after_each_second_without_a_refusal() -> None:
    desk = Desk(queue=9, a=4)
    tickets = desk.offers(4)
    desk.dispatch.pressed(desk.now, tickets[1])
    desk.dispatch.pressed(desk.now, tickets[3])
    backend = desk.dispatch.backends["a"]
    assert backend.lendable == 3
    desk.wait(1.1)
    assert backend.lendable == 4
    assert backend.pressure.cap is None


def test_no_pressure_lowers_a_capacity_below_one_or_opens_the_breaker() -> None:
    desk = Desk(queue=9, a=4)
    only = desk.offer()
    for _ in range(20):
        desk.dispatch.pressed(desk.now, only)
    backend = desk.dispatch.backends["a"]
    assert backend.lendable == 1
    assert not backend.breaker.is_open
    desk.end(only)
    assert desk.offer() in desk.running
