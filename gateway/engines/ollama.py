"""Ollama (engines.md section 2, read in its source, not run).

Quirks:
- It tells no slots, no queue and no load, and has no /health and no metrics (2.4). OLLAMA_NUM_PARALLEL is 1 by
  default and cannot be read from outside: 1 is assumed, and what it runs is our own count.
- /api/ps lists what is loaded and the context that is in force; /api/tags what is installed.
- A model is loaded by its first request, which may evict another one, but never one that is at work (2.5).
- `"data": null` means no models. "name:latest" also answers to "name".
- It checks the Host (403 with an empty body) and ignores keys (2.3). No probe may carry a client's Host.
- ":cloud" models are sent on to ollama.com (2.2): said aloud, as prompts leave the house.
"""

from __future__ import annotations

from typing import Final

from gateway.engines import paths
from gateway.engines.base import (
    Ask,
    Document,
    Engine,
    EngineReport,
    Look,
    Model,
    Seen,
    State,
    applying,
    unasked,
)
from gateway.engines.body import count, document_of, listed_models, objects, text

NAME: Final = "ollama"
_VERSION: Final = Ask("/api/version")
_LOADED: Final = Ask("/api/ps")
_INSTALLED: Final = Ask("/api/tags")
_MODELS: Final = Ask("/v1/models")
_LATEST: Final = ":latest"


def recognises(seen: Seen) -> bool:
    """By /api/version. LM Studio answers 200 there too, but with an error in the body (section 5)."""
    document = document_of(seen.get("/api/version"))
    return text(document.get("version")) is not None and "error" not in document


def _next_ask(seen: Seen, look: Look) -> Ask | None:
    alive = seen.get("/api/version")
    if "/api/version" in seen and (alive is None or alive.status >= 400):
        return None
    slow = (_INSTALLED, _MODELS) if look.full else ()
    return unasked(seen, _VERSION, _LOADED, *slow)


def _read(seen: Seen, known: EngineReport | None) -> EngineReport:
    alive = seen.get("/api/version")
    if alive is None or alive.status >= 500:
        return EngineReport(engine=NAME, state=State.DOWN, capabilities=paths.OLLAMA)
    loaded = _loaded(seen)
    models = _models(seen, known, loaded)
    return EngineReport(
        engine=NAME,
        state=State.UP,
        version=text(document_of(alive).get("version")),
        models=models,
        slots=1,
        slots_assumed=True,
        context_per_slot=_context(loaded),
        swaps=True,
        swap_waits=True,
        warnings=_warnings(alive.status, models),
        capabilities=paths.OLLAMA,
        documents=_documents(seen),
    )


def _loaded(seen: Seen) -> dict[str, Document] | None:
    """The loaded models by name; None when /api/ps did not say."""
    document = document_of(seen.get("/api/ps"))
    if not isinstance(document.get("models"), list):
        return None
    rows = objects(document["models"])
    return {name: row for row in rows if (name := text(row.get("model") or row.get("name")))}


def _models(
    seen: Seen, known: EngineReport | None, loaded: dict[str, Document] | None
) -> tuple[Model, ...] | None:
    """From /v1/models, else from /api/tags, else those known before with a fresh look at what is loaded."""
    found = listed_models(seen.get("/v1/models"))
    if found is None:
        found = _installed(seen)
    if found is None and loaded is not None and known is not None:
        found = known.models
    if found is None:
        return None
    return tuple(_model(model, loaded) for model in found)


def _installed(seen: Seen) -> tuple[Model, ...] | None:
    document = document_of(seen.get("/api/tags"))
    if not isinstance(document.get("models"), list):
        return None
    names = [text(row.get("model") or row.get("name")) for row in objects(document["models"])]
    entry: Document = {"object": "model", "owned_by": "library"}
    return tuple(Model(name, document=entry | {"id": name}) for name in names if name is not None)


def _model(model: Model, loaded: dict[str, Document] | None) -> Model:
    aliases = (model.id.removesuffix(_LATEST),) if model.id.endswith(_LATEST) else ()
    is_loaded = None if loaded is None else model.id in loaded
    return Model(model.id, is_loaded, aliases, model.document)


def _context(loaded: dict[str, Document] | None) -> int | None:
    """The least in force: a longer prompt is cut silently, so promise no more."""
    told = [count(row.get("context_length"), least=1) for row in (loaded or {}).values()]
    return min((tokens for tokens in told if tokens is not None), default=None)


def _documents(seen: Seen) -> dict[str, Document]:
    native = ("/api/version", "/api/ps", "/api/tags")
    return {path: found for path in native if (found := document_of(seen.get(path)))}


def _warnings(status: int, models: tuple[Model, ...] | None) -> tuple[str, ...]:
    return applying(
        (
            True,
            "Ollama does not say how many requests it runs at once; assuming 1, set `slots`",
        ),
        (
            status == 403,
            "Ollama refuses our Host (403); set OLLAMA_HOST=0.0.0.0 or call it by its address",
        ),
        (
            any(model.id.endswith((":cloud", "-cloud")) for model in models or ()),
            "Ollama offers :cloud models, which send prompts to ollama.com; list `models` to leave them out",
        ),
    )


ENGINE: Final = Engine(NAME, _next_ask, _read, recognises, active_s=2.5)
