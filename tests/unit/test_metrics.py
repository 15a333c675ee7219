"""Counting and telling: bounded whatever is configured, nothing lost from the totals, no step that takes long."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import pytest
from prometheus_client.parser import text_string_to_metric_families

from gateway.core.errors import Outcome
from gateway.runtime import tables
from gateway.runtime.exposition import MOST_SERIES, SLICE_LINES, Exposition
from gateway.runtime.families import Family, Histogram
from gateway.runtime.metrics import Metrics
from tests.fakes.invariants import Series, series_of, total
from tests.fakes.running import slack


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def counted() -> tuple[Metrics, Exposition, Clock]:
    clock = Clock()
    metrics = Metrics(clock)
    told = tables.families(metrics)
    return metrics, Exposition(lambda: told), clock


def busy(models: int, backends: int, keys: int) -> tuple[Metrics, Exposition, Clock]:
    """Everything that can be counted, counted: each model on each backend, each key in each outcome."""
    metrics, exposition, clock = counted()
    for model in range(models):
        for backend in range(backends):
            series = metrics.series(f"m{model}", f"b{backend}")
            series.first_token(clock.now, 0.1)
            series.gaps(clock.now, [0.01])
            series.request.observe(1.0)
            series.prompt_tokens += 7
        metrics.waited(f"m{model}", 0.1)
        for outcome in Outcome:
            metrics.ended(f"m{model}", "k0", outcome, counts=True)
    for key in range(keys):
        for outcome in Outcome:
            metrics.ended("m0", f"k{key}", outcome, counts=False)
        metrics.key_tokens[f"k{key}", "prompt"] += 3
    for backend in range(backends):
        metrics.retries[f"b{backend}", "refused"] += 1
        metrics.backend_errors[f"b{backend}", "reset"] += 1
    return metrics, exposition, clock


def read(exposition: Exposition) -> Series:
    return series_of(exposition.text())


# ------------------------------------------------------------------ bounded


@pytest.mark.parametrize(("models", "backends", "keys"), [(1, 1, 1), (50, 8, 100), (200, 20, 1000)])
def test_there_are_never_more_than_3000_series_and_no_count_is_lost(
    models: int, backends: int, keys: int
) -> None:
    _, exposition, _ = busy(models, backends, keys)
    series = read(exposition)
    assert len(series) <= MOST_SERIES
    assert total(series, "slotgate_ttft_seconds_count") == models * backends
    assert total(series, "slotgate_prompt_tokens_total") == models * backends * 7
    assert total(series, "slotgate_requests_total") == models * len(Outcome)
    assert total(series, "slotgate_key_requests_total") == (keys + models) * len(Outcome)
    assert total(series, "slotgate_queue_wait_seconds_count") == models
    assert total(series, "slotgate_retries_total") == backends


def test_the_most_used_have_series_of_their_own() -> None:
    metrics, exposition, _ = busy(60, 8, 1)
    favourite = metrics.series("m59", "b7")
    for _ in range(100):
        favourite.ttft.observe(0.2)
    series = read(exposition)
    at = {"model": "m59", "backend": "b7"}
    assert total(series, "slotgate_ttft_seconds_count", **at) == 101
    assert total(series, "slotgate_ttft_seconds_count", model="other", backend="other") > 0


def test_no_counter_ever_falls_while_traffic_moves_to_models_without_series() -> None:
    metrics, exposition, clock = busy(60, 8, 1)
    before = read(exposition)
    for model in range(59, -1, -1):
        for backend in range(8):
            for _ in range(model):
                metrics.series(f"m{model}", f"b{backend}").first_token(clock.now, 0.3)
        metrics.series(f"new{model}", "b0").first_token(clock.now, 0.3)
    after = read(exposition)
    fallen = {
        key: (value, after.get(key))
        for key, value in before.items()
        if key[0].endswith(("_total", "_count", "_bucket")) and after.get(key, -1) < value
    }
    assert not fallen
    assert len(after) <= MOST_SERIES


def test_gauges_beyond_the_bound_are_told_together_by_sum_or_greatest_or_not_at_all() -> None:
    rows = [((f"b{number}",), float(number)) for number in range(2000)]
    families = [
        Family("summed", "A.", ("backend",), lambda: rows),
        Family("greatest", "B.", ("backend",), lambda: rows, fold="max"),
        Family("dropped", "C.", ("backend",), lambda: rows, fold="drop"),
    ]
    series = read(Exposition(lambda: families))
    assert total(series, "slotgate_summed") == sum(range(2000))
    assert total(series, "slotgate_greatest", backend="other") == 1999
    assert total(series, "slotgate_dropped", backend="other") == 0


def test_after_forget_others_may_have_series() -> None:
    metrics, exposition, clock = busy(60, 8, 1)
    read(exposition)
    metrics.keep([f"m{number}" for number in range(50, 60)], ["b0"], ["k0"])
    exposition.forget()
    series = read(exposition)
    assert total(series, "slotgate_ttft_seconds_count", model="other") == 0
    assert total(series, "slotgate_ttft_seconds_count") == 10
    assert clock.now == 1000.0


# ------------------------------------------------------------------ gone


def test_what_is_counted_for_a_removed_model_backend_or_key_is_forgotten() -> None:
    metrics, exposition, _ = busy(2, 2, 2)
    metrics.ended("other", "none", Outcome.UNKNOWN_MODEL, counts=True)
    metrics.affinity_predicted["b1"] += 1
    metrics.keep(["m0"], ["b0"], ["k0"])
    labels = {pair for _, labels in read(exposition) for pair in labels}
    assert {value for name, value in labels if name == "model"} == {"m0", "other", "all"}
    assert {value for name, value in labels if name == "backend"} == {"b0"}
    assert {value for name, value in labels if name == "key"} == {"k0", "none"}


# ------------------------------------------------------------------ right


def test_the_text_is_what_prometheus_reads() -> None:
    metrics, exposition, clock = counted()
    odd = 'a "quoted" \\ name'
    series = metrics.series(odd, "b")
    for seconds in (0.003, 0.7, 700.0):
        series.first_token(clock.now, seconds)
    families = {family.name: family for family in text_string_to_metric_families(exposition.text())}
    ttft = families["slotgate_ttft_seconds"]
    assert ttft.type == "histogram"
    assert {sample.labels["model"] for sample in ttft.samples} == {odd}
    at = {s.labels["le"]: s.value for s in ttft.samples if s.name.endswith("_bucket")}
    assert (at["0.01"], at["0.5"], at["1.0"], at["600.0"], at["+Inf"]) == (1, 1, 2, 2, 3)
    assert families["slotgate_requests"].type == "counter"


def test_a_read_with_three_events_is_three_gaps_of_a_third() -> None:
    metrics, _, clock = counted()
    series = metrics.series("m", "b")
    series.gaps(clock.now, [0.1] * 3)
    assert series.itl.count == 3
    assert series.itl.total == pytest.approx(0.3)
    assert metrics.p95()["m"]["1m"]["itl"] == pytest.approx(0.1, rel=0.03)


def test_p95_of_all_is_of_all_samples_and_windows_forget() -> None:
    metrics, _, clock = counted()
    for number in range(100):
        metrics.series("slow" if number >= 90 else "fast", "b").first_token(
            clock.now, 10.0 if number >= 90 else 0.1
        )
    p95 = metrics.p95()
    assert p95["fast"]["1m"]["ttft"] == pytest.approx(0.1, rel=0.03)
    assert p95["all"]["1m"]["ttft"] == pytest.approx(10.0, rel=0.03)
    clock.now += 90
    p95 = metrics.p95()
    assert p95["all"]["1m"]["ttft"] is None
    assert p95["all"]["5m"]["ttft"] == pytest.approx(10.0, rel=0.03)


def test_only_503s_of_our_own_are_shed() -> None:
    metrics, _, _ = counted()
    for outcome in Outcome:
        metrics.ended("m", "k", outcome, counts=True)
        metrics.ended("m", "k", outcome, counts=False)
    assert dict(metrics.shed) == {
        ("m", reason): 1 for reason in ("queue_full", "queue_timeout", "no_backend", "draining")
    }


def test_histograms_add_up() -> None:
    one, other = Histogram((1.0, 2.0)), Histogram((1.0, 2.0))
    one.observe(0.5)
    other.observe_all([1.5, 1.5])
    one.add(other)
    assert one.buckets() == [("1.0", 1.0), ("2.0", 3.0), ("+Inf", 3.0)]
    assert one.total == 3.5


# ------------------------------------------------------------------ without holding the loop


def test_a_scrape_is_made_of_short_steps_between_which_others_run() -> None:
    """Law 10's 50 ms, as processor time: another process on this machine cannot make this fail."""
    _, exposition, _ = busy(100, 20, 500)
    longest = 0.0
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async def main() -> bytes:
        nonlocal longest
        exposition.text()  # who has series is decided at the first scrape
        task = asyncio.create_task(others())
        loop = asyncio.get_running_loop()
        loop.slow_callback_duration = 10
        render = exposition.render()
        text = await _timed(render, _note)
        task.cancel()
        return text

    def _note(seconds: float) -> None:
        nonlocal longest
        longest = max(longest, seconds)

    text = asyncio.run(main())
    assert text.count(b"\n") > MOST_SERIES / 2
    assert turns >= MOST_SERIES / SLICE_LINES / 2
    assert longest < 0.05 * slack()


async def _timed(render: object, note: Callable[[float], None]) -> bytes:
    """Awaits a coroutine step by step and tells the processor time of each."""

    class Steps:
        def __await__(self):  # type: ignore[no-untyped-def]
            while True:
                began = time.thread_time()
                try:
                    waited = render.send(None)  # type: ignore[attr-defined]
                except StopIteration as end:
                    return end.value
                finally:
                    note(time.thread_time() - began)
                yield waited

    return await Steps()  # type: ignore[no-any-return]
