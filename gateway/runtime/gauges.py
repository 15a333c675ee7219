"""The figures of `/metrics` that other parts own: read from their owners at the scrape."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator

from gateway.core.fleet import Backend
from gateway.core.state import STATES, state_of
from gateway.engines.base import EngineReport
from gateway.runtime.backends import Backends
from gateway.runtime.dispatcher import Dispatcher
from gateway.runtime.families import Family, Rows
from gateway.runtime.heartbeat import Heartbeat
from gateway.runtime.metrics import Metrics

BACKEND, MODEL = ("backend",), ("model",)


def register(
    metrics: Metrics,
    dispatcher: Dispatcher,
    backends: Backends,
    heartbeat: Heartbeat,
    version: str,
) -> None:
    """Tell `metrics` where each figure is."""
    for family in (
        *_ours(dispatcher),
        *_reported(dispatcher, backends),
        *_queues(dispatcher, backends),
        *_own(metrics, heartbeat, version),
    ):
        metrics.gauge(family)


def register_redis(metrics: Metrics, is_up: Callable[[], bool]) -> None:
    """For a gateway that shares its state with others."""
    metrics.gauge(Family("redis_up", "1 when Redis answers.", (), lambda: [((), float(is_up()))]))


def _ours(dispatcher: Dispatcher) -> Iterator[Family]:
    """What we count ourselves, by backend."""
    backends = dispatcher.dispatch.backends

    def each(read: Callable[[Backend], float]) -> Callable[[], Rows]:
        return lambda: [((one.name,), float(read(one))) for one in backends.values()]

    def states() -> Rows:
        for one in list(backends.values()):
            now = state_of(one)
            for state in STATES:
                yield (one.name, state), float(state == now)

    yield Family("in_flight", "Permits held: our own count.", BACKEND, each(lambda b: b.in_flight))
    yield Family(
        "settling",
        "Slots whose request was cancelled and that are not lent again yet.",
        BACKEND,
        each(lambda b: b.settling_permits),
    )
    yield Family("slots", "Most permits lent at once.", BACKEND, each(lambda b: b.slots))
    yield Family("backend_up", "1 when it can take work.", BACKEND, each(lambda b: b.takes_work))
    yield Family("backend_state", "1 for the state it is in.", ("backend", "state"), states)


def _reported(dispatcher: Dispatcher, backends: Backends) -> Iterator[Family]:
    """What engines last said. Missing is not zero: what an engine does not say has no series."""

    def each(read: Callable[[EngineReport], float | None]) -> Callable[[], Rows]:
        def values() -> Rows:
            for name, known in list(backends.known.items()):
                value = read(known.report) if known.report is not None else None
                if value is not None:
                    yield (name,), float(value)

        return values

    def ages() -> Rows:
        now = dispatcher.now()
        for name, known in list(backends.known.items()):
            if known.reported_at is not None:
                yield (name,), now - known.reported_at

    yield Family(
        "backend_running", "Requests running, by its last word.", BACKEND, each(lambda r: r.running)
    )
    yield Family(
        "backend_waiting",
        "Requests waiting inside the engine, by its last word.",
        BACKEND,
        each(lambda r: r.waiting),
    )
    yield Family(
        "backend_kv_used_ratio",
        "Share of its KV cache in use, by its last word.",
        BACKEND,
        each(lambda r: r.kv_used_ratio),
        fold="max",
    )
    yield Family("backend_report_age_seconds", "Age of its last report.", BACKEND, ages, fold="max")
    yield Family(
        "backend_preemptions",
        "Requests that the engine had to put back because its KV cache was full, by its own count.",
        BACKEND,
        each(lambda r: r.preemptions),
        "counter",
    )


def _queues(dispatcher: Dispatcher, backends: Backends) -> Iterator[Family]:
    """Waiting places, by model."""
    dispatch = dispatcher.dispatch

    def each(read: Callable[[frozenset[str]], int]) -> Callable[[], Rows]:
        return lambda: [
            ((name,), float(read(pool.backends))) for name, pool in backends.catalog.pools.items()
        ]

    yield Family(
        "queue_depth",
        "Requests waiting for its backends.",
        MODEL,
        each(dispatch.depth),
        fold="max",
    )
    yield Family(
        "queue_limit",
        "Most that may wait for its backends.",
        MODEL,
        each(dispatch.limit),
        fold="max",
    )


def _own(metrics: Metrics, heartbeat: Heartbeat, version: str) -> Iterator[Family]:
    """About the gateway itself."""
    yield Family(
        "config_reload_success",
        "1 when the last reload could be used.",
        (),
        lambda: [((), float(metrics.config_ok))],
    )
    yield Family(
        "event_loop_lag_seconds",
        "Most that a timer of the event loop was late in the last 30 seconds.",
        (),
        lambda: [((), heartbeat.lag_s())],
    )
    yield Family(
        "build_info",
        "1, with the versions that run.",
        ("version", "python"),
        lambda: [((version, platform.python_version()), 1.0)],
    )
