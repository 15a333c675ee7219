"""vLLM (engines.md section 3).

Quirks:
- The port is not bound while it loads: refused, so DOWN, is how loading looks. /health is 503 only when the
  engine is dead (3.6). A sleeping one says so in `engine_sleep_state` (3.4).
- /metrics, /health and /version are open; only /v1/* wants the key, as Bearer (3.3). Scrapes are cheap (15 ms).
- Nothing says how many requests run at once (3.5). Guess by the KV cache, 8,192 tokens a request; what it runs
  while others wait is the better answer. That answer fades upwards: a full batch with nobody waiting shows that
  a little more may fit. Without this memory every second report would lend the guess again.
- Metric names changed over the versions, and old ones lack the `engine` label: aliases, summed over series.
- With --disable-log-stats /metrics answers without `vllm:num_requests_*`: load unknown, not zero.
"""

from __future__ import annotations

from typing import Final

from gateway.engines import paths
from gateway.engines.base import (
    Ask,
    Engine,
    EngineReport,
    Look,
    Seen,
    State,
    applying,
    refuses_key,
    unanswered,
    unasked,
)
from gateway.engines.body import count, document_of, least_context, loaded_models, owner, text
from gateway.engines.prom_text import exposition, labels, mean, ratio, series, total, whole

NAME: Final = "vllm"
_HEALTH: Final = Ask("/health")
_METRICS: Final = Ask("/metrics", timeout_s=5.0)
_MODELS: Final = Ask("/v1/models")
_VERSION: Final = Ask("/version")
_TOKENS_A_REQUEST: Final = 8192
_FEWEST, _MOST = 4, 64
_UNTOLD: Final = 16
_MOST_REQUESTS: Final = 1_000_000


def recognises(seen: Seen) -> bool:
    """Its metrics carry its name; /version alone is too common, and so is `owned_by` behind gateways."""
    says_version = text(document_of(seen.get("/version")).get("version")) is not None
    return b"vllm:" in exposition(seen.get("/metrics")) or (
        says_version and owner(seen.get("/v1/models")) == NAME
    )


def _next_ask(seen: Seen, look: Look) -> Ask | None:
    health = seen.get("/health")
    if "/health" in seen and (health is None or health.status >= 500):
        return None
    slow = (_VERSION, _MODELS) if look.full else ()
    load = (_METRICS,) if look.full or look.weigh else ()
    return unasked(seen, _HEALTH, *slow, *load)


def _read(seen: Seen, known: EngineReport | None) -> EngineReport:
    health = seen.get("/health")
    if health is None or health.status >= 500:
        return EngineReport(engine=NAME, state=State.DOWN, capabilities=paths.VLLM)
    metrics = exposition(seen.get("/metrics"))
    running = whole(total(metrics, "vllm:num_requests_running"), _MOST_REQUESTS)
    waiting = whole(total(metrics, "vllm:num_requests_waiting"), _MOST_REQUESTS)
    models = loaded_models(seen.get("/v1/models"))
    pool = _pool(metrics)
    slots, assumed = _slots(pool, running, waiting, known)
    return EngineReport(
        engine=NAME,
        state=State.SLEEPING if _is_asleep(metrics) else State.UP,
        version=text(document_of(seen.get("/version")).get("version")),
        models=models,
        slots=slots,
        slots_assumed=assumed,
        slots_inferred=not assumed and slots != _guess(pool),
        context_per_slot=least_context(models),
        kv_tokens=pool,
        kv_shared=True,
        running=running,
        waiting=waiting,
        kv_used_ratio=ratio(mean(metrics, "vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc")),
        preemptions=_counter(metrics, "vllm:num_preemptions"),
        prompt_tokens=_counter(metrics, "vllm:prompt_tokens"),
        cached_tokens=_counter(
            metrics,
            "vllm:prompt_tokens_cached",
            "vllm:prefix_cache_hits",
            "vllm:gpu_prefix_cache_hits",
        ),
        generated_tokens=_counter(metrics, "vllm:generation_tokens"),
        incarnation=_incarnation(metrics),
        warnings=_warnings(seen, pool, running, assumed=assumed),
        capabilities=paths.VLLM,
    )


def _slots(
    pool: int | None, running: int | None, waiting: int | None, known: EngineReport | None
) -> tuple[int, bool]:
    """How many requests to lend, and whether that is a mere assumption.

    (1) Some wait: it runs as many as it can, now or in the report before, if some waited then too.
    (2) None wait, and an earlier (1) taught us less than the guess: keep that, and a quarter more when full.
    (3) Otherwise the guess.
    """
    guess = _guess(pool)
    if running is None or waiting is None:
        return (
            (known.slots, known.slots_assumed) if known and known.slots else (guess, pool is None)
        )
    if waiting > 0:
        before = known.running if known and known.waiting else 0
        return max(1, running, before or 0), False
    learned = known.slots if known and not known.slots_assumed else None
    if learned is None or learned >= guess:
        return guess, pool is None
    if running < learned:
        return learned, False
    return min(guess, running + max(1, learned // 4)), False


def _guess(pool: int | None) -> int:
    """By its KV cache, if it says how large that is."""
    return _UNTOLD if pool is None else min(_MOST, max(_FEWEST, pool // _TOKENS_A_REQUEST))


def _pool(metrics: bytes) -> int | None:
    """KV tokens over all engines: said as such by newer versions, else blocks times their size."""
    sizes = [_tokens(labels(raw)) for raw, _ in series(metrics, "vllm:cache_config_info")]
    known = [size for size in sizes if size is not None]
    return sum(known) if known and len(known) == len(sizes) else None


def _tokens(config: dict[str, str]) -> int | None:
    tokens = _figure(config, "kv_cache_size_tokens")
    blocks, block = _figure(config, "num_gpu_blocks"), _figure(config, "block_size")
    if tokens is None and blocks is not None and block is not None:
        return blocks * block
    return tokens


def _figure(config: dict[str, str], name: str) -> int | None:
    """A label that holds a number, or the word None."""
    value = config.get(name, "")
    return count(int(value), least=1) if value.isdecimal() and len(value) < 16 else None


def _is_asleep(metrics: bytes) -> bool:
    states = [
        (labels(raw).get("sleep_state"), value)
        for raw, value in series(metrics, "vllm:engine_sleep_state")
    ]
    return any(name == "awake" and value == 0 for name, value in states)


def _counter(metrics: bytes, *names: str) -> int | None:
    """Newer exporters add `_total` to counters, older ones may not."""
    return whole(total(metrics, *(name + end for name in names for end in ("_total", ""))))


def _incarnation(metrics: bytes) -> str | None:
    started = total(metrics, "process_start_time_seconds", "vllm:prompt_tokens_created")
    return None if started is None else f"{started:.3f}"


def _warnings(
    seen: Seen, pool: int | None, running: int | None, *, assumed: bool
) -> tuple[str, ...]:
    silent = unanswered(seen, _METRICS)
    return applying(
        (refuses_key(seen), f"{NAME} refuses our key (401); set `api_key`"),
        (
            assumed,
            f"{NAME} does not say how many requests it runs at once; assuming {_UNTOLD}, set `slots`",
        ),
        (
            pool is not None,
            f"{NAME} does not say how many requests it runs at once; estimated by its KV cache, set `slots`",
        ),
        (silent, f"{NAME} does not answer /metrics; its load is unknown"),
        (
            running is None and not silent,
            f"{NAME} publishes no vllm:num_requests_running; its load is unknown",
        ),
    )


ENGINE: Final = Engine(NAME, _next_ask, _read, recognises, active_s=1.05)
