"""Busy is not dead: what a round without an answer means."""

from __future__ import annotations

import pytest

from gateway.engines.base import State
from gateway.engines.liveness import Activity, Silence, Verdict, has_proof_of_life, judge

QUIET = Activity()
STREAMING = Activity(in_flight=1, last_traffic_age_s=0.0, bytes_age_s=0.2)


def test_a_refused_connection_is_down_at_once_even_with_streams() -> None:
    assert judge(Silence.REFUSED, 1, 3, STREAMING, State.UP) == Verdict(State.DOWN)


@pytest.mark.parametrize("silence", [Silence.TIMEOUT, Silence.BROKEN])
def test_two_silent_rounds_leave_the_state_and_the_third_is_down(silence: Silence) -> None:
    assert judge(silence, 2, 3, QUIET, State.UP) == Verdict(State.UP)
    assert judge(silence, 3, 3, QUIET, State.UP) == Verdict(State.DOWN)


def test_bytes_on_a_live_stream_outweigh_any_number_of_silent_rounds() -> None:
    assert judge(Silence.TIMEOUT, 99, 3, STREAMING, State.UP) == Verdict(State.UP, busy=True)


def test_a_stream_that_stopped_moving_proves_nothing() -> None:
    stuck = Activity(in_flight=1, last_traffic_age_s=0.0, bytes_age_s=60.0)

    assert judge(Silence.TIMEOUT, 3, 3, stuck, State.UP) == Verdict(State.DOWN)


@pytest.mark.parametrize("was", [None, State.DOWN])
def test_who_was_never_up_does_not_get_patience(was: State | None) -> None:
    assert judge(Silence.TIMEOUT, 1, 3, STREAMING, was) == Verdict(State.DOWN)


def test_proof_of_life_needs_a_request_in_flight_and_a_recent_byte() -> None:
    assert has_proof_of_life(STREAMING)
    assert not has_proof_of_life(Activity(in_flight=1))
    assert not has_proof_of_life(Activity(in_flight=0, bytes_age_s=0.1))
