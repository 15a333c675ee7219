"""Expected time to first token, term by term, and who wins a tie."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.core import cost
from gateway.core.cost import Price
from gateway.core.fleet import Advice, Backend, Fitness


def backend(
    name: str = "a", *, rate: float = 1000.0, answer_s: float = 10.0, **fields: Any
) -> Backend:
    one = Backend(name, slots=2, fitness=Fitness.UP)
    one.prefill_rate.learn(rate)
    one.answer_s.learn(answer_s)
    for field, value in fields.items():
        setattr(one, field, value)
    return one


def price(one: Backend, tokens: int = 0, cached: int = 0, **how: Any) -> Price:
    return cost.price(
        one,
        100.0,
        tokens * 4,
        cached * 4,
        **{"permits": 1, "promised": 0, "ahead": 0, "free": one.free, **how},
    )


def test_with_a_free_slot_it_is_the_uncached_part_of_the_prompt() -> None:
    found = price(backend(), tokens=3000, cached=1000)
    assert found.total_s == pytest.approx(2.0)
    assert (found.wait_s, found.own_tokens) == (0.0, 2000)


def test_more_cached_than_asked_for_costs_nothing() -> None:
    assert price(backend(), tokens=10, cached=500).total_s == 0.0


def test_what_was_sent_there_and_has_no_first_token_is_ahead_of_it() -> None:
    found = price(backend(backlog_tokens=4000), tokens=1000)
    assert found.backlog_s == pytest.approx(4.0)
    assert found.total_s == pytest.approx(5.0)


def test_without_a_free_slot_it_waits_for_its_share_of_an_answers_time() -> None:
    busy = backend(in_flight=2)
    assert price(busy).wait_s == pytest.approx(2.5), "the next one to end is half-way, on average"
    assert price(busy, promised=5, ahead=3).wait_s == pytest.approx(17.5)


def test_what_is_computed_while_it_waits_is_not_ahead_of_it_any_more() -> None:
    busy = backend(in_flight=2, backlog_tokens=4000)
    assert (price(busy).wait_s, price(busy).backlog_s) == pytest.approx((2.5, 1.5))


def test_a_request_for_two_permits_waits_where_only_one_is_free() -> None:
    half = backend(in_flight=1)
    assert price(half, permits=1).wait_s == 0.0
    assert price(half, permits=2).wait_s > 0.0


def test_requests_of_others_lengthen_the_wait_while_their_report_is_fresh() -> None:
    busy = backend(in_flight=2)
    alone = price(busy).wait_s
    busy.hear(Advice(at=100.0, running=6), asked_at=100.0)
    assert price(busy).wait_s == pytest.approx(alone * 9)
    busy.hear(Advice(at=80.0, running=6), asked_at=80.0)
    assert price(busy).wait_s == pytest.approx(alone)


def test_a_cold_prefill_costs_as_often_as_others_want_this_backend() -> None:
    assert price(backend(), tokens=1000, promised=4).own_s == pytest.approx(5.0)
    assert price(backend(), tokens=1000, cached=1000, promised=4).own_s == 0.0


def test_a_cold_prefill_costs_as_often_as_requests_are_in_flight_there() -> None:
    assert price(backend(in_flight=1), tokens=1000).own_s == pytest.approx(2.0)
    assert price(backend(in_flight=1), tokens=1000, cached=1000).own_s == 0.0


def test_the_cheapest_wins() -> None:
    cheap, dear = price(backend("a"), tokens=1000), price(backend("b"), tokens=2000)
    assert cost.cheapest([dear, cheap], 0) is cheap


@pytest.mark.parametrize(("tokens", "tied"), [(1000, True), (1049, True), (1100, False)])
def test_within_five_percent_the_less_used_one_wins(tokens: int, tied: bool) -> None:
    used, unused = backend("a"), backend("b")
    used.settle(100.0, 5.0, 1)
    prices = [price(used, tokens=1000), price(unused, tokens=tokens)]
    assert cost.cheapest(prices, 0).backend is (unused if tied else used)


def test_within_ten_milliseconds_too() -> None:
    used, unused = backend("a", in_flight=1), backend("b")
    assert cost.cheapest([price(used, tokens=0), price(unused, tokens=9)], 0).backend is unused
    assert cost.cheapest([price(used, tokens=0), price(unused, tokens=12)], 0).backend is used


def test_a_settling_slot_counts_as_used() -> None:
    settling, free = backend("a"), backend("b")
    settling.settle(100.0, 5.0, 1)
    assert cost.cheapest([price(settling), price(free)], 0).backend is free


def test_among_equals_a_conversation_always_goes_to_the_same_and_conversations_spread() -> None:
    prices = [price(backend(name)) for name in "abcd"]
    chosen = {}
    for conversation in range(200):
        one = cost.cheapest(prices, conversation).backend.name
        assert cost.cheapest(prices[::-1], conversation).backend.name == one
        chosen[conversation] = one
    counts = [list(chosen.values()).count(name) for name in "abcd"]
    assert min(counts) > 20


def test_one_backend_less_moves_only_the_conversations_that_it_had() -> None:
    prices = [price(backend(name)) for name in "abcd"]
    for conversation in range(100):
        before = cost.cheapest(prices, conversation).backend.name
        after = cost.cheapest(prices[:3], conversation).backend.name
        assert before in ("d", after)
