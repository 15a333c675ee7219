"""A backend that is removed and put again: its engine is the same one, and still at work for us. Law 1."""

from __future__ import annotations

from tests.unit.dispatch_desk import Desk


def test_what_it_has_in_flight_counts_when_it_comes_back() -> None:
    desk = Desk(a=2)
    first, second = desk.offers(2)
    desk.dispatch.remove("a")
    desk.put("a", 2)
    desk.report("a")
    third = desk.offer(pool="a")
    assert desk.waits(third)
    desk.end(first)
    assert desk.running[third] == "a"
    desk.end(second)
    desk.end(third)
    assert desk.dispatch.backends["a"].in_flight == 0


def test_what_ended_while_it_was_gone_does_not_count() -> None:
    desk = Desk(a=1)
    first = desk.offer()
    desk.dispatch.remove("a")
    desk.end(first)
    desk.put("a", 1)
    desk.report("a")
    assert desk.running[desk.offer(pool="a")] == "a"


def test_its_slots_that_settle_go_on_settling() -> None:
    desk = Desk()
    desk.put("a", 1, settles=True)
    desk.report("a")
    desk.end(desk.offer(), cancelled=True)
    desk.dispatch.remove("a")
    desk.put("a", 1, settles=True)
    desk.report("a", asked_at=desk.now - 1)
    second = desk.offer(pool="a")
    assert desk.waits(second), "the engine has not noticed the cancel yet"
    desk.wait(61)
    assert not desk.waits(second)


def test_it_takes_no_work_before_it_has_been_asked_how_it_is() -> None:
    desk = Desk(a=2)
    desk.offer()
    desk.dispatch.remove("a")
    desk.put("a", 2)
    assert not desk.dispatch.backends["a"].takes_work


def test_a_backend_without_work_comes_back_as_a_new_one() -> None:
    desk = Desk(a=1)
    before = desk.dispatch.backends["a"]
    desk.end(desk.offer())
    desk.dispatch.remove("a")
    desk.put("a", 1)
    assert desk.dispatch.backends["a"] is not before
