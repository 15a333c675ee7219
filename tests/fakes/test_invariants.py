"""The invariants notice what they are there to notice."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from tests.fakes import invariants
from tests.fakes.engine import FakeEngine
from tests.fakes.running import run


def reading(text: str) -> Any:
    async def read() -> str:
        return text

    return read


def series(text: str) -> invariants.Series:
    return invariants.series_of(text)


def test_a_gauge_that_stays_up_is_named() -> None:
    text = 'slotgate_in_flight{backend="b1"} 1.0\nslotgate_queue_depth{model="m"} 0.0\n'
    with pytest.raises(AssertionError, match=r"in_flight.*b1.*1.0"):
        run(invariants.gauges_return_to_zero(reading(text), [], within_s=0.05))
    run(invariants.gauges_return_to_zero(reading(text.replace("1.0", "0.0")), []))


def test_more_executions_than_requests_are_noticed() -> None:
    engine = FakeEngine()
    engine.executions_by_id.update({"x": 1, "y": 2})
    with pytest.raises(AssertionError, match="3 executions for 2 client requests"):
        invariants.no_more_runs_than_requests(
            series('slotgate_requests_total{model="m",outcome="served"} 2.0\n'), [engine]
        )
    with pytest.raises(AssertionError, match="ran more than once"):
        invariants.no_more_runs_than_requests(
            series('slotgate_requests_total{model="m",outcome="served"} 3.0\n'), [engine]
        )


def test_changed_bytes_are_shown_where_they_part() -> None:
    with pytest.raises(AssertionError, match=r"part at byte 3: b'X' instead of b'd'"):
        invariants.bytes_are_unchanged(b"abcX", b"abcd")
    with pytest.raises(AssertionError, match="part at byte 3"):
        invariants.bytes_are_unchanged(b"abc", b"abcd")
    invariants.bytes_are_unchanged(b"abcd", b"abcd")


@pytest.mark.parametrize(
    ("log", "sent", "message"),
    [
        ('{"request_id":"req-1","outcome":"served"}\n' * 2, None, "several outcomes"),
        ('{"request_id":"mine","outcome":"served"}\n', 3, "2 outcomes for 3 requests"),
        ('{"request_id":"mine","outcome":"served"}\n', None, "2 outcomes on 1 log lines"),
    ],
)
def test_a_request_with_two_outcomes_or_none_is_noticed(
    log: str, sent: int | None, message: str
) -> None:
    text = 'slotgate_requests_total{model="m",outcome="served"} 2.0\n'
    with pytest.raises(AssertionError, match=message):
        run(invariants.one_outcome_per_request(reading(text), lambda: log, sent))


@pytest.mark.parametrize(
    "line",
    [
        "Traceback (most recent call last):",
        "Task exception was never retrieved",
        "ResourceWarning: unclosed transport",
    ],
)
def test_a_dirty_log_is_noticed(line: str) -> None:
    invariants.log_is_clean("all is well\n")
    with pytest.raises(AssertionError, match="the log holds"):
        invariants.log_is_clean(f"all is well\n{line}\n")


def test_a_secret_is_noticed_wherever_it_is() -> None:
    invariants.no_secret_in(["sk-1"], log="nothing", metrics="nothing")
    with pytest.raises(AssertionError, match="metrics holds the secret"):
        invariants.no_secret_in(["sk-1"], log="nothing", metrics="key=sk-1")


@pytest.mark.parametrize("spin", [True, False], ids=["working", "sleeping"])
def test_a_blocked_loop_is_noticed(spin: bool) -> None:
    async def main() -> None:
        async with invariants.loop_is_never_blocked(limit_s=0.02):
            await asyncio.sleep(0.02)
            start = time.monotonic()
            while spin and time.thread_time() and time.monotonic() - start < 0.5:
                pass
            if not spin:
                time.sleep(0.5)  # noqa: ASYNC251 - the very mistake
            await asyncio.sleep(0.02)

    with pytest.raises(AssertionError, match="the loop"):
        run(main())


def test_a_label_that_a_client_chose_is_noticed() -> None:
    allowed = {"model": ["m", "other"]}
    good = series('slotgate_requests_total{model="other",outcome="served"} 1.0\n')
    invariants.labels_come_from_the_configuration(good, allowed)
    bad = series('slotgate_requests_total{model="evil\\"x",outcome="served"} 1.0\n')
    with pytest.raises(AssertionError, match="evil"):
        invariants.labels_come_from_the_configuration(bad, allowed)
