"""Every number that `/metrics` tells about requests, counted in plain Python.

The hot path touches no label look-ups: a request resolves its `Series` once. Label values come from the configuration
and the backends only (law 10), and the series of a model, backend or key that is gone go with the next reload. How the
numbers are told is in `runtime.tables` and `runtime.exposition`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Final

from gateway.core.catalog import NONE, OTHER
from gateway.core.errors import Outcome
from gateway.core.latency import Window, quantile
from gateway.runtime.decisions import Decisions
from gateway.runtime.families import Family, Histogram

TTFT_BUCKETS: Final = (
    0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0,
)  # fmt: skip
ITL_BUCKETS: Final = (
    0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0,
)  # fmt: skip
IDLE_BUCKETS: Final = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0)  # the router's patience is half a second
WINDOWS: Final = {"1m": 60, "5m": 300}
SHED: Final = (Outcome.QUEUE_FULL, Outcome.QUEUE_TIMEOUT, Outcome.NO_BACKEND, Outcome.DRAINING)


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
        self.ttft.observe(seconds)
        self.recent.ttft.observe(now, seconds)

    def gaps(self, now: float, gaps: list[float]) -> None:
        """How long the events of the last second were in coming; puts them in order."""
        gaps.sort()
        self.itl.observe_all(gaps)
        self.recent.itl.observe_all(now, gaps)


class Metrics:
    """Owner of all counters of requests. One for the process."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self._recent: dict[str, Latencies] = {}
        self.others: list[Family] = []  # what other parts tell
        self.config_ok = True  # the last reload could be used
        self.decisions = Decisions()
        self.all_series: dict[tuple[str, str], Series] = {}  # by model and backend
        self.queue_wait: dict[str, Histogram] = {}
        self.requests: defaultdict[tuple[str, str], int] = defaultdict(int)
        self.key_requests: defaultdict[tuple[str, str], int] = defaultdict(int)
        self.key_tokens: defaultdict[tuple[str, str], int] = defaultdict(int)
        self.shed: defaultdict[tuple[str, str], int] = defaultdict(int)
        self.retries: defaultdict[tuple[str, str], int] = defaultdict(int)
        self.backend_errors: defaultdict[tuple[str, str], int] = defaultdict(int)
        self.affinity: defaultdict[tuple[str, ...], int] = defaultdict(int)
        self.affinity_predicted: defaultdict[str, int] = defaultdict(int)  # tokens, by backend
        self.affinity_cached: defaultdict[str, int] = defaultdict(int)
        self.affinity_idle = Histogram(IDLE_BUCKETS)

    def series(self, model: str, backend: str) -> Series:
        found = self.all_series.get((model, backend))
        if found is None:
            recent = self._recent.setdefault(model, Latencies())
            found = self.all_series[model, backend] = Series(recent)
        return found

    def last_event_at(self, backend: str) -> float | None:
        """When a stream of this backend last brought content: proof of life."""
        times = [s.last_event_at for (_, name), s in self.all_series.items() if name == backend]
        return max((at for at in times if at is not None), default=None)

    def gauge(self, one: Family) -> None:
        """Have a figure of another part told."""
        self.others.append(one)

    def waited(self, model: str, seconds: float) -> None:
        histogram = self.queue_wait.get(model)
        if histogram is None:
            histogram = self.queue_wait[model] = Histogram(TTFT_BUCKETS)
        histogram.observe(seconds)

    def ended(self, model: str, key: str, outcome: Outcome, *, counts: bool) -> None:
        """A request has ended. `counts`: it was on a generation or embedding path."""
        told = str(outcome)
        self.key_requests[key, told] += 1
        if counts:
            self.requests[model, told] += 1
            if outcome in SHED:
                self.shed[model, told] += 1

    def p95(self) -> dict[str, dict[str, dict[str, float | None]]]:
        """By model (and `all`), then window: p95 of `ttft` and `itl` in seconds; None without samples."""
        return {
            model: {
                label: {
                    "ttft": self.quantile("ttft", group, seconds),
                    "itl": self.quantile("itl", group, seconds),
                }
                for label, seconds in WINDOWS.items()
            }
            for model, group in self.groups()
        }

    def groups(self) -> list[tuple[str, list[Latencies]]]:
        """Whose latencies are told: each model's, and those of all together."""
        single = [(model, [one]) for model, one in self._recent.items()]
        return [*single, ("all", list(self._recent.values()))]

    def quantile(self, what: str, group: list[Latencies], seconds: int) -> float | None:
        """p95 of `ttft` or `itl` in the last seconds (one of WINDOWS)."""
        windows = [one.ttft if what == "ttft" else one.itl for one in group]
        return quantile(windows, self.clock(), 0.95, seconds)

    def keep(self, models: Iterable[str], backends: Iterable[str], keys: Iterable[str]) -> None:
        """After a reload: forget what was counted for any other model, backend or key."""
        model_names = {*models, OTHER, NONE}
        backend_names = set(backends)
        key_names = {*keys, NONE, "anonymous"}
        for models_first in (self.requests, self.shed):
            _drop(models_first, lambda labels: labels[0] not in model_names)
        for keys_first in (self.key_requests, self.key_tokens):
            _drop(keys_first, lambda labels: labels[0] not in key_names)
        for backends_first in (self.retries, self.backend_errors):
            _drop(backends_first, lambda labels: labels[0] not in backend_names)
        for by_backend in (self.affinity_predicted, self.affinity_cached):
            _drop(by_backend, lambda name: name not in backend_names)
        for by_model in (self.queue_wait, self._recent):
            _drop(by_model, lambda name: name not in model_names)
        _drop(
            self.all_series, lambda both: both[0] not in model_names or both[1] not in backend_names
        )


def _drop(table: dict[Any, Any], is_gone: Callable[[Any], bool]) -> None:
    for labels in [labels for labels in table if is_gone(labels)]:
        del table[labels]
