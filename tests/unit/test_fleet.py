"""What is believed of a backend: its own count is truth, reports fade, speeds are learned with care. Laws 1 and 5."""

from __future__ import annotations

import pytest

from gateway.core.fleet import (
    PRIOR_SERVICE_S,
    REPORT_FADES_S,
    Advice,
    Average,
    Backend,
    Fitness,
    Habits,
)


def backend(slots: int = 4, **fields: object) -> Backend:
    one = Backend("a", slots=slots, fitness=Fitness.UP)
    for name, value in fields.items():
        setattr(one, name, value)
    return one


@pytest.mark.parametrize(
    ("fitness", "takes_work", "is_hopeful"),
    [
        (Fitness.UP, True, True),
        (Fitness.SLEEPING, True, True),
        (Fitness.LOADING, False, True),
        (Fitness.DOWN, False, False),
    ],
)
def test_what_each_state_allows(fitness: Fitness, takes_work: bool, is_hopeful: bool) -> None:
    one = backend(fitness=fitness)
    assert (one.takes_work, one.is_hopeful) == (takes_work, is_hopeful)
    assert one.free == (4 if takes_work else 0)


def test_a_drained_or_broken_backend_takes_nothing_and_gives_no_hope() -> None:
    drained = backend(draining=True)
    assert not drained.takes_work
    assert not drained.is_hopeful
    broken = backend()
    broken.breaker.fail(0.0, at_once=True)
    assert not broken.takes_work
    assert not broken.is_hopeful
    assert broken.free == 0


def test_free_is_what_is_neither_in_flight_nor_settling() -> None:
    one = backend(in_flight=1)
    one.settle(0.0, 5.0, 2)
    assert one.settling_permits == 2
    assert one.free == 1
    one.expire_settling(4.9)
    assert one.free == 1
    one.expire_settling(5.1)
    assert one.free == 3


def test_after_a_shrink_free_is_none_and_never_negative() -> None:
    one = backend(in_flight=4)
    one.slots = 2
    assert one.free == 0


def test_on_trial_only_the_ramp_is_lent() -> None:
    one = backend(slots=8)
    one.breaker.fail(0.0, at_once=True)
    one.breaker.probe()
    assert one.free == 1
    one.in_flight = 1
    assert one.free == 0


def test_kept_slots_are_free_for_one_ticket_only() -> None:
    one = backend(reserved_by=7)
    assert one.free_for(7) == 4
    assert one.free_for(8) == 0


def test_requests_of_others_are_what_a_report_has_beyond_ours_and_fade_with_its_age() -> None:
    one = backend(in_flight=1)
    one.hear(Advice(at=10.0, running=3, waiting=2), asked_at=10.0)
    assert one.others(10.0) == pytest.approx(4.0)
    assert one.others(10.0 + REPORT_FADES_S / 2) == pytest.approx(2.0)
    assert one.others(10.0 + REPORT_FADES_S) == 0.0
    assert one.free == 3, "load of others never lowers what may be lent"


def test_a_report_that_still_counts_what_just_ended_says_nothing_of_others() -> None:
    one = backend()
    one.released.append((9.5, 2))
    one.hear(Advice(at=10.0, running=2), asked_at=10.0)
    assert one.others(10.0) == 0.0


def test_missing_figures_are_no_figures() -> None:
    one = backend()
    assert one.others(10.0) == 0.0
    one.settle(9.0, 60.0, 1)
    one.hear(Advice(at=10.0), asked_at=10.0)
    assert one.others(10.0) == 0.0
    assert one.settling_permits == 1, "silence frees nothing"


def test_a_report_frees_as_many_settling_slots_as_it_shows_idle() -> None:
    one = backend(in_flight=1)
    one.settle(5.0, 60.0, 1)
    one.settle(6.0, 60.0, 1)
    one.hear(Advice(at=10.0, running=2), asked_at=9.0)
    assert one.settling_permits == 1
    one.hear(Advice(at=12.0, running=1), asked_at=11.0)
    assert one.settling_permits == 0


def test_an_average_starts_at_its_prior_and_believes_the_first_sample() -> None:
    average = Average(PRIOR_SERVICE_S)
    assert average.value == PRIOR_SERVICE_S
    average.learn(2.0)
    assert average.value == 2.0


def test_one_wild_sample_moves_an_average_little() -> None:
    average = Average(1.0)
    for _ in range(20):
        average.learn(2.0)
    average.learn(2_000_000.0)
    assert average.value <= 2.0 * 1.6 + 1e-9
    average = Average(1.0)
    for _ in range(20):
        average.learn(2.0)
    average.learn(1e-9)
    assert average.value >= 2.0 * 0.8


def test_an_average_follows_a_change() -> None:
    average = Average(1.0)
    for _ in range(20):
        average.learn(10.0)
    for _ in range(30):
        average.learn(1.0)
    assert average.value == pytest.approx(1.0, rel=0.05)


@pytest.mark.parametrize("sample", [0.0, -1.0])
def test_a_sample_that_is_not_positive_says_nothing(sample: float) -> None:
    average = Average(3.0)
    average.learn(sample)
    assert (average.value, average.samples) == (3.0, 0)


def test_a_backend_that_was_never_used_is_thought_to_be_like_the_others() -> None:
    habits = Habits()
    used, fresh = Backend("a", habits), Backend("b", habits)
    for _ in range(10):
        used.service_s.learn(2.0)
    assert fresh.service_s.value == pytest.approx(2.0)
    assert fresh.service_s.samples == 0
    for _ in range(30):
        fresh.service_s.learn(8.0)
    assert fresh.service_s.value > 7.0
    assert used.service_s.value < 4.0
