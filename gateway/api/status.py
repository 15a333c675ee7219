"""`GET /status`: what the gateway believes, as one JSON document. Its shape is in docs/api.md."""

from __future__ import annotations

from typing import Any

from gateway.core.fleet import Backend
from gateway.runtime.backends import Backends, Known
from gateway.runtime.dispatcher import Dispatcher
from gateway.runtime.metrics import Metrics


class Status:
    """Reads from the owners; holds nothing itself."""

    def __init__(
        self, version: str, backends: Backends, dispatcher: Dispatcher, metrics: Metrics
    ) -> None:
        self._version = version
        self._backends = backends
        self._dispatcher = dispatcher
        self._metrics = metrics

    def document(self, *, draining: bool) -> dict[str, Any]:
        dispatch = self._dispatcher.dispatch
        now = self._dispatcher.now()
        return {
            "version": self._version,
            "draining": draining,
            "ready": self._backends.ready and not draining,
            "queued": dispatch.queued,
            "backends": [
                self._backend(now, known, dispatch.backends[name])
                for name, known in self._backends.known.items()
                if name in dispatch.backends
            ],
            "models": {
                name: {
                    "backends": sorted(pool.backends),
                    "queued": dispatch.depth(pool.backends),
                    "queue_limit": dispatch.limit(pool.backends),
                }
                for name, pool in self._backends.catalog.pools.items()
            },
            "p95": self._metrics.p95(),
            "shed": {f"{model}/{why}": n for (model, why), n in self._metrics.shed.items()},
        }

    def _backend(self, now: float, known: Known, backend: Backend) -> dict[str, Any]:
        report = known.report
        age = None if known.reported_at is None else round(now - known.reported_at, 2)
        return {
            "name": backend.name,
            "url": known.settings.url,
            "engine": report.engine if report else None,
            "version": report.version if report else None,
            "state": state_of(backend),
            "breaker": backend.breaker.state.value,
            "slots": backend.slots,
            "slots_source": _slots_source(known),
            "in_flight": backend.in_flight,
            "settling": backend.settling_permits,
            "backlog_tokens": backend.backlog_tokens,
            "prefill_tokens_per_s": round(backend.prefill_rate.value, 1),
            "service_s": round(backend.service_s.value, 3),
            "report_age_s": age,
            "running": report.running if report else None,
            "waiting": report.waiting if report else None,
            "kv_used_ratio": report.kv_used_ratio if report else None,
            "context_per_slot": report.context_per_slot if report else None,
            "models": [model.id for model in (report.models or ())] if report else [],
            "warnings": list(report.warnings) if report else [],
        }


def state_of(backend: Backend) -> str:
    """One word for people: up, busy, loading, sleeping, draining, failing or down."""
    if backend.draining:
        return "draining"
    if backend.fitness.value == "up":
        if backend.breaker.is_open:
            return "failing"
        return "busy" if backend.in_flight >= backend.lendable else "up"
    return backend.fitness.value


def _slots_source(known: Known) -> str:
    if known.settings.slots is not None:
        return "configured"
    if known.report is None or known.report.slots is None:
        return "unknown"
    return "assumed" if known.report.slots_assumed else "reported"
