"""`GET /status`: what the gateway believes, as one JSON document. Its shape is in docs/status.md.

It is made from memory in well under a millisecond for a handful of backends, and holds no key and no prompt.
"""

from __future__ import annotations

from typing import Any

from gateway.api.facts import Sources, facts_of, slots_source
from gateway.core.cost import Price
from gateway.core.diagnosis import Facts, findings
from gateway.core.fleet import Backend
from gateway.core.state import word_of
from gateway.runtime.decisions import Attempt, Decision
from gateway.runtime.history import Point
from gateway.runtime.known import Known


class Status:
    """Reads from the owners; holds nothing itself but when it began."""

    def __init__(self, version: str, sources: Sources) -> None:
        self._version = version
        self._sources = sources
        self._began = sources.dispatcher.now()

    def document(self, *, draining: bool, explain: str | None = None) -> dict[str, Any]:
        """All of it; with `explain`, also why the request of that id went where it went."""
        sources = self._sources
        dispatch, metrics = sources.dispatcher.dispatch, sources.metrics
        now = sources.dispatcher.now()
        facts = facts_of(sources)
        document = {
            "version": self._version,
            "uptime_s": round(now - self._began, 1),
            "draining": draining,
            "ready": sources.backends.ready and not draining,
            "findings": [
                {"level": one.level, "about": one.about, "text": one.text}
                for one in findings(facts)
            ],
            "queued": dispatch.queued,
            "last_minute": self._last_minute(now, facts),
            "p95": metrics.p95(),
            "backends": [
                self._backend(now, known, dispatch.backends[name])
                for name, known in sources.backends.known.items()
                if name in dispatch.backends
            ],
            "models": {
                name: {
                    "backends": sorted(pool.backends),
                    "queued": dispatch.depth(pool.backends),
                    "queue_limit": dispatch.limit(pool.backends),
                }
                for name, pool in sources.backends.catalog.pools.items()
            },
            "keys": self._keys(),
            "shed": {f"{model}/{why}": n for (model, why), n in metrics.shed.items()},
            "config_ok": metrics.config_ok,
            "loop_lag_s": round(sources.heartbeat.lag_s(), 4),
            "history": [_point(now, one) for one in sources.history.points],
        }
        if explain is not None:
            found = metrics.decisions.find(explain)
            document["decision"] = None if found is None else _decision(now, found)
        return document

    def _last_minute(self, now: float, facts: Facts) -> dict[str, Any]:
        before, latest = self._sources.history.last_minute(now)
        seconds = max(latest.at - before.at, 1.0)
        prompt = latest.prompt_tokens - before.prompt_tokens
        cached = latest.cached_tokens - before.cached_tokens
        return {
            "served_per_s": _rate(latest.served - before.served, seconds),
            "shed_per_s": _rate(latest.shed - before.shed, seconds),
            "generated_tokens_per_s": _rate(
                latest.generated_tokens - before.generated_tokens, seconds
            ),
            "queue_full_share": round(facts.queue_full_share, 3),
            "cached_share": round(cached / prompt, 3) if prompt > 0 else None,
            "ttft_mean_s": _rounded(facts.ttft_mean_s),
            "queue_wait_mean_s": _rounded(facts.wait_mean_s),
        }

    def _backend(self, now: float, known: Known, backend: Backend) -> dict[str, Any]:
        report = known.report
        return {
            "name": backend.name,
            "url": known.settings.url,
            "engine": report.engine if report else None,
            "version": report.version if report else None,
            "state": word_of(backend),
            "breaker": backend.breaker.state.value,
            "slots": backend.slots,
            "slots_source": slots_source(known),
            "in_flight": backend.in_flight,
            "settling": backend.settling_permits,
            "others": round(backend.others(now), 1),
            "backlog_tokens": backend.backlog_tokens,
            "prefill_tokens_per_s": round(backend.prefill_rate.value, 1),
            "service_s": round(backend.service_s.value, 3),
            "cached_share": self._cached_share(backend.name),
            "report_age_s": None
            if known.reported_at is None
            else round(now - known.reported_at, 2),
            "running": report.running if report else None,
            "waiting": report.waiting if report else None,
            "kv_used_ratio": report.kv_used_ratio if report else None,
            "preemptions": report.preemptions if report else None,
            "context_per_slot": report.context_per_slot if report else None,
            "models": [model.id for model in (report.models or ())] if report else [],
            "warnings": list(report.warnings) if report else [],
        }

    def _cached_share(self, backend: str) -> float | None:
        """Of all prompt tokens since the start; None before the first."""
        all_series = self._sources.metrics.all_series
        series = [one for (_, name), one in all_series.items() if name == backend]
        prompt = sum(one.prompt_tokens for one in series)
        return round(sum(one.cached_tokens for one in series) / prompt, 3) if prompt else None

    def _keys(self) -> dict[str, dict[str, int]]:
        """Requests and tokens of each key since the start, the busiest first."""
        metrics = self._sources.metrics
        keys: dict[str, dict[str, int]] = {}
        for (key, outcome), count in metrics.key_requests.items():
            own = keys.setdefault(key, {"requests": 0, "served": 0})
            own["requests"] += count
            if outcome == "served":
                own["served"] += count
        for (key, kind), count in metrics.key_tokens.items():
            keys.setdefault(key, {"requests": 0, "served": 0})[f"{kind}_tokens"] = count
        return dict(sorted(keys.items(), key=lambda item: -item[1]["requests"]))


def _point(now: float, one: Point) -> dict[str, Any]:
    return {
        "age_s": round(now - one.at, 1),
        "served_per_s": round(max(0.0, one.served_per_s), 2),
        "shed_per_s": round(max(0.0, one.shed_per_s), 2),
        "queued": one.queued,
        "queue_limit": one.queue_limit,
        "in_flight": one.in_flight,
        "slots": one.slots,
        "ttft_p95_s": _rounded(one.ttft_p95_s),
        "itl_p95_s": _rounded(one.itl_p95_s),
    }


def _decision(now: float, one: Decision) -> dict[str, Any]:
    return {
        "request_id": one.request_id,
        "age_s": round(now - one.at, 2),
        "key": one.key,
        "model": one.model,
        "attempts": [_attempt(attempt) for attempt in one.attempts],
        "outcome": one.outcome,
        "ttft_s": _rounded(one.ttft_s),
        "seconds": _rounded(one.seconds),
        "prompt_tokens": one.prompt_tokens,
        "cached_tokens": one.cached_tokens,
    }


def _attempt(one: Attempt) -> dict[str, Any]:
    others = [price for price in one.prices if price is not one.price]
    return {
        "affinity": one.affinity,
        "queued_s": round(one.queued_s, 4),
        **_price(one.price),
        "others": [_price(price) for price in sorted(others, key=lambda price: price.total_s)],
    }


def _price(price: Price) -> dict[str, Any]:
    """The terms of `core.cost`, in seconds."""
    return {
        "backend": price.backend.name,
        "cost_s": _rounded(price.total_s),
        "wait_s": _rounded(price.wait_s),
        "load_s": _rounded(price.load_s),
        "backlog_s": _rounded(price.backlog_s),
        "own_s": _rounded(price.own_s),
        "crowd": price.crowd,
        "uncached_tokens": price.own_tokens,
        "matched_bytes": price.matched,
    }


def _rate(count: int, seconds: float) -> float:
    return round(max(0, count) / seconds, 2)


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 4)
