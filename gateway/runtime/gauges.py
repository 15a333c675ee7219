"""The gauges of `/metrics` that are read from their owners at the scrape."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from gateway.core.fleet import Backend
from gateway.engines.base import EngineReport
from gateway.runtime.backends import Backends
from gateway.runtime.dispatcher import Dispatcher
from gateway.runtime.metrics import Gauge, Metrics

BACKEND, MODEL = ("backend",), ("model",)
Values = Iterable[tuple[tuple[str, ...], float]]


def register(metrics: Metrics, dispatcher: Dispatcher, backends: Backends) -> None:
    """Tell `metrics` where each gauge's values are."""
    for gauge in (
        *_ours(dispatcher),
        *_reported(dispatcher, backends),
        *_queues(dispatcher, backends),
    ):
        metrics.gauge(gauge)


def _ours(dispatcher: Dispatcher) -> Iterator[Gauge]:
    """What we count ourselves, by backend."""
    backends = dispatcher.dispatch.backends

    def each(read: Callable[[Backend], float]) -> Callable[[], Values]:
        return lambda: [((one.name,), float(read(one))) for one in list(backends.values())]

    yield Gauge("in_flight", "Permits held: our own count.", BACKEND, each(lambda b: b.in_flight))
    yield Gauge(
        "settling",
        "Slots whose request was cancelled and that are not lent again yet.",
        BACKEND,
        each(lambda b: b.settling_permits),
    )
    yield Gauge("slots", "Most permits lent at once.", BACKEND, each(lambda b: b.slots))
    yield Gauge("backend_up", "1 when it can take work.", BACKEND, each(lambda b: b.takes_work))


def _reported(dispatcher: Dispatcher, backends: Backends) -> Iterator[Gauge]:
    """What engines last said. Missing is not zero: what an engine does not say has no series."""

    def each(read: Callable[[EngineReport], float | None]) -> Callable[[], Values]:
        def values() -> Values:
            for name, known in list(backends.known.items()):
                value = read(known.report) if known.report is not None else None
                if value is not None:
                    yield (name,), float(value)

        return values

    def ages() -> Values:
        now = dispatcher.now()
        for name, known in list(backends.known.items()):
            if known.reported_at is not None:
                yield (name,), now - known.reported_at

    yield Gauge(
        "backend_running", "Requests running, by its last word.", BACKEND, each(lambda r: r.running)
    )
    yield Gauge(
        "backend_waiting",
        "Requests waiting inside the engine, by its last word.",
        BACKEND,
        each(lambda r: r.waiting),
    )
    yield Gauge(
        "backend_kv_used_ratio",
        "Share of its KV cache in use, by its last word.",
        BACKEND,
        each(lambda r: r.kv_used_ratio),
    )
    yield Gauge("backend_report_age_seconds", "Age of its last report.", BACKEND, ages)


def _queues(dispatcher: Dispatcher, backends: Backends) -> Iterator[Gauge]:
    """Waiting places, by model."""
    dispatch = dispatcher.dispatch

    def each(read: Callable[[frozenset[str]], int]) -> Callable[[], Values]:
        return lambda: [
            ((name,), float(read(pool.backends))) for name, pool in backends.catalog.pools.items()
        ]

    yield Gauge("queue_depth", "Requests waiting for its backends.", MODEL, each(dispatch.depth))
    yield Gauge("queue_limit", "Most that may wait for its backends.", MODEL, each(dispatch.limit))
