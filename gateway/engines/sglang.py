"""SGLang (engines.md section 4, read in its source, not run).

Quirks:
- /health generates a token and takes a second or more: never used as a probe once the engine is known.
- /v1/loads needs no flag and tells everything, per data-parallel rank, `max_running_requests` among it. Older
  versions have no /v1/loads; then /model_info shows life and /metrics (only with --enable-metrics) the load.
- While it starts, it answers 503.
- It imitates Ollama's /api/tags, chat, generate and show. They are not offered as such.
- Gauges repeat per tensor- and pipeline-parallel rank: rank 0 counts, summed over data-parallel ranks.
"""

from __future__ import annotations

from typing import Final

from gateway.engines import paths
from gateway.engines.base import (
    Answer,
    Ask,
    Document,
    Engine,
    EngineReport,
    Look,
    Seen,
    State,
    applying,
    never_told_slots,
    refuses_key,
    unasked,
)
from gateway.engines.body import (
    count,
    document_of,
    least_context,
    loaded_models,
    number,
    objects,
    owner,
    text,
)
from gateway.engines.prom_text import exposition, mean, ratio, total, whole

NAME: Final = "sglang"
_LOADS: Final = Ask("/v1/loads?include=core")
_INFO: Final = Ask("/model_info")
_METRICS: Final = Ask("/metrics", timeout_s=5.0)
_MODELS: Final = Ask("/v1/models")
_UNTOLD: Final = 16
_MOST_REQUESTS: Final = 1_000_000
_RANK_0: Final = b'tp_rank="0"'


def recognises(seen: Seen) -> bool:
    """By the shape of what only it answers, or by the owner of its models."""
    info = document_of(seen.get(_INFO.path))
    return (
        ("model_path" in info and "is_generation" in info)
        or owner(seen.get("/v1/models")) == NAME
        or bool(_ranks(seen.get(_LOADS.path)))
        or b"sglang:" in exposition(seen.get("/metrics"))
    )


def _next_ask(seen: Seen, look: Look) -> Ask | None:
    if _LOADS.path not in seen:
        return _LOADS
    first = seen[_LOADS.path]
    if first is None or first.status >= 500:
        return None
    slow = (_MODELS,) if look.full else ()
    if _ranks(first):
        return unasked(seen, *slow)
    return unasked(seen, _INFO, *slow, _METRICS)


def _read(seen: Seen, known: EngineReport | None) -> EngineReport:
    state = _state(seen)
    if state is not State.UP:
        return EngineReport(engine=NAME, state=state, capabilities=paths.SGLANG)
    loads = seen.get(_LOADS.path)
    ranks = _ranks(loads)
    metrics = exposition(seen.get("/metrics"))
    models = loaded_models(seen.get("/v1/models"))
    slots = _sum(ranks, "max_running_requests", most=1 << 16) or None
    assumed = slots is None and never_told_slots(known)
    pool = _sum(ranks, "max_total_num_tokens") or _gauge(metrics, "sglang:max_total_num_tokens")
    return EngineReport(
        engine=NAME,
        state=state,
        version=text(document_of(loads).get("version")),
        models=models,
        slots=_UNTOLD if assumed else slots,
        slots_assumed=assumed,
        context_per_slot=least_context(models),
        kv_tokens=pool,
        kv_shared=True,
        running=_first(
            _sum(ranks, "num_running_reqs", most=_MOST_REQUESTS),
            _gauge(metrics, "sglang:num_running_reqs"),
        ),
        waiting=_first(
            _sum(ranks, "num_waiting_reqs", most=_MOST_REQUESTS),
            _gauge(metrics, "sglang:num_queue_reqs"),
        ),
        kv_used_ratio=_used(ranks, metrics),
        warnings=_warnings(seen, assumed=assumed),
        capabilities=paths.SGLANG,
    )


def _state(seen: Seen) -> State:
    """503 while it starts; whatever else it answers to a question, it lives."""
    alive = [seen.get(_LOADS.path), seen.get(_INFO.path)]
    statuses = [answer.status for answer in alive if answer is not None]
    if 503 in statuses:
        return State.LOADING
    return State.UP if any(status < 500 for status in statuses) else State.DOWN


def _ranks(loads: Answer | None) -> list[Document]:
    return list(objects(document_of(loads).get("loads")))


def _sum(ranks: list[Document], name: str, most: int = 1 << 50) -> int | None:
    """The sum over the ranks; None when one of them does not say."""
    told = [count(rank.get(name), most=most) for rank in ranks]
    known = [value for value in told if value is not None]
    return sum(known) if known and len(known) == len(told) else None


def _gauge(metrics: bytes, name: str) -> int | None:
    return whole(total(metrics, name, where=_RANK_0))


def _first(told: int | None, otherwise: int | None) -> int | None:
    return otherwise if told is None else told


def _used(ranks: list[Document], metrics: bytes) -> float | None:
    told = [number(rank.get("token_usage"), 1.01) for rank in ranks]
    known = [value for value in told if value is not None]
    if known:
        return min(1.0, sum(known) / len(known))
    return ratio(mean(metrics, "sglang:token_usage", where=_RANK_0))


def _warnings(seen: Seen, *, assumed: bool) -> tuple[str, ...]:
    return applying(
        (refuses_key(seen), f"{NAME} refuses our key (401); set `api_key`"),
        (
            assumed,
            f"{NAME} does not say how many requests it runs at once; assuming {_UNTOLD}, set `slots`",
        ),
    )


ENGINE: Final = Engine(NAME, _next_ask, _read, recognises, active_s=1.05)
