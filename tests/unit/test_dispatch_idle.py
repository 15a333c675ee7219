"""How long slots are kept free for affinity is told: once, whoever gets the slot in the end."""

from __future__ import annotations

import pytest

from gateway.core.dispatch import PATIENCE_S, Used
from gateway.core.prefix import chain_of
from tests.unit.dispatch_desk import Desk


def patient_desk() -> tuple[Desk, int, int]:
    """Backend b is idle, and a request waits for a, where its conversation is; the tickets of both."""
    desk = Desk(queue=9, a=1, b=1)
    chain = chain_of([b"x" * 512 * 400])
    size = {"prompt_bytes": chain.size, "chain": chain}
    for _ in range(3):
        desk.end(desk.offer(pool="a", **size), after_s=0.2, used=Used(chain.size // 4, 0))
    busy = desk.offer(pool="a")
    return desk, busy, desk.offer(**size)


def test_a_slot_that_was_kept_free_until_the_warm_one_came_is_told() -> None:
    desk, busy, patient = patient_desk()
    assert desk.waits(patient)
    assert desk.dispatch.idle_spells() == []
    desk.end(busy, after_s=0.2)
    assert desk.running[patient] == "a"
    assert desk.dispatch.idle_spells() == [pytest.approx(0.2)]
    assert desk.dispatch.idle_spells() == []


def test_a_slot_that_was_given_away_in_the_end_is_told_and_was_kept_half_a_second_at_most() -> None:
    desk, _, patient = patient_desk()
    desk.wait(PATIENCE_S + 0.01)
    assert desk.running[patient] == "b"
    (spell,) = desk.dispatch.idle_spells()
    assert PATIENCE_S * 0.8 <= spell <= PATIENCE_S + 0.26  # a tick is a quarter of a second


def test_nothing_is_told_where_nobody_waits() -> None:
    desk = Desk(a=1, b=1)
    ticket = desk.offer()
    desk.wait(3.0)
    desk.end(ticket)
    assert desk.dispatch.idle_spells() == []
