"""Whatever else speaks the OpenAI API: LM Studio, TGI, LocalAI, mlx_lm, TabbyAPI, other gateways
(engines.md sections 5 and 6).

Quirks:
- Only /v1/models can be relied upon, and only if its *shape* is right: LM Studio answers 200 with an error to
  paths it does not know, and captive portals answer 200 with HTML.
- Many are single-threaded and answer nothing while they generate: more patience than with others.
- 503 and 429 mean "not now", never broken.
- What they run at once is not said anywhere (LM Studio's default is 4): 4 is assumed.
"""

from __future__ import annotations

from typing import Final

from gateway.engines import paths
from gateway.engines.base import (
    Ask,
    Engine,
    EngineReport,
    Look,
    Model,
    Seen,
    State,
    applying,
    refuses_key,
)
from gateway.engines.body import least_context, listed_models
from gateway.engines.llama_server import is_signed

NAME: Final = "openai"
_MODELS: Final = Ask("/v1/models")
_UNTOLD: Final = 4


def recognises(seen: Seen) -> bool:
    """Anything that is not signed by llama.cpp: a port may change hands between two rounds."""
    return not any(is_signed(answer) for answer in seen.values())


def _next_ask(seen: Seen, look: Look) -> Ask | None:  # noqa: ARG001  every Engine has this shape
    return None if _MODELS.path in seen else _MODELS


def _read(seen: Seen, known: EngineReport | None) -> EngineReport:  # noqa: ARG001  as above
    models = listed_models(seen.get("/v1/models"))
    state = _state(seen, models)
    if state in (State.DOWN, State.LOADING):
        return EngineReport(
            engine=NAME, state=state, warnings=_warnings(seen, state), capabilities=paths.OPENAI
        )
    return EngineReport(
        engine=NAME,
        state=state,
        models=models,
        slots=_UNTOLD,
        slots_assumed=True,
        context_per_slot=least_context(models),
        warnings=_warnings(seen, state),
        capabilities=paths.OPENAI,
    )


def _state(seen: Seen, models: tuple[Model, ...] | None) -> State:
    """Up with a list, and also when it only refuses to show one: `models` may name them in the config."""
    answer = seen.get("/v1/models")
    if answer is None:
        return State.DOWN
    if answer.status == 503:
        return State.LOADING
    if models is not None or answer.status in (401, 403, 404, 405, 429) or answer.cut:
        return State.UP
    return State.DOWN


def _warnings(seen: Seen, state: State) -> tuple[str, ...]:
    answer = seen.get("/v1/models")
    status = 0 if answer is None else answer.status
    return applying(
        (refuses_key(seen), "it refuses our key (401); set `api_key`"),
        (
            status in (403, 404, 405) or (answer is not None and answer.cut),
            "it shows no usable list at /v1/models; set `models`",
        ),
        (
            state is State.DOWN and status != 0,
            "it answers, but not like an OpenAI server; is the URL right?",
        ),
        (
            state is State.UP,
            "it does not say how many requests it runs at once; assuming 4, set `slots`",
        ),
    )


ENGINE: Final = Engine(NAME, _next_ask, _read, recognises, active_s=5.0, patience=10)
