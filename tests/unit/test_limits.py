"""A key's own limits: requests at once, requests and tokens a minute."""

from __future__ import annotations

import pytest

from gateway.core.errors import GatewayError, headers_of
from gateway.core.keys import Key
from gateway.core.limits import Limits


def key(**limits: int) -> Key:
    return Key(name="alice", hash=b"", **limits)


def refused(limits: Limits, now: float, who: Key, tokens: float = 0.0) -> GatewayError:
    with pytest.raises(GatewayError) as caught:
        limits.charge(now, who, tokens)
    return caught.value


def test_a_key_without_limits_is_never_refused() -> None:
    limits = Limits()
    for _ in range(1000):
        limits.enter(key())
        limits.charge(0.0, key(), 1e9)


def test_one_more_than_max_in_flight_is_refused_until_one_left() -> None:
    limits, alice = Limits(), key(max_in_flight=2)
    limits.enter(alice)
    limits.enter(alice)
    with pytest.raises(GatewayError) as caught:
        limits.enter(alice)
    assert caught.value.key == "key_concurrency"
    assert caught.value.retry_after_s == 2.0
    limits.leave(alice)
    limits.enter(alice)


def test_keys_do_not_share_their_limits() -> None:
    limits = Limits()
    alice, bob = key(max_in_flight=1, rpm=1), Key(name="bob", hash=b"", max_in_flight=1, rpm=1)
    for one in (alice, bob):
        limits.enter(one)
        limits.charge(0.0, one, 0)
        assert refused(limits, 0.0, one).key == "key_rate_limit"


def test_requests_a_minute_come_back_evenly() -> None:
    limits, alice = Limits(), key(rpm=6)
    for _ in range(6):
        limits.charge(100.0, alice, 0)
    error = refused(limits, 100.0, alice)
    assert error.retry_after_s == pytest.approx(10.0)
    refused(limits, 109.9, alice)
    limits.charge(110.0, alice, 0)
    refused(limits, 110.0, alice)


def test_no_more_than_a_minutes_worth_is_saved_up() -> None:
    limits, alice = Limits(), key(rpm=3)
    limits.charge(0.0, alice, 0)
    for _ in range(3):
        limits.charge(1e6, alice, 0)
    refused(limits, 1e6, alice)


def test_a_refused_request_takes_nothing() -> None:
    limits, alice = Limits(), key(rpm=1, tpm=1000)
    limits.charge(0.0, alice, 10)
    for second in range(1, 60):
        refused(limits, float(second), alice, 10)
    limits.charge(60.0, alice, 10)
    assert limits.usage["alice"].tokens is not None
    assert limits.usage["alice"].tokens.level == pytest.approx(990)


def test_tokens_are_charged_by_estimate_and_settled_by_what_was_used() -> None:
    limits, alice = Limits(), key(tpm=600)
    limits.charge(0.0, alice, 500)
    refused(limits, 0.0, alice, 200)
    limits.settle(alice, -400)  # it used a hundred
    limits.charge(0.0, alice, 200)
    limits.settle(alice, 500)  # and this one much more than it was thought to
    error = refused(limits, 0.0, alice, 10)
    assert error.retry_after_s is not None
    assert error.retry_after_s == pytest.approx(21.0)


def test_a_request_greater_than_the_whole_bucket_passes_when_it_is_full() -> None:
    limits, alice = Limits(), key(tpm=100)
    limits.charge(0.0, alice, 5000)
    assert refused(limits, 0.0, alice, 1).retry_after_s == 60.0
    limits.charge(60.0 * 51, alice, 5000)


def test_a_refund_undoes_a_charge() -> None:
    limits, alice = Limits(), key(rpm=1, tpm=100)
    limits.charge(0.0, alice, 80)
    limits.refund(alice, 80)
    limits.charge(0.0, alice, 80)


def test_when_to_come_back_is_between_a_second_and_a_minute() -> None:
    limits, alice = Limits(), key(rpm=600)
    for _ in range(600):
        limits.charge(0.0, alice, 0)
    assert refused(limits, 0.0, alice).retry_after_s == 1.0
    limits.settle(alice, 0)
    slow = Key(name="slow", hash=b"", tpm=1)
    limits.charge(0.0, slow, 1)
    limits.settle(slow, 1e6)
    assert refused(limits, 0.0, slow, 1).retry_after_s == 60.0


def test_the_words_name_the_seconds_of_the_header_which_are_never_too_few() -> None:
    limits, alice = Limits(), key(rpm=50)
    for _ in range(50):
        limits.charge(0.0, alice, 0)
    error = refused(limits, 0.0, alice)
    assert error.retry_after_s == pytest.approx(1.2)
    assert "Please try again in 2s." in error.message
    assert (b"retry-after", b"2") in headers_of(error)


def test_a_limit_that_was_changed_holds_from_the_next_request_on() -> None:
    limits = Limits()
    for _ in range(5):
        limits.charge(0.0, key(rpm=5), 0)
    refused(limits, 0.0, key(rpm=5))
    limits.charge(0.0, key(), 0)
    limits.charge(0.0, key(rpm=2), 0)
    limits.charge(0.0, key(rpm=2), 0)
    refused(limits, 0.0, key(rpm=2))
