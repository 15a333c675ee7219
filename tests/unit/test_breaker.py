"""The breaker, row by row of its table."""

from __future__ import annotations

import pytest

from gateway.core.breaker import FIRST_COOLDOWN_S, MAX_COOLDOWN_S, Breaker, BreakerState

CLOSED, OPEN, HALF = BreakerState.CLOSED, BreakerState.OPEN, BreakerState.HALF_OPEN


def opened(now: float = 0.0) -> Breaker:
    breaker = Breaker()
    breaker.fail(now, at_once=True)
    return breaker


def test_two_failures_are_an_accident_and_three_in_a_row_open_it() -> None:
    breaker = Breaker()
    for _ in range(2):
        breaker.fail(0.0, at_once=False)
        assert breaker.state is CLOSED
    breaker.fail(0.0, at_once=False)
    assert breaker.state is OPEN
    assert breaker.is_open


def test_an_answer_in_between_forgets_the_run() -> None:
    breaker = Breaker()
    for _ in range(10):
        breaker.fail(0.0, at_once=False)
        breaker.fail(0.0, at_once=False)
        breaker.serve(slots=4)
    assert breaker.state is CLOSED


def test_a_refused_connection_opens_it_at_once() -> None:
    assert opened().state is OPEN


def test_a_backend_that_is_alone_is_opened_by_refused_connections_only() -> None:
    breaker = Breaker()
    for _ in range(50):
        breaker.fail(0.0, at_once=False, alone=True)
    assert breaker.state is CLOSED
    breaker.fail(0.0, at_once=True, alone=True)
    assert breaker.state is OPEN


def test_its_run_counts_on_so_that_it_opens_when_it_is_no_longer_alone() -> None:
    breaker = Breaker()
    for _ in range(5):
        breaker.fail(0.0, at_once=False, alone=True)
    breaker.fail(0.0, at_once=False)
    assert breaker.state is OPEN


def test_open_it_lends_nothing_and_after_the_cooldown_one() -> None:
    breaker = opened(now=10.0)
    assert breaker.cap(8) == 0
    breaker.tick(10.0 + FIRST_COOLDOWN_S - 0.01)
    assert breaker.state is OPEN
    breaker.tick(10.0 + FIRST_COOLDOWN_S)
    assert breaker.state is HALF
    assert breaker.cap(8) == 1


def test_a_proof_of_life_shortens_the_cooldown() -> None:
    breaker = opened()
    breaker.probe()
    assert breaker.state is HALF
    assert breaker.cap(8) == 1


@pytest.mark.parametrize(("slots", "caps"), [(1, []), (2, [1]), (8, [1, 2, 4]), (5, [1, 2, 4])])
def test_half_open_lends_one_then_two_then_four_and_closes_at_full(
    slots: int, caps: list[int]
) -> None:
    breaker = opened()
    breaker.probe()
    seen = []
    while breaker.state is HALF:
        seen.append(breaker.cap(slots))
        breaker.serve(slots)
    assert seen == (caps or [1])
    assert breaker.state is CLOSED
    assert breaker.cap(slots) == slots


def test_a_failed_trial_doubles_the_cooldown_up_to_its_bound_and_an_end_resets_it() -> None:
    breaker = opened()
    cooldowns = []
    now = 0.0
    for _ in range(8):
        cooldowns.append(breaker.until - now)
        now = breaker.until
        breaker.tick(now)
        breaker.fail(now, at_once=False)
    assert cooldowns[:4] == [FIRST_COOLDOWN_S * factor for factor in (1, 2, 4, 8)]
    assert cooldowns[-1] == MAX_COOLDOWN_S
    breaker.probe()
    breaker.serve(slots=1)
    breaker.fail(now, at_once=True)
    assert breaker.until == now + FIRST_COOLDOWN_S


def test_failures_while_it_is_open_do_not_put_off_its_end() -> None:
    """Requests that were in flight when it opened break later, one by one."""
    breaker = opened(now=0.0)
    breaker.fail(0.9, at_once=False)
    assert breaker.until == FIRST_COOLDOWN_S
