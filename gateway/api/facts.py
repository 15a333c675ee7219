"""From what the parts know to the facts that `core.diagnosis` turns into sentences."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from gateway.core.diagnosis import BackendFacts, Facts
from gateway.core.fleet import Backend
from gateway.core.state import state_of
from gateway.runtime.backends import Backends
from gateway.runtime.dispatcher import Dispatcher
from gateway.runtime.heartbeat import Heartbeat
from gateway.runtime.history import History
from gateway.runtime.known import Known
from gateway.runtime.log import LineLog
from gateway.runtime.metrics import Metrics


@dataclass(frozen=True, slots=True)
class Sources:
    """The owners of what is told. They are read, never changed."""

    backends: Backends
    dispatcher: Dispatcher
    metrics: Metrics
    history: History
    heartbeat: Heartbeat
    log: LineLog
    redis_up: Callable[[], bool | None] = lambda: None


def facts_of(sources: Sources) -> Facts:
    """What the last minute was like."""
    now = sources.dispatcher.now()
    before, latest = sources.history.last_minute(now)
    preemptions = sources.history.grown(now, lambda one: one.preemptions)
    errors = sources.history.grown(now, lambda one: one.errors)
    streams, placed = latest.streams - before.streams, latest.placed - before.placed
    return Facts(
        backends=tuple(
            _backend(now, known, backend, preemptions.get(name, 0), errors.get(name, 0))
            for name, known in sources.backends.known.items()
            if (backend := sources.dispatcher.dispatch.backends.get(name)) is not None
        ),
        queue_full_share=sources.history.queue_full_share(now),
        shed=max(0, latest.shed - before.shed),
        timed_out=max(0, latest.timed_out - before.timed_out),
        streams=max(0, streams),
        ttft_mean_s=(latest.ttft_s - before.ttft_s) / streams if streams > 0 else None,
        wait_mean_s=(latest.waited_s - before.waited_s) / placed if placed > 0 else None,
        config_ok=sources.metrics.config_ok,
        redis_up=sources.redis_up(),
        loop_lag_s=sources.heartbeat.lag_s(),
        log_dropped=sources.log.dropped,
    )


def slots_source(known: Known) -> str:
    """Who says how many slots it has: configured, reported, assumed, or unknown while nobody has."""
    if known.settings.slots is not None:
        return "configured"
    if known.report is None or known.report.slots is None:
        return "unknown"
    return "assumed" if known.report.slots_assumed else "reported"


def _backend(
    now: float, known: Known, backend: Backend, preemptions: int, errors: int
) -> BackendFacts:
    return BackendFacts(
        name=backend.name,
        state=state_of(backend),
        slots=backend.slots,
        slots_assumed=slots_source(known) == "assumed",
        report_age_s=None if known.reported_at is None else now - known.reported_at,
        others=backend.others(now),
        kv_used_ratio=known.report.kv_used_ratio if known.report is not None else None,
        preemptions=preemptions,
        errors=errors,
    )
