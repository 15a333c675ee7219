"""The last five minutes: what became more, and what was there at each moment.

Law of this file: memory and work do not grow with traffic. Once a second a look at the queues and at idle slots, every five seconds a
sample of all sums and a point for the charts, for five minutes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from gateway.core.errors import Outcome
from gateway.runtime.backends import Backends
from gateway.runtime.dispatcher import Dispatcher
from gateway.runtime.metrics import Metrics

KEPT: Final = 60  # samples and points: five minutes
SAMPLE_EVERY: Final = 5  # seconds
MINUTE_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class Sample:
    """Sums since the start, at one moment."""

    at: float
    served: int
    shed: int
    timed_out: int
    streams: int
    ttft_s: float
    placed: int
    waited_s: float
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    preemptions: dict[str, int]  # by backend
    errors: dict[str, int]


@dataclass(frozen=True, slots=True)
class Point:
    """For a chart: rates over the five seconds before, p95s over the minute before."""

    at: float
    served_per_s: float
    shed_per_s: float
    queued: int
    queue_limit: int
    in_flight: int
    slots: int
    ttft_p95_s: float | None
    itl_p95_s: float | None


class History:
    """Owner of the samples. `sample` is called once a second, on the loop."""

    def __init__(self, metrics: Metrics, dispatcher: Dispatcher, backends: Backends) -> None:
        self._metrics = metrics
        self._dispatcher = dispatcher
        self._backends = backends
        self._samples: deque[Sample] = deque(maxlen=KEPT)
        self._full: deque[tuple[float, bool]] = deque(
            maxlen=int(MINUTE_S)
        )  # when, was a queue full
        self.points: deque[Point] = deque(maxlen=KEPT)
        self._seconds = 0

    def sample(self, now: float) -> None:
        """A second has passed."""
        for seconds in self._dispatcher.dispatch.idle_spells():
            self._metrics.affinity_idle.observe(seconds)
        self._full.append((now, self._is_full()))
        if self._seconds % SAMPLE_EVERY == 0:
            self._samples.append(self._read(now))
            if len(self._samples) > 1:
                self.points.append(self._point(now))
        self._seconds += 1

    def last_minute(self, now: float) -> tuple[Sample, Sample]:
        """The oldest sample within the last minute, and how things are now."""
        latest = self._read(now)
        oldest = next((one for one in self._samples if one.at >= now - MINUTE_S - 1), latest)
        return oldest, latest

    def grown(self, now: float, read: Callable[[Sample], dict[str, int]]) -> dict[str, int]:
        """By backend: how much a count grew in the last minute, since it was first told."""
        first: dict[str, int] = {}
        for one in self._samples:
            if one.at >= now - MINUTE_S - 1:
                first = read(one) | first
        latest = read(self._read(now))
        return {name: max(0, count - first.get(name, count)) for name, count in latest.items()}

    def queue_full_share(self, now: float) -> float:
        """In which share of the seconds of the last minute a queue was full."""
        recent = [full for at, full in self._full if at >= now - MINUTE_S]
        return sum(recent) / len(recent) if recent else 0.0

    def _read(self, now: float) -> Sample:
        metrics = self._metrics
        series = list(metrics.all_series.values())
        waits = list(metrics.queue_wait.values())
        return Sample(
            at=now,
            served=_sum(metrics.requests, lambda key: key[1] == Outcome.SERVED),
            shed=_sum(metrics.shed, lambda _key: True),
            timed_out=_sum(metrics.shed, lambda key: key[1] == Outcome.QUEUE_TIMEOUT),
            streams=sum(one.ttft.count for one in series),
            ttft_s=sum(one.ttft.total for one in series),
            placed=sum(one.count for one in waits),
            waited_s=sum(one.total for one in waits),
            prompt_tokens=sum(one.prompt_tokens for one in series),
            cached_tokens=sum(one.cached_tokens for one in series),
            generated_tokens=sum(one.generated_tokens for one in series),
            preemptions=self._preemptions(),
            errors=dict.fromkeys(self._backends.known, 0) | _by_first(metrics.backend_errors),
        )

    def _point(self, now: float) -> Point:
        before, latest = self._samples[-2], self._samples[-1]
        seconds = max(latest.at - before.at, 1.0)
        dispatch = self._dispatcher.dispatch
        everything = self._metrics.groups()[-1][1]
        pool = frozenset(dispatch.backends)
        return Point(
            at=now,
            served_per_s=(latest.served - before.served) / seconds,
            shed_per_s=(latest.shed - before.shed) / seconds,
            queued=dispatch.queued,
            queue_limit=dispatch.limit(pool),
            in_flight=sum(one.in_flight for one in dispatch.backends.values()),
            slots=sum(one.slots for one in dispatch.backends.values()),
            ttft_p95_s=self._metrics.quantile("ttft", everything, 60),
            itl_p95_s=self._metrics.quantile("itl", everything, 60),
        )

    def _is_full(self) -> bool:
        dispatch = self._dispatcher.dispatch
        if not dispatch.queued:
            return False
        pools = {pool.backends for pool in self._backends.catalog.pools.values()}
        return any(dispatch.depth(pool) >= max(1, dispatch.limit(pool)) for pool in pools)

    def _preemptions(self) -> dict[str, int]:
        return {
            name: known.report.preemptions
            for name, known in self._backends.known.items()
            if known.report is not None and known.report.preemptions is not None
        }


def _sum(table: dict[tuple[str, str], int], wanted: Callable[[tuple[str, str]], bool]) -> int:
    return sum(count for key, count in table.items() if wanted(key))


def _by_first(table: dict[tuple[str, str], int]) -> dict[str, int]:
    out: dict[str, int] = {}
    for (name, _), count in table.items():
        out[name] = out.get(name, 0) + count
    return out
