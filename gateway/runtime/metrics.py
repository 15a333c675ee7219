"""Every number that `/metrics` tells, counted in plain Python and turned into Prometheus families at the scrape.

The hot path touches no label look-ups: a request resolves its `Series` once. Label values come from the configuration
and the backends only (law 10).
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from gateway.core.errors import Outcome
from gateway.core.latency import Window, quantile

PREFIX = "slotgate_"
TTFT_BUCKETS = (
    0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0,
)  # fmt: skip
ITL_BUCKETS = (
    0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0,
)  # fmt: skip
Counts = Mapping[Any, int]  # by label values
WINDOWS = {"1m": 60, "5m": 300}


class Histogram:
    """Cumulative only when told; `observe` is a bisect and two additions."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, seconds: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, seconds)] += times
        self.total += seconds * times

    def buckets(self) -> list[tuple[str, float]]:
        running, out = 0, []
        for bound, count in zip((*self.bounds, None), self.counts, strict=True):
            running += count
            out.append(("+Inf" if bound is None else str(bound), float(running)))
        return out


@dataclass(slots=True, eq=False)
class Latencies:
    """TTFT and ITL of one model over the last minutes."""

    ttft: Window = field(default_factory=Window)
    itl: Window = field(default_factory=Window)


@dataclass(slots=True, eq=False)
class Series:
    """What requests of one model on one backend are counted in."""

    recent: Latencies
    ttft: Histogram = field(default_factory=lambda: Histogram(TTFT_BUCKETS))
    itl: Histogram = field(default_factory=lambda: Histogram(ITL_BUCKETS))
    request: Histogram = field(default_factory=lambda: Histogram(TTFT_BUCKETS))
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    last_event_at: float | None = None

    def first_token(self, now: float, seconds: float) -> None:
        self.last_event_at = now
        self.ttft.observe(seconds)
        self.recent.ttft.observe(now, seconds)

    def gap(self, now: float, seconds: float, events: int) -> None:
        """`events` events came in one read, `seconds` after the one before: that many gaps of a share each."""
        self.last_event_at = now
        share = seconds / events
        self.itl.observe(share, events)
        self.recent.itl.observe(now, share, events)


@dataclass(frozen=True, slots=True)
class Gauge:
    """A gauge whose values are read at the scrape."""

    name: str
    help: str
    labels: tuple[str, ...]
    read: Callable[[], Iterable[tuple[tuple[str, ...], float]]]


class Metrics(Collector):
    """Owner of all counters. One for the process; given to the registry by `app`."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._series: dict[tuple[str, str], Series] = {}
        self._recent: dict[str, Latencies] = {}
        self._gauges: list[Gauge] = []
        self.config_ok = True  # the last reload could be used
        self.queue_wait: dict[str, Histogram] = {}
        self.requests: defaultdict[tuple[str, str], int] = defaultdict(int)
        self.key_requests: defaultdict[tuple[str, str], int] = defaultdict(int)
        self.key_tokens: defaultdict[tuple[str, str], int] = defaultdict(int)
        self.shed: defaultdict[tuple[str, str], int] = defaultdict(int)
        self.retries: defaultdict[tuple[str, str], int] = defaultdict(int)
        self.backend_errors: defaultdict[tuple[str, str], int] = defaultdict(int)
        self.affinity: defaultdict[tuple[str, ...], int] = defaultdict(int)

    def series(self, model: str, backend: str) -> Series:
        found = self._series.get((model, backend))
        if found is None:
            recent = self._recent.setdefault(model, Latencies())
            found = self._series[model, backend] = Series(recent)
        return found

    def last_event_at(self, backend: str) -> float | None:
        """When a stream of this backend last brought content: proof of life."""
        times = [s.last_event_at for (_, name), s in self._series.items() if name == backend]
        return max((at for at in times if at is not None), default=None)

    def gauge(self, one: Gauge) -> None:
        self._gauges.append(one)

    def waited(self, model: str, seconds: float) -> None:
        histogram = self.queue_wait.get(model)
        if histogram is None:
            histogram = self.queue_wait[model] = Histogram(TTFT_BUCKETS)
        histogram.observe(seconds)

    def ended(self, model: str, key: str, outcome: Outcome, *, counts: bool) -> None:
        if counts:
            self.requests[model, outcome.value] += 1
        self.key_requests[key, outcome.value] += 1

    def p95(self) -> dict[str, dict[str, dict[str, float | None]]]:
        """By model (and `all`), then window: p95 of `ttft` and `itl` in seconds; None without samples."""
        now = self._clock()
        out: dict[str, dict[str, dict[str, float | None]]] = {}
        together = list(self._recent.values())
        groups = [*((model, [one]) for model, one in self._recent.items()), ("all", together)]
        for model, group in groups:
            out[model] = {
                label: {
                    "ttft": quantile([one.ttft for one in group], now, 0.95, seconds),
                    "itl": quantile([one.itl for one in group], now, 0.95, seconds),
                }
                for label, seconds in WINDOWS.items()
            }
        return out

    def collect(self) -> Iterator[Metric]:
        yield from self._counters()
        yield from self._histograms()
        yield from self._quantiles()
        for gauge in self._gauges:
            family = GaugeMetricFamily(PREFIX + gauge.name, gauge.help, labels=gauge.labels)
            for labels, value in gauge.read():
                family.add_metric(labels, value)
            yield family

    def _counters(self) -> Iterator[Metric]:
        by_backend = ("model", "backend")
        series = self._series.items()
        tables: list[tuple[str, str, tuple[str, ...], Counts]] = [
            ("requests", "Generation and embedding requests, by how they ended.",
             ("model", "outcome"), dict(self.requests)),
            ("key_requests", "Requests of each key, by how they ended.",
             ("key", "outcome"), dict(self.key_requests)),
            ("key_tokens", "Tokens of each key.", ("key", "kind"), dict(self.key_tokens)),
            ("shed", "Requests refused because of load.", ("model", "reason"), dict(self.shed)),
            ("retries", "Further attempts, by the backend that did not take the request.",
             ("backend", "reason"), dict(self.retries)),
            ("backend_errors", "Faults of each backend.",
             ("backend", "kind"), dict(self.backend_errors)),
            ("affinity", "Where requests went: to the backend that holds their prefix, or not.",
             ("result",), dict(self.affinity)),
            ("prompt_tokens", "Prompt tokens, as engines report them.",
             by_backend, {k: s.prompt_tokens for k, s in series}),
            ("cached_prompt_tokens", "Prompt tokens that the engine had cached.",
             by_backend, {k: s.cached_tokens for k, s in series}),
            ("generated_tokens", "Generated tokens.",
             by_backend, {k: s.generated_tokens for k, s in series}),
        ]  # fmt: skip
        for name, text, labels, values in tables:
            family = CounterMetricFamily(PREFIX + name, text, labels=labels)
            for key, value in values.items():
                family.add_metric(key, value)
            yield family

    def _histograms(self) -> Iterator[Metric]:
        labels = ("model", "backend")
        tables: list[tuple[str, str, tuple[str, ...], Mapping[Any, Histogram]]] = [
            ("ttft_seconds", "From the whole request received to the first content event.",
             labels, {k: s.ttft for k, s in self._series.items()}),
            ("itl_seconds", "Between content events; a read with k of them is k gaps of 1/k.",
             labels, {k: s.itl for k, s in self._series.items()}),
            ("request_seconds", "From the whole request received to the last byte.",
             labels, {k: s.request for k, s in self._series.items()}),
            ("queue_wait_seconds", "Waiting for a slot.",
             ("model",), {(m,): h for m, h in self.queue_wait.items()}),
        ]  # fmt: skip
        for name, text, names, values in tables:
            family = HistogramMetricFamily(PREFIX + name, text, labels=names)
            for key, histogram in values.items():
                family.add_metric(key, histogram.buckets(), sum_value=histogram.total)
            yield family

    def _quantiles(self) -> Iterator[Metric]:
        p95 = self.p95()
        for what, text in (("ttft", "TTFT"), ("itl", "ITL")):
            family = GaugeMetricFamily(
                f"{PREFIX}{what}_p95_seconds",
                f"p95 of {text} over the last minutes; `all` is every model together.",
                labels=("model", "window"),
            )
            for model, windows in p95.items():
                for window, values in windows.items():
                    value = values[what]
                    if value is not None:
                        family.add_metric((model, window), value)
            yield family
