"""The law of the latency windows: within ERROR of the exact quantile, and windows add up."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.latency import ERROR, SLICE_S, WINDOWS_S, Window, quantile
from gateway.runtime.families import Histogram

percent = st.integers(1, 100)
sample = st.tuples(
    st.integers(0, 2),  # which model
    st.floats(0, 40),  # seconds since the sample before
    st.floats(math.log(0.001), math.log(1000)).map(math.exp),
    st.integers(1, 4),
)


@given(samples=st.lists(sample, min_size=1, max_size=60), percent=percent, wait=st.floats(0, 400))
def test_quantiles_are_within_the_error_of_the_exact_ones(
    samples: list[tuple[int, float, float, int]], percent: int, wait: float
) -> None:
    windows = [Window(), Window(), Window()]
    taken: list[tuple[int, float, float]] = []
    now = 0.0
    for model, gap, seconds, count in samples:
        now += gap
        windows[model].observe_all(now, [seconds] * count)
        taken += [(model, now, seconds)] * count
    now += wait
    for window_s in WINDOWS_S:
        first = int(now // SLICE_S) - window_s / SLICE_S  # slices up to this one are forgotten
        kept = [each for each in taken if each[1] // SLICE_S > first]
        for chosen in ([0], [1], [0, 1, 2]):
            values = sorted(seconds for model, _, seconds in kept if model in chosen)
            found = quantile([windows[model] for model in chosen], now, percent / 100, window_s)
            if not values:
                assert found is None
                continue
            exact = values[-(-percent * len(values) // 100) - 1]
            assert found == pytest.approx(exact, rel=ERROR + 1e-9)


@given(st.lists(st.one_of(st.sampled_from([0.0, 1.0, 2.0, 2.5, 5.0]), st.floats(0, 10))))
def test_samples_taken_together_count_as_if_taken_one_by_one(samples: list[float]) -> None:
    together, single = Histogram((1.0, 2.5, 5.0)), Histogram((1.0, 2.5, 5.0))
    windows = Window(), Window()
    together.observe_all(sorted(samples))
    windows[0].observe_all(3.0, sorted(samples))
    for one in samples:
        single.observe(one)
        windows[1].observe(3.0, one)
    assert together.counts == single.counts
    assert together.total == pytest.approx(single.total)
    assert windows[0].counts(3.0, 60) == windows[1].counts(3.0, 60)
