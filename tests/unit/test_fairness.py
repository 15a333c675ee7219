"""Law 8: by weight between keys, interactive before batch, arrival within a key, and nobody for ever."""

from __future__ import annotations

import itertools
import random
from collections import Counter

import pytest

from tests.unit.dispatch_desk import Desk


def test_within_a_key_the_order_is_that_of_arrival() -> None:
    desk = Desk(queue=20, a=1)
    tickets = desk.offers(8)
    desk.serve_all(7)
    assert desk.started == tickets


def test_keys_take_turns_however_many_each_has_waiting() -> None:
    desk = Desk(queue=40, a=1)
    desk.offers(12, "flood")
    desk.offers(3, "drop")
    started = desk.serve_all(6)
    assert started.count("drop") == 3
    assert started[:2].count("drop") == 1


@pytest.mark.parametrize("weight", [1.0, 2.0, 4.0])
def test_two_keys_that_both_always_wait_share_by_weight(weight: float) -> None:
    desk = Desk(queue=400, a=4)
    desk.offers(150, "heavy", weight=weight)
    desk.offers(150, "light")
    started = Counter(desk.serve_all(100))
    assert started["heavy"] / started["light"] == pytest.approx(weight, rel=0.2)


def test_permit_seconds_count_and_not_requests() -> None:
    """A key whose requests take two permits gets half as many starts."""
    desk = Desk(queue=400, a=4)
    desk.offers(100, "wide", permits=2)
    desk.offers(100, "narrow")
    started = Counter(desk.serve_all(60))
    assert started["narrow"] / started["wide"] == pytest.approx(2.0, rel=0.3)


def test_long_requests_are_settled_when_they_end() -> None:
    """Starts are charged alike; what was really used corrects it, so long answers are paid for."""
    desk = Desk(queue=2000, a=8)
    desk.offers(400, "long")
    desk.offers(400, "short")
    seconds = {"long": 4.0, "short": 1.0}
    used: Counter[str] = Counter()
    ends = {ticket: desk.now + seconds[desk.keys[ticket]] for ticket in desk.running}
    for _ in range(300):
        ticket = min(ends, key=lambda one: ends[one])
        used[desk.keys[ticket]] += round(seconds[desk.keys[ticket]])
        desk.end(ticket, after_s=ends.pop(ticket) - desk.now)
        ends |= {one: desk.now + seconds[desk.keys[one]] for one in desk.running if one not in ends}
    assert used["long"] / used["short"] == pytest.approx(1.0, rel=0.35)


def test_a_key_that_was_idle_has_saved_up_nothing() -> None:
    desk = Desk(queue=100, a=1)
    desk.offers(60, "busy")
    desk.serve_all(40)
    desk.offers(20, "late")
    started = desk.serve_all(10)
    assert 4 <= started.count("late") <= 6


def test_a_key_alone_gets_everything() -> None:
    desk = Desk(queue=20, a=3)
    desk.offers(12)
    assert len(desk.running) == 3
    assert len(desk.serve_all(9)) == 9


def test_interactive_goes_before_batch_but_every_eighth_start_is_batchs() -> None:
    desk = Desk(queue=200, a=1)
    desk.offer("person")
    desk.offers(40, "person")
    desk.offers(10, "robot", batch=True)
    started = desk.serve_all(32)
    assert started.count("robot") == 4
    gaps = [place for place, key in enumerate(started) if key == "robot"]
    assert all(later - earlier == 8 for earlier, later in itertools.pairwise(gaps))


def test_batch_gets_all_when_nobody_else_waits() -> None:
    desk = Desk(queue=20, a=2)
    desk.offers(8, "robot", batch=True)
    assert desk.serve_all(6) == ["robot"] * 6


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("slots", [1, 2, 4])
def test_who_is_first_in_its_own_line_waits_for_two_times_slots_starts_at_most(
    slots: int, seed: int
) -> None:
    """Whatever the others do: many requests, great weights, short and long ones, several permits."""
    rng = random.Random(seed)
    desk = Desk(queue=10_000, max_wait_s=1e9, a=slots)
    keys = [f"k{number}" for number in range(2 * slots)]  # with more, not all can be first
    for key in keys:
        desk.offers(30, key, weight=rng.choice([1.0, 10.0, 100.0]))
    quiet = 0
    for _ in range(25):
        ticket = desk.offer("quiet", weight=0.1)
        before = len(desk.started)
        while desk.waits(ticket):
            desk.end(rng.choice(list(desk.running)), after_s=rng.choice([0.1, 1.0, 20.0]))
            key = rng.choice(keys)
            desk.offer(key, weight=rng.choice([1.0, 100.0]))
        others = [one for one in desk.started[before:] if one != ticket]
        assert len(others) <= 2 * slots, f"overtaken {len(others)} times with {slots} slots"
        quiet += 1
    assert quiet == 25


def test_a_key_that_floods_cannot_be_its_own_rival_under_another_conversation() -> None:
    desk = Desk(queue=100, a=1)
    for number in range(20):
        desk.offer("flood", conversation=number)
    desk.offer("drop")
    assert "drop" in desk.serve_all(2)


def test_lines_of_keys_that_are_gone_are_forgotten() -> None:
    desk = Desk(queue=0, a=1)
    for number in range(3000):
        ticket = desk.offer(f"key-{number}")
        if ticket in desk.running:
            desk.end(ticket)
    assert len(desk.dispatch.queue.lines._lines) < 1100
