"""llama-server (llama.cpp) with one model; a router process is handed on to `llama_router`.

Quirks, all from engines.md section 1:
- /health, /props and /v1/models are free: they never pass the inference thread and never wake a sleeper (1.6).
- /slots and /metrics wake a sleeping model and reset its idle timer, and asked faster than once a second they
  switch off the detection of clients that left (0.1). So /props comes first, and a sleeper is left alone.
- While loading, every path is a 503 "Loading model", before the key is looked at (1.6).
- /props, /slots and /metrics want the key; /health never does; /v1/models does in newer builds (1.3).
- /props says `endpoint_slots` and `endpoint_metrics`: what is switched off is not asked for. Older builds say
  nothing and answer 501 from the HTTP thread, which costs nothing.
- Started without -np there are 4 slots over ONE pool, and each reports the whole context. When the sum of the
  running sequences overflows, all of them die (0.4). /props does not say so; but with a split context a slot
  could not have the full trained context and be one of exactly four by default, so that is read as shared.
- `media_marker` in /props is random per process: the cheapest sign of a restart (recorded in three processes).
"""

from __future__ import annotations

from typing import Final

from gateway.engines import llama_router, paths
from gateway.engines.base import (
    Answer,
    Ask,
    Engine,
    EngineReport,
    Look,
    Model,
    Seen,
    State,
    applying,
    never_told_slots,
    refuses_key,
    unanswered,
    unasked,
)
from gateway.engines.body import child, count, document_of, listed_models, owner, text
from gateway.engines.llama_load import AUTOMATIC_SLOTS, MOST_SLOTS, load_of, pool_of

NAME: Final = "llama-server"
_HEALTH: Final = Ask("/health")
_PROPS: Final = Ask("/props")
_MODELS: Final = Ask("/v1/models")
_SLOTS: Final = Ask("/slots", timeout_s=5.0)
_METRICS: Final = Ask("/metrics", timeout_s=5.0)


def recognises(seen: Seen) -> bool:
    """By the Server header, on every answer even at 401 and 503; else by what only it says of itself."""
    return (
        any(is_signed(answer) for answer in seen.values())
        or "total_slots" in document_of(seen.get("/props"))
        or owner(seen.get("/v1/models")) == "llamacpp"
        or is_loading(seen.get("/health"))
    )


def is_loading(answer: Answer | None) -> bool:
    """The 503 of a server whose model is not there yet; "no slot available" is another one."""
    return answer is not None and answer.status == 503 and b"oading model" in answer.body[:4096]


def is_signed(answer: Answer | None) -> bool:
    """By its Server header."""
    return answer is not None and answer.headers.get("server", "").startswith("llama.cpp")


def _next_ask(seen: Seen, look: Look) -> Ask | None:
    for ask in (_HEALTH, _PROPS):
        if ask.path not in seen:
            return ask
        answer = seen[ask.path]
        if answer is None or answer.status >= 500:
            return None
    if llama_router.is_router(seen["/props"]):
        return llama_router.next_ask(seen, look)
    return unasked(seen, *_later(seen, look))


def _later(seen: Seen, look: Look) -> list[Ask]:
    """What may be asked beside the liveness questions; the weighing ones last, back to back."""
    props = document_of(seen["/props"])
    later = [_MODELS] if look.full else []
    if look.weigh and props.get("is_sleeping") is not True:
        if props.get("endpoint_slots") is not False:
            later.append(_SLOTS)
        if props.get("endpoint_metrics") is not False and not unanswered(seen, _SLOTS):
            later.append(_METRICS)
    return later


def _read(seen: Seen, known: EngineReport | None) -> EngineReport:
    state = _state(seen)
    if state in (State.DOWN, State.LOADING):
        return EngineReport(engine=NAME, state=state, capabilities=paths.LLAMA_SERVER)
    if llama_router.is_router(seen.get("/props")):
        return llama_router.read(seen, known)
    return _read_single(seen, known, state)


def _read_single(seen: Seen, known: EngineReport | None, state: State) -> EngineReport:
    props = document_of(seen.get("/props"))
    load = load_of(seen.get("/slots"), seen.get("/metrics"))
    models = _models(seen, asleep=state is State.SLEEPING)
    slots = count(props.get("total_slots"), least=1, most=MOST_SLOTS) or load.slots
    assumed = slots is None and never_told_slots(known)
    if assumed:
        slots = 1
    context = (
        count(child(props, "default_generation_settings").get("n_ctx"), least=1)
        or load.context_per_slot
    )
    shared = _is_shared(slots, context, models or (known.models if known else None))
    pool = pool_of(slots, context, shared=shared)
    return EngineReport(
        engine=NAME,
        state=state,
        version=text(props.get("build_info")),
        models=models,
        slots=slots,
        slots_assumed=assumed,
        context_per_slot=context,
        kv_tokens=pool,
        kv_shared=shared,
        running=load.running,
        waiting=load.waiting,
        kv_used_ratio=load.used_of(pool),
        idle_slots=load.idle_slots,
        prompt_tokens=load.prompt_tokens,
        cached_tokens=load.cached_tokens,
        generated_tokens=load.generated_tokens,
        incarnation=text(props.get("media_marker")) or load.started,
        warnings=_warnings(seen, assumed=assumed, shared=shared),
        capabilities=paths.LLAMA_SERVER,
    )


def _state(seen: Seen) -> State:
    health, props = seen.get("/health"), seen.get("/props")
    if is_loading(health) or is_loading(props):
        return State.LOADING
    if health is None or health.status >= 500:
        return State.DOWN
    asleep = document_of(props).get("is_sleeping") is True
    return State.SLEEPING if asleep else State.UP


def _models(seen: Seen, *, asleep: bool) -> tuple[Model, ...] | None:
    found = listed_models(seen.get("/v1/models"))
    if found is None:
        return None
    return tuple(Model(m.id, not asleep, llama_router.aliases_of(m), m.document) for m in found)


def _is_shared(slots: int | None, context: int | None, models: tuple[Model, ...] | None) -> bool:
    """True when every one of the four automatic slots has the full context the model was trained for."""
    meta = child(models[0].document, "meta") if models else {}
    trained = count(meta.get("n_ctx_train"), least=1)
    return slots == AUTOMATIC_SLOTS and trained is not None and trained == context


def _warnings(seen: Seen, *, assumed: bool, shared: bool) -> tuple[str, ...]:
    return applying(
        (refuses_key(seen), f"{NAME} refuses our key (401); set `api_key`"),
        (assumed, f"{NAME} does not say how many slots it has; assuming 1, set `slots`"),
        (
            shared,
            f"{NAME} shares one KV cache between its slots, all streams die when it is full; set `kv_tokens`",
        ),
        (
            _is_off(seen, "slots"),
            f"{NAME} runs without --slots; whether a cancelled request has ended is estimated",
        ),
        (
            _is_off(seen, "metrics"),
            f"{NAME} runs without --metrics; its waiting requests and cache counters are unknown",
        ),
        (unanswered(seen, _SLOTS), f"{NAME} does not answer /slots; its load is unknown"),
        (unanswered(seen, _METRICS), f"{NAME} does not answer /metrics; its load is unknown"),
        (unanswered(seen, _PROPS), f"{NAME} does not answer /props; its load is unknown"),
    )


def _is_off(seen: Seen, name: str) -> bool:
    answer = seen.get(f"/{name}")
    told = document_of(seen.get("/props")).get(f"endpoint_{name}")
    return told is False or (answer is not None and answer.status == 501)


ENGINE: Final = Engine(NAME, _next_ask, _read, recognises, active_s=2.1)
