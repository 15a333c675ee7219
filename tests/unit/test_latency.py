"""The windows of p50 and p95."""

from __future__ import annotations

import math
import os
import random
import time

import pytest

from gateway.core.latency import ERROR, LEAST_S, MOST_S, SLICE_S, WINDOWS_S, Window, quantile

SLACK = float(os.environ.get("SLOTGATE_TEST_SLACK", "1"))


@pytest.mark.parametrize("window_s", WINDOWS_S)
def test_without_samples_there_is_no_quantile(window_s: int) -> None:
    assert quantile((Window(),), 0.0, 0.95, window_s) is None
    assert quantile((), 0.0, 0.95, window_s) is None
    assert quantile((Window(), Window()), 1e6, 0.95, window_s) is None


@pytest.mark.parametrize("seconds", [0.001, 0.0123, 1.0, 7.7, 59.0, 600.0, 1000.0])
def test_a_single_sample_is_every_quantile_within_the_error(seconds: float) -> None:
    window = Window()
    window.observe(10.0, seconds)
    for q in (0.01, 0.5, 0.95, 1.0):
        assert quantile((window,), 10.0, q, 60) == pytest.approx(seconds, rel=ERROR + 1e-9)


def test_nearest_rank_takes_a_sample_that_exists() -> None:
    window = Window()
    for number in range(1, 21):
        window.observe(0.0, float(number))
    assert quantile((window,), 0.0, 0.5, 60) == pytest.approx(10, rel=ERROR)
    assert quantile((window,), 0.0, 0.95, 60) == pytest.approx(19, rel=ERROR)
    assert quantile((window,), 0.0, 0.951, 60) == pytest.approx(20, rel=ERROR)


def test_a_sample_leaves_each_window_when_it_is_as_old_as_the_window() -> None:
    for window_s in WINDOWS_S:
        window = Window()
        window.observe(1002.5, 1.0)
        assert quantile((window,), 1002.5 + window_s - SLICE_S, 0.5, window_s) is not None
        assert quantile((window,), 1002.5 + window_s, 0.5, window_s) is None


def test_the_short_window_forgets_what_the_long_one_still_knows() -> None:
    window = Window()
    window.observe(0.0, 1.0)
    window.observe(100.0, 2.0)
    assert quantile((window,), 100.0, 0.5, 60) == pytest.approx(2, rel=ERROR)
    assert quantile((window,), 100.0, 0.5, 300) == pytest.approx(1, rel=ERROR)
    assert quantile((window,), 100.0, 1.0, 300) == pytest.approx(2, rel=ERROR)


def test_after_a_long_silence_nothing_is_left() -> None:
    window = Window()
    for second in range(1000):
        window.observe(second * 0.7, 1.0)
    assert quantile((window,), 1e6, 0.5, 300) is None
    assert not any(any(window.counts(1e6, window_s)) for window_s in WINDOWS_S)
    assert not window._slices


def test_a_clock_that_goes_back_counts_as_standing_still() -> None:
    window = Window()
    window.observe(1000.0, 1.0)
    window.observe(10.0, 3.0)
    assert sum(window.counts(500.0, 60)) == 2
    assert quantile((window,), 1000.0 + 60, 0.5, 60) is None


@pytest.mark.parametrize(("seconds", "told"), [(0.0, LEAST_S), (-1.0, LEAST_S), (1e9, MOST_S)])
def test_what_is_out_of_range_counts_as_its_edge(seconds: float, told: float) -> None:
    window = Window()
    window.observe(0.0, seconds)
    assert quantile((window,), 0.0, 0.5, 60) == pytest.approx(told, rel=2 * ERROR)


def test_a_read_of_several_events_counts_as_several_gaps() -> None:
    window = Window()
    window.observe_all(0.0, [0.1] * 19)
    window.observe(0.0, 5.0)
    assert quantile((window,), 0.0, 0.95, 60) == pytest.approx(0.1, rel=ERROR)
    assert quantile((window,), 0.0, 0.96, 60) == pytest.approx(5.0, rel=ERROR)


def test_memory_does_not_grow_with_samples() -> None:
    rng = random.Random(1)
    window = Window()
    for step in range(20_000):
        window.observe(step * 0.1, rng.lognormvariate(0, 4))
    assert len(window._slices) <= max(WINDOWS_S) / SLICE_S
    buckets = len(window.counts(2000.0, 60))
    assert all(len(counts) <= buckets for _, counts in window._slices)
    assert buckets <= math.log(MOST_S / LEAST_S) / (2 * ERROR) + 2


def test_a_sample_costs_about_a_microsecond_of_processor_time() -> None:
    window = Window()
    start = time.process_time()
    for step in range(20_000):
        window.observe(step * 0.001, 0.03)
    assert time.process_time() - start < 0.4 * SLACK  # 20 us each; measured 0.7
