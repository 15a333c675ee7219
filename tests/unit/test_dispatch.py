"""Admission and choice of backend, event by event: who starts, who waits, who is refused, and when."""

from __future__ import annotations

import pytest

from gateway.core.dispatch import PATIENCE_S, Used
from gateway.core.fleet import DECODE_SETTLE_S, MAX_SETTLE_S, Fitness
from gateway.core.prefix import Chain, chain_of
from tests.unit.dispatch_desk import Desk

# ------------------------------------------------------------------ slots and queue


def test_exactly_slots_start_and_queue_wait_and_the_rest_is_refused_at_once() -> None:
    desk = Desk(queue=2, a=2)
    tickets = desk.offers(10)
    assert desk.started == tickets[:2]
    assert [ticket for ticket in tickets if desk.waits(ticket)] == tickets[2:4]
    assert [desk.reason(ticket) for ticket in tickets[4:]] == ["gateway_queue_full"] * 6
    assert desk.dispatch.depth(frozenset("a")) == 2


def test_an_automatic_queue_is_as_long_as_the_backends_have_slots() -> None:
    desk = Desk(a=2, b=3)
    assert desk.dispatch.limit(frozenset("ab")) == 5
    desk.report("b", Fitness.DOWN)
    assert desk.dispatch.limit(frozenset("ab")) == 2


def test_a_queue_of_none_still_serves_what_has_a_slot() -> None:
    desk = Desk(queue=0, a=1)
    first, second = desk.offers(2)
    assert first in desk.running
    assert desk.reason(second) == "gateway_queue_full"
    desk.end(first)
    assert desk.offer() in desk.running


def test_models_that_share_backends_share_waiting_places() -> None:
    desk = Desk(queue=1, a=1, b=1)
    desk.offers(2, pool="ab")
    waiting = desk.offer(pool="a")
    assert desk.waits(waiting)
    assert desk.reason(desk.offer(pool="ab")) == "gateway_queue_full"
    assert desk.waits(desk.offer(pool="b")), "nobody waits for b alone"


def test_a_released_slot_goes_to_the_first_in_line_in_the_same_step() -> None:
    desk = Desk(queue=3, a=1)
    first, second, third = desk.offers(3)
    desk.end(first)
    assert second in desk.running
    assert desk.waits(third)
    desk.leave(second)
    assert third in desk.running


def test_who_leaves_gives_its_place_to_a_newcomer() -> None:
    desk = Desk(queue=1, a=1)
    _, waiting = desk.offers(2)
    desk.leave(waiting)
    assert desk.waits(desk.offer())


def test_a_release_or_a_cancel_may_be_repeated() -> None:
    desk = Desk(a=1)
    ticket = desk.offer()
    desk.end(ticket)
    assert desk.dispatch.release(desk.now, ticket) == []
    assert desk.dispatch.cancel(desk.now, ticket) == []
    assert desk.dispatch.backends["a"].in_flight == 0


def test_no_backend_that_is_up_is_a_refusal_of_its_own() -> None:
    desk = Desk(a=1)
    desk.report("a", Fitness.DOWN)
    assert desk.reason(desk.offer()) == "no_backend"
    assert desk.reason(desk.offer(pool="x")) == "no_backend"


def test_a_loading_backend_is_waited_for() -> None:
    desk = Desk(queue=1, a=1)
    desk.report("a", Fitness.LOADING)
    ticket = desk.offer()
    assert desk.waits(ticket)
    desk.report("a", Fitness.UP)
    assert ticket in desk.running


def test_who_waits_for_backends_that_all_died_is_told_at_once() -> None:
    desk = Desk(queue=2, a=1)
    _, waiting = desk.offers(2)
    desk.report("a", Fitness.DOWN)
    assert desk.reason(waiting) == "no_backend"
    assert desk.dispatch.queued == 0


def test_nobody_waits_longer_than_max_wait() -> None:
    desk = Desk(queue=2, max_wait_s=5.0, a=1)
    desk.offer()
    early = desk.offer()
    desk.wait(3.0)
    late = desk.offer()
    desk.wait(1.9)
    assert desk.waits(early)
    desk.wait(0.2)
    assert desk.reason(early) == "gateway_queue_timeout"
    assert desk.waits(late)


def test_a_resize_below_what_is_in_flight_lends_nothing_and_cuts_nothing() -> None:
    desk = Desk(queue=5, a=3)
    first, second, third, waiting = desk.offers(4)
    desk.put("a", 1)
    assert set(desk.running) == {first, second, third}
    desk.end(first)
    desk.end(second)
    assert desk.waits(waiting)
    desk.end(third)
    assert waiting in desk.running


def test_what_a_removed_backend_has_in_flight_still_comes_back() -> None:
    desk = Desk(a=1)
    ticket = desk.offer()
    desk.dispatch.remove("a")
    desk.end(ticket)
    assert ticket not in desk.dispatch.held
    assert desk.reason(desk.offer(pool="a")) == "no_backend"


def test_a_draining_backend_takes_nothing_new() -> None:
    desk = Desk(queue=3, a=1, b=1)
    desk.put("a", 1, draining=True)
    first, second = desk.offers(2)
    assert desk.running == {first: "b"}
    assert desk.waits(second)


# ------------------------------------------------------------------ several permits


def test_more_permits_than_any_backend_has_slots_is_no_matter_of_waiting() -> None:
    desk = Desk(a=2, b=3)
    assert desk.reason(desk.offer(permits=4)) == "too_many_choices"
    assert desk.offer(permits=3) in desk.running


def test_a_request_for_three_permits_keeps_what_gets_free_until_it_has_them() -> None:
    desk = Desk(queue=9, a=4)
    first, second, third, fourth = desk.offers(4)
    wide = desk.offer("bob", permits=3)
    small = desk.offer("cat")
    desk.end(first)
    desk.end(second)
    assert desk.waits(wide)
    assert desk.waits(small), "freed slots are kept for who is first in order"
    desk.end(third)
    assert wide in desk.running
    assert desk.dispatch.backends["a"].in_flight == 4
    desk.end(fourth)
    assert small in desk.running


@pytest.mark.parametrize("how", ["it leaves", "its time is over"])
def test_what_was_kept_is_free_when_who_it_was_kept_for_is_gone(how: str) -> None:
    desk = Desk(queue=9, max_wait_s=5.0, a=2)
    first, second = desk.offers(2)
    wide = desk.offer("bob", permits=2)
    desk.wait(3.0)
    small = desk.offer("cat")
    desk.end(first)
    assert desk.waits(small)
    if how == "it leaves":
        desk.leave(wide)
    else:
        desk.wait(2.1)
        assert desk.reason(wide) == "gateway_queue_timeout"
    assert small in desk.running
    assert second in desk.running


def test_nobody_waits_for_a_slot_that_is_kept_for_somebody_else_while_another_is_free() -> None:
    """Also when its cache is there: to this request the slot is busy."""
    desk = Desk(queue=9, a=2, b=1)
    chain = chain_of([b"x" * 2048])
    desk.end(desk.offer(pool="a", prompt_bytes=2048, chain=chain), after_s=5.0)
    desk.offer(pool="a")
    wide = desk.offer("bob", pool="a", permits=2)
    warm = desk.offer("cat", pool="ab", prompt_bytes=2048, chain=chain)
    assert desk.waits(wide)
    assert desk.running[warm] == "b"


def test_on_trial_no_slot_is_kept_for_a_request_that_needs_more_than_the_ramp_gives() -> None:
    """Else the one trial slot would idle, and the ramp would never rise to what is waited for."""
    desk = Desk(queue=9, a=4)
    desk.dispatch.failed(desk.now, "a", at_once=True)
    desk.report("a")
    wide = desk.offer("bob", permits=2)
    small = desk.offers(3, "cat")
    assert desk.waits(wide)
    assert small[0] in desk.running
    desk.end(small[0])
    assert wide in desk.running


# ------------------------------------------------------------------ settling


def settling_desk() -> Desk:
    desk = Desk(queue=5)
    desk.put("a", 1, settles=True)
    desk.report("a")
    return desk


def test_a_cancelled_slot_of_a_settling_engine_is_not_lent_again_at_once() -> None:
    desk = settling_desk()
    first, second = desk.offers(2)
    desk.dispatch.first_token(desk.now, first)
    desk.end(first, cancelled=True)
    backend = desk.dispatch.backends["a"]
    assert (backend.in_flight, backend.settling_permits) == (0, 1)
    assert desk.waits(second)
    desk.wait(DECODE_SETTLE_S + 0.01)
    assert second in desk.running


def test_a_cancelled_slot_of_another_engine_is_free_at_once() -> None:
    desk = Desk(queue=5, a=1)
    first, second = desk.offers(2)
    desk.end(first, cancelled=True)
    assert second in desk.running


def test_a_cancelled_prefill_settles_for_what_is_left_of_it_but_a_minute_at_most() -> None:
    desk = settling_desk()
    desk.dispatch.backends["a"].prefill_rate.learn(1500)
    first = desk.offer(prompt_bytes=4 * 1500 * 10)  # ten seconds at that rate
    second = desk.offer("bob")
    desk.wait(4.0)
    desk.leave(first)
    desk.wait(5.8)
    assert desk.waits(second)
    desk.wait(0.3)
    assert second in desk.running
    desk.end(second)
    huge = desk.offer(prompt_bytes=4 * 1500 * 10_000)
    third = desk.offer("bob")
    desk.dispatch.limits.max_wait_s = 1000.0
    desk.leave(huge)
    desk.leave(third)
    desk.wait(MAX_SETTLE_S + 0.1)
    assert desk.offer() in desk.running


def test_an_answer_without_a_first_token_teaches_the_rate_if_its_engine_tells_the_time() -> None:
    desk = Desk(a=1)
    backend = desk.dispatch.backends["a"]
    desk.end(desk.offer(prompt_bytes=4000), after_s=5.0, used=Used(1000, 0, 10))
    assert (backend.prefill_rate.samples, backend.answer_s.own) == (0, 5.0)
    desk.end(desk.offer(prompt_bytes=4000), after_s=5.0, used=Used(1000, 0, 10, prefill_s=2.0))
    assert (backend.prefill_rate.own, backend.answer_s.own) == (500.0, 4.0), "mean of 5 and 3"


def test_while_no_rate_is_known_a_cancelled_prefill_is_taken_for_a_slow_one() -> None:
    desk = settling_desk()
    first = desk.offer(prompt_bytes=4 * 1000)  # twenty seconds at 50 tokens/s
    second = desk.offer("bob")
    desk.leave(first)
    desk.wait(19.0)
    assert desk.waits(second)
    desk.wait(1.5)
    assert second in desk.running


def test_a_cancelled_decode_settles_for_the_batch_of_the_prefill_beside_it() -> None:
    desk = Desk(queue=5, a=2)
    desk.put("a", 2, settles=True)
    desk.dispatch.backends["a"].prefill_rate.learn(1000)
    decoding = desk.offer()
    desk.dispatch.first_token(desk.now, decoding)
    desk.offer("bob", prompt_bytes=4 * 100_000)
    waiting = desk.offer("cat")
    desk.leave(decoding)
    desk.wait(2.0)
    assert desk.waits(waiting), (
        "the engine looks at who left once its batch of 2,048 tokens is done"
    )
    desk.wait(0.5)
    assert waiting in desk.running


def test_a_report_asked_for_after_the_cancel_says_that_the_slot_is_idle() -> None:
    desk = settling_desk()
    first = desk.offer(prompt_bytes=600_000)
    second = desk.offer("bob")
    desk.wait(1.0)
    asked_before = desk.now - 0.5
    desk.leave(first)
    desk.report("a", asked_at=asked_before, running=0)
    assert desk.waits(second), "that report is older than the cancel"
    desk.now += 0.2
    desk.report("a", asked_at=desk.now - 0.1, running=1)
    assert desk.waits(second), "it is still at work"
    desk.report("a", asked_at=desk.now - 0.1, running=0)
    assert second in desk.running


# ------------------------------------------------------------------ another backend


def test_a_retry_goes_to_each_backend_at_most_once_and_then_is_exhausted() -> None:
    desk = Desk(a=1, b=1, c=1)
    ticket = desk.offer()
    met = [desk.running[ticket]]
    for _ in range(2):
        assert desk.dispatch.has_other(desk.now, ticket)
        desk.retry(ticket)
        met.append(desk.running[ticket])
    assert sorted(met) == ["a", "b", "c"]
    assert not desk.dispatch.has_other(desk.now, ticket)
    desk.retry(ticket)
    assert desk.reason(ticket) == "exhausted"
    assert all(backend.in_flight == 0 for backend in desk.dispatch.backends.values())


def test_a_retry_waits_at_the_head_of_its_line_within_its_first_deadline() -> None:
    desk = Desk(queue=5, max_wait_s=5.0, a=1, b=1)
    one = desk.offer(pool="b")
    ticket = desk.offer()
    assert desk.running[ticket] == "a"
    desk.wait(1.0)
    younger = desk.offer(pool="b")
    desk.retry(ticket)
    desk.end(one)
    assert desk.running[ticket] == "b"
    assert desk.waits(younger)

    desk = Desk(queue=5, max_wait_s=5.0, a=1, b=1)
    desk.offer(pool="b")
    ticket = desk.offer()
    desk.wait(3.0)
    desk.retry(ticket)
    assert desk.waits(ticket)
    desk.wait(2.1)
    assert desk.reason(ticket) == "gateway_queue_timeout"


def test_a_retry_after_its_deadline_is_exhausted() -> None:
    desk = Desk(queue=5, max_wait_s=5.0, a=1, b=1)
    ticket = desk.offer()
    desk.wait(6.0)
    assert not desk.dispatch.has_other(desk.now, ticket)
    desk.retry(ticket)
    assert desk.reason(ticket) == "exhausted"


def test_a_request_on_retry_never_waits_for_the_backend_that_sent_it_away() -> None:
    desk = Desk(queue=5, a=2, b=1)
    busy = desk.offer(pool="b")
    ticket = desk.offer(pool="ab")
    assert desk.running[ticket] == "a"
    desk.retry(ticket)
    assert desk.waits(ticket)
    desk.wait(2.0)
    assert desk.waits(ticket), "a has free slots, and has said no"
    desk.end(busy)
    assert desk.running[ticket] == "b"


# ------------------------------------------------------------------ warm backends


def warm_desk() -> tuple[Desk, int, Chain]:
    """Backend a holds a long conversation and is busy; b is cold and idle; a wait for a is short."""
    desk = Desk(queue=9, a=1, b=1)
    chain = chain_of([b"x" * 512 * 400])
    size = {"prompt_bytes": chain.size, "chain": chain}
    for _ in range(3):
        ticket = desk.offer(pool="a", **size)
        desk.end(ticket, after_s=0.2, used=Used(chain.size // 4, 0))
    busy = desk.offer(pool="a")
    return desk, busy, chain


def test_a_request_waits_for_its_warm_backend_but_no_slot_idles_for_more_than_half_a_second() -> (
    None
):
    desk, _, chain = warm_desk()
    ticket = desk.offer(prompt_bytes=chain.size, chain=chain)
    assert desk.waits(ticket), "34 s of prefill on b against a fifth of a second of waiting for a"
    desk.wait(PATIENCE_S * 0.8)
    assert desk.waits(ticket)
    desk.wait(PATIENCE_S * 0.2 + 0.01)
    assert desk.running[ticket] == "b"


def test_a_request_that_waited_for_its_warm_backend_starts_there_when_it_is_free() -> None:
    desk, busy, chain = warm_desk()
    ticket = desk.offer(prompt_bytes=chain.size, chain=chain)
    desk.end(busy, after_s=0.2)
    assert desk.running[ticket] == "a"


def test_a_slot_that_one_request_passes_by_goes_to_the_next_at_once() -> None:
    desk, _, chain = warm_desk()
    patient = desk.offer(prompt_bytes=chain.size, chain=chain)
    other = desk.offer("bob", prompt_bytes=100)
    assert desk.running[other] == "b"
    assert desk.waits(patient)


# ------------------------------------------------------------------ expected waits


def test_an_expected_wait_refuses_only_after_eight_requests_were_measured() -> None:
    def crowded(measured: int) -> Desk:
        desk = Desk(queue=100, max_wait_s=30.0, a=1)
        for _ in range(measured):
            desk.end(desk.offer(), after_s=10.0)
        desk.offers(9)
        return desk

    assert not crowded(7).refused, "a prior, or seven samples, refuse nobody"
    desk = crowded(8)
    assert len(desk.refused) == 5
    assert desk.dispatch.queued == 3, "ten seconds each: three of them in thirty"
    assert {desk.reason(ticket) for ticket in desk.refused} == {"gateway_queue_full"}


def test_a_key_of_its_own_is_not_judged_by_the_line_of_another() -> None:
    desk = Desk(queue=100, max_wait_s=30.0, a=1)
    for _ in range(8):
        desk.end(desk.offer(), after_s=10.0)
    desk.offers(9, "flood")
    assert desk.waits(desk.offer("drop")), "in a fair order it is second, not fourth"


def test_who_waits_for_other_backends_makes_nobody_wait_longer() -> None:
    desk = Desk(queue=100, max_wait_s=30.0, a=1, b=1)
    for pool in "ab":
        for _ in range(8):
            desk.end(desk.offer(pool=pool), after_s=10.0)
    for key in ("one", "two", "three", "four", "five"):
        desk.offers(2, key, pool="b")
    desk.offer("drop", pool="a")
    assert desk.waits(desk.offer("drop", pool="a")), "one slot ahead of it, ten seconds"


def test_a_refusal_says_how_long_the_line_takes_to_drain() -> None:
    desk = Desk(queue=4, a=2)
    for _ in range(8):
        desk.end(desk.offer(), after_s=3.0)
    desk.offers(6)
    refused = desk.offer()
    assert desk.refused[refused].retry_after_s == pytest.approx((5 + 1) * 3.0 / 2, rel=0.2)


# ------------------------------------------------------------------ who gives way, and headers alone


def test_a_key_that_has_none_waiting_takes_the_newest_place_of_who_has_most() -> None:
    desk = Desk(queue=3, a=1)
    desk.offers(4, "flood")
    newest = max(desk.keys)
    fresh = desk.offer("drop")
    assert desk.waits(fresh)
    assert desk.reason(newest) == "gateway_queue_full"
    assert desk.reason(desk.offer("drop")) == "gateway_queue_full", "once it has one waiting"
    assert desk.dispatch.queued == 3


def test_nobody_gives_way_who_waited_for_half_of_its_time_or_is_the_only_one_of_its_key() -> None:
    desk = Desk(queue=2, max_wait_s=10.0, a=1)
    desk.offers(3, "flood")
    desk.wait(5.1)
    assert desk.reason(desk.offer("drop")) == "gateway_queue_full"
    desk = Desk(queue=2, a=1)
    desk.offers(2, "ann")
    desk.offer("bob")
    assert desk.reason(desk.offer("cat")) == "gateway_queue_full"


def test_a_refusal_from_headers_alone_needs_every_pool_full_and_nobody_to_give_way() -> None:
    desk = Desk(queue=1, a=1, b=1)
    a, b = frozenset("a"), frozenset("b")
    desk.offers(2, pool="a")
    assert desk.dispatch.full_for(desk.now, "ann", [a]) is not None
    assert desk.dispatch.full_for(desk.now, "bob", [a]) is not None, "one waiting: none gives way"
    assert desk.dispatch.full_for(desk.now, "ann", [a, b]) is None
    desk.offers(2, pool="b")
    assert desk.dispatch.full_for(desk.now, "ann", [a, b]) is not None


def test_asking_whether_all_is_full_changes_nothing() -> None:
    desk = Desk(queue=2, a=1)
    desk.offers(3, "flood")
    for _ in range(3):
        assert desk.dispatch.full_for(desk.now, "drop", [frozenset("a")]) is None
    assert desk.dispatch.queued == 2
    assert desk.waits(desk.offer("drop"))
