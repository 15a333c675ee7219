"""A KV cache that slots share: what is promised of it, and who waits for room."""

from __future__ import annotations

import pytest

from gateway.core.dispatch import Used
from gateway.core.fleet import Fitness
from gateway.core.room import FIRST_OUTPUT_TOKENS, Room
from tests.unit.dispatch_desk import Desk

TOKEN = 4  # bytes, before anything was learned


def desk(kv_limit: int, slots: int = 4, **how: bool) -> Desk:
    made = Desk(queue=99)
    made.put("a", slots, kv_limit=kv_limit, **how)
    made.report("a", Fitness.UP)
    return made


@pytest.mark.parametrize(
    ("max_tokens", "promised"),
    [(None, 100 + FIRST_OUTPUT_TOKENS), (50, 150), (0, 100), (9_999, 100 + FIRST_OUTPUT_TOKENS)],
)
def test_a_request_needs_its_prompt_and_a_likely_answer(
    max_tokens: int | None, promised: int
) -> None:
    assert Room().need(100, 1, max_tokens) == promised
    assert Room().need(100, 3, max_tokens) == 3 * promised


def test_a_likely_answer_is_longer_than_nine_of_ten_that_were_seen() -> None:
    room = Room()
    for length in (10, 20, 30, 40, 50, 60, 70):
        room.learn(length)
    assert room.output_p90 == FIRST_OUTPUT_TOKENS, "seven are too few"
    for length in (80, 90, 5000):
        room.learn(length)
    assert room.output_p90 == 5000
    for _ in range(90):
        room.learn(20)
    assert room.output_p90 == 20, "and what is long ago does not count"


def test_who_does_not_fit_waits_although_a_slot_is_free_and_starts_when_there_is_room() -> None:
    one = desk(kv_limit=1000)
    first = one.offer(prompt_bytes=500 * TOKEN, max_tokens=100)
    second = one.offer(prompt_bytes=500 * TOKEN, max_tokens=100)
    assert one.waits(second)
    assert one.dispatch.backends["a"].free == 3
    one.end(first, after_s=1.0)
    assert second in one.running


def test_a_request_that_is_alone_fits_whatever_its_size() -> None:
    one = desk(kv_limit=1000)
    giant = one.offer(prompt_bytes=5000 * TOKEN)
    assert giant in one.running
    small = one.offer(prompt_bytes=TOKEN, max_tokens=1)
    assert one.waits(small)
    one.end(giant)
    assert small in one.running


def test_a_large_request_that_is_first_is_not_overtaken_for_ever_by_small_ones() -> None:
    one = desk(kv_limit=1000)
    small = [one.offer("bob", prompt_bytes=200 * TOKEN, max_tokens=100) for _ in range(3)]
    large = one.offer("ann", prompt_bytes=800 * TOKEN, max_tokens=100)
    later = [one.offer("ann", prompt_bytes=50 * TOKEN, max_tokens=10) for _ in range(3)]
    assert all(one.waits(ticket) for ticket in (large, *later))
    for ticket in small:
        one.end(ticket, after_s=1.0)
    assert large in one.running
    one.end(large)
    assert set(later) <= set(one.running)


def test_what_was_kept_for_a_large_request_is_free_when_its_client_leaves() -> None:
    one = desk(kv_limit=1000)
    one.offer(prompt_bytes=500 * TOKEN, max_tokens=100)
    large = one.offer("bob", prompt_bytes=800 * TOKEN)
    small = one.offer("cat", prompt_bytes=100 * TOKEN, max_tokens=10)
    assert one.waits(small)
    one.leave(large)
    assert small in one.running


def test_a_cancelled_request_holds_its_room_until_its_slot_has_settled() -> None:
    one = desk(kv_limit=1000, settles=True)
    one.dispatch.backends["a"].prefill_rate.learn(1500)
    first = one.offer(prompt_bytes=500 * TOKEN, max_tokens=100)
    one.end(first, cancelled=True)
    second = one.offer(prompt_bytes=500 * TOKEN, max_tokens=100)
    assert one.waits(second)
    one.wait(1.0)
    assert second in one.running


def test_slots_with_room_of_their_own_know_no_limit() -> None:
    one = Desk(a=4)
    assert all(ticket in one.running for ticket in one.offers(4, prompt_bytes=9_000_000))
    assert one.dispatch.backends["a"].room.promised == 0


def test_short_answers_leave_room_for_more() -> None:
    one = desk(kv_limit=3000)
    for _ in range(10):
        ticket = one.offer(prompt_bytes=100 * TOKEN)
        one.end(ticket, after_s=1.0, used=Used(100, 0, 20))
    many = [one.offer(prompt_bytes=100 * TOKEN) for _ in range(4)]
    assert all(ticket in one.running for ticket in many), "four of 120 tokens, not of 1,124"
