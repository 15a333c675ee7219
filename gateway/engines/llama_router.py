"""llama-server as a router: many models, each loaded on demand in a child process (engines.md 1.6).

Quirks:
- A plain GET of /props, /slots or /metrics with `?model=X` loads X, and may evict another. So a model is asked
  only while the list says "loaded", and always with autoload=false.
- autoload=false does not keep a scrape from waking a *sleeping* child (cases.md, hazards): one that sleeps is
  not asked at all, and /props, which is free, comes before /slots.
- Each child has slots of its own, but a backend here has one number of slots. It is that of its smallest loaded
  child, so that no child ever gets more than its own. Load figures are read only while exactly one is loaded.
- The list shows the arguments of each child: --parallel is known without asking. Without it there are four
  slots over one shared pool (0.4).
"""

from __future__ import annotations

from itertools import pairwise
from typing import Final
from urllib.parse import quote

from gateway.engines import paths
from gateway.engines.base import (
    Answer,
    Ask,
    EngineReport,
    Look,
    Model,
    Seen,
    State,
    applying,
    refuses_key,
    unasked,
)
from gateway.engines.body import child, count, document_of, least_context, listed_models, text
from gateway.engines.llama_load import AUTOMATIC_SLOTS, MOST_SLOTS, LlamaLoad, load_of, pool_of

_NAME: Final = "llama-server"
_MODELS: Final = Ask("/v1/models")


def is_router(props: Answer | None) -> bool:
    """By its /props without a model."""
    return document_of(props).get("role") == "router"


def next_ask(seen: Seen, look: Look) -> Ask | None:
    """The list in every round, as it is where loading shows; then the only loaded child, if it may be weighed."""
    if "/v1/models" not in seen:
        return _MODELS
    name = _only_loaded(_models(seen) or ())
    if name is None or not look.weigh:
        return None
    props = _of_child("props", name)
    first = unasked(seen, props)
    if first is not None:
        return first
    told = document_of(seen[props.path])
    if not told or told.get("is_sleeping") is True:
        return None
    return unasked(seen, _of_child("slots", name), _of_child("metrics", name))


def read(seen: Seen, known: EngineReport | None) -> EngineReport:
    """The report of the router as one backend."""
    listed = _models(seen)
    models = listed if listed is not None else ((known.models if known else None) or ())
    own = document_of(seen["/props"])
    name = _only_loaded(models)
    props = document_of(seen.get(_of_child("props", name).path)) if name else {}
    load = _load(seen, name)
    counted = _slots(models)
    slots = count(props.get("total_slots"), least=1, most=MOST_SLOTS) or counted
    if slots is None:
        slots = _told_before(known, name)
    context = least_context(tuple(model for model in models if model.loaded))
    shared = name is not None and counted is None
    most_loaded = count(own.get("max_instances"), least=1, most=MOST_SLOTS)
    pool = pool_of(slots or AUTOMATIC_SLOTS, context, shared=shared) if name else None
    return EngineReport(
        engine=_NAME,
        state=State.UP,
        version=text(own.get("build_info")),
        models=listed,
        slots=slots or AUTOMATIC_SLOTS,
        slots_assumed=slots is None,
        context_per_slot=context,
        kv_tokens=pool,
        kv_shared=shared,
        max_loaded=most_loaded,
        swaps=most_loaded is not None,
        running=load.running,
        waiting=load.waiting,
        kv_used_ratio=load.used_of(pool),
        idle_slots=load.idle_slots,
        prompt_tokens=load.prompt_tokens,
        cached_tokens=load.cached_tokens,
        generated_tokens=load.generated_tokens,
        incarnation=text(props.get("media_marker")) or load.started,
        warnings=_warnings(seen, models, assumed=slots is None),
        capabilities=paths.LLAMA_SERVER,
    )


def aliases_of(model: Model) -> tuple[str, ...]:
    """The further names of `--alias a,b`; the list in the document may repeat the id."""
    listed = model.document.get("aliases")
    names = [text(name) for name in listed] if isinstance(listed, list) else []
    return tuple(name for name in names if name is not None and name != model.id)


def _models(seen: Seen) -> tuple[Model, ...] | None:
    found = listed_models(seen.get("/v1/models"))
    if found is None:
        return None
    return tuple(
        Model(
            model.id,
            child(model.document, "status").get("value") == "loaded",
            aliases_of(model),
            model.document,
        )
        for model in found
    )


def _only_loaded(models: tuple[Model, ...]) -> str | None:
    loaded = [model.id for model in models if model.loaded]
    return loaded[0] if len(loaded) == 1 else None


def _of_child(what: str, model: str) -> Ask:
    return Ask(f"/{what}?model={quote(model, safe='')}&autoload=false", timeout_s=5.0)


def _load(seen: Seen, name: str | None) -> LlamaLoad:
    if name is None:
        return load_of(None, None)
    slots, metrics = _of_child("slots", name), _of_child("metrics", name)
    return load_of(seen.get(slots.path), seen.get(metrics.path))


def _slots(models: tuple[Model, ...]) -> int | None:
    """The least --parallel among the loaded models, or among all while none is; None: left to automatic."""
    told = [_parallel(model) for model in models if model.loaded]
    told = told or [_parallel(model) for model in models]
    given = [slots for slots in told if slots is not None]
    return min(given) if given and len(given) == len(told) else None


def _told_before(known: EngineReport | None, name: str | None) -> int | None:
    """What the /props of the child that is still the only loaded one said when it was last asked."""
    if known is None or known.slots_assumed or name is None:
        return None
    return known.slots if _only_loaded(known.models or ()) == name else None


def _parallel(model: Model) -> int | None:
    args = child(model.document, "status").get("args")
    words = args if isinstance(args, list) else []
    for word, value in pairwise(words):
        if word in ("--parallel", "-np") and isinstance(value, str) and value.isdecimal():
            return count(int(value[:9]), least=1, most=MOST_SLOTS)
    return None


def _warnings(seen: Seen, models: tuple[Model, ...], *, assumed: bool) -> tuple[str, ...]:
    several = sum(1 for model in models if model.loaded) > 1
    return applying(
        (refuses_key(seen), f"{_NAME} refuses our key (401); set `api_key`"),
        (
            assumed,
            f"{_NAME} (router) starts its models without --parallel; assuming 4 slots, set `slots`",
        ),
        (
            several,
            f"{_NAME} (router) has several models loaded; counting the slots of the smallest one",
        ),
    )
