"""From figures to sentences: each names who, how much, and what to do; and all is well says nothing."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.core.diagnosis import BackendFacts, Facts, findings, worst

WELL = BackendFacts(name="gpu1", state="up", slots=4)


def said(**facts: Any) -> str:
    facts.setdefault("backends", (WELL,))
    return " | ".join(one.text for one in findings(Facts(**facts)))


def said_of(**facts: Any) -> str:
    backend = BackendFacts(**{"name": "gpu2", "state": "up", "slots": 8, **facts})
    return said(backends=(WELL, backend))


def test_when_all_is_well_nothing_is_said() -> None:
    assert said(streams=100, ttft_mean_s=0.4, wait_mean_s=0.3) == ""
    assert worst([]) is None


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"preemptions": 12}, "gpu2 preempts (12 in the last minute"),
        ({"preemptions": 12}, "lower its slots"),
        ({"kv_used_ratio": 0.97}, "KV cache of gpu2 is 97 % full: lower its slots"),
        ({"others": 3.2}, "gpu2 also works on 3 requests that did not come through here"),
        ({"slots_assumed": True}, "assuming 8, set `slots`"),
        ({"state": "down"}, "gpu2 is down: start it"),
        ({"state": "failing"}, "gpu2 answers probes but broke our requests"),
        ({"state": "loading"}, "gpu2 is loading its model"),
        ({"state": "draining"}, "gpu2 takes no new work"),
        ({"errors": 1}, "gpu2 broke 1 request in the last minute"),
        ({"report_age_s": 45.0}, "gpu2 has not said for 45 s how it is"),
        ({"report_age_s": None}, "gpu2 has not said since the start how it is"),
    ],
)
def test_a_backend_in_trouble_is_named_with_what_to_do(facts: dict[str, Any], words: str) -> None:
    assert words in said_of(**facts)


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"queue_full_share": 0.14, "shed": 132}, "Queue full 14 % of the last minute, 132 requests"),
        ({"queue_full_share": 0.14}, "add a slot or a backend"),
        ({"shed": 3}, "3 requests refused in the last minute for lack of room"),
        ({"shed": 2, "timed_out": 2}, "2 requests waited in vain for a slot"),
        ({"config_ok": False}, "slotgate check"),
        ({"redis_up": False}, "Redis does not answer"),
        ({"loop_lag_s": 0.4}, "stood still for 0.40 s"),
        ({"log_dropped": 1}, "1 log line lost"),
        ({"backends": ()}, "No backend can take work"),
    ],
)  # fmt: skip
def test_the_gateway_in_trouble_says_what_to_do(facts: dict[str, Any], words: str) -> None:
    assert words in said(**facts)


def test_where_the_time_goes_is_said_only_when_first_tokens_are_slow_and_many_enough() -> None:
    slow = {"streams": 20, "ttft_mean_s": 4.2}
    assert "Prefill is the wait, not the queue" in said(**slow, wait_mean_s=0.1)
    assert "The queue is the wait, not prefill" in said(**slow, wait_mean_s=4.0)
    assert said(**slow, wait_mean_s=2.0) == ""
    assert said(streams=2, ttft_mean_s=4.2, wait_mean_s=0.1) == ""
    assert said(streams=20, ttft_mean_s=0.9, wait_mean_s=0.0) == ""
    assert said(streams=0, ttft_mean_s=None, wait_mean_s=None) == ""


def test_the_worst_comes_first() -> None:
    facts = Facts(
        backends=(
            BackendFacts(name="a", state="up", slots_assumed=True),
            BackendFacts(name="b", state="down"),
        ),
        loop_lag_s=1.0,
    )
    levels = [one.level for one in findings(facts)]
    assert levels == ["bad", "warning", "hint"]
    assert worst(findings(facts)) == "bad"


def test_a_waiting_backend_is_not_also_blamed_for_old_errors() -> None:
    assert "broke 5" not in said_of(state="down", errors=5)
