"""What llama-server says about itself, alone and in router mode. Shapes from the recorded samples (build b10434)."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs

from tests.fakes.page import PROM, Page, Reply, error, prom

if TYPE_CHECKING:
    from tests.fakes.connection import Request
    from tests.fakes.engine import FakeEngine


def _llama_props(engine: FakeEngine, _: Request) -> Reply:
    behaviour = engine.behaviour
    return 200, {
        "default_generation_settings": {"params": {}, "n_ctx": behaviour.context_per_slot},
        "total_slots": engine.slots,
        "model_alias": engine.models[0],
        "model_path": f"/models/{engine.models[0]}.gguf",
        "endpoint_slots": behaviour.slots_endpoint,
        "endpoint_metrics": behaviour.metrics,
        "build_info": f"b{behaviour.version}",
        "is_sleeping": engine.asleep,
    }


async def _llama_slots(engine: FakeEngine, _: Request) -> Reply:
    if not engine.behaviour.slots_endpoint:
        return 501, error(501, "This server does not support slots endpoint.", "not_supported")
    await engine.wake()
    return 200, [_slot(engine, slot) for slot in engine.places.places]


def _slot(engine: FakeEngine, slot: Any) -> dict[str, Any]:
    out = {
        "id": slot.number,
        "n_ctx": engine.behaviour.context_per_slot,
        "speculative": False,
        "is_processing": slot.busy,
    }
    if slot.ever_used:
        out |= {
            "id_task": slot.used,
            "n_prompt_tokens": len(slot.text) // 4 + slot.decoded,
            "next_token": [{"has_next_token": slot.busy, "n_decoded": slot.decoded}],
        }
    return out


async def _llama_metrics(engine: FakeEngine, _: Request) -> Reply:
    if not engine.behaviour.metrics:
        return 501, error(501, "Start it with `--metrics`", "not_supported_error")
    await engine.wake()
    lines = {
        "prompt_tokens_total": engine.prompt_tokens,
        "prompt_tokens_cached_total": engine.cached_tokens,
        "tokens_predicted_total": engine.generated_tokens,
        "requests_processing": engine.running,
        "requests_deferred": engine.waiting,
    }
    return 200, prom({f"llamacpp:{name}": value for name, value in lines.items()}), PROM


def _llama_models(engine: FakeEngine, _: Request) -> Reply:
    meta = {"n_ctx": engine.behaviour.context_per_slot, "n_params": 134_515_008}
    data = [
        {"id": model, "object": "model", "created": 1, "owned_by": "llamacpp", "meta": meta}
        for model in engine.models
    ]
    also = [{"name": model, "model": model, "type": "model"} for model in engine.models]
    return 200, {"models": also, "object": "list", "data": data}


def tokens_in(_: FakeEngine, request: Request) -> list[int]:
    try:
        content = json.loads(request.body).get("content", "")
    except (ValueError, AttributeError):
        content = ""
    return list(range(len(str(content).split())))


LLAMA: dict[str, Page] = {
    "/health": lambda _e, _r: (200, {"status": "ok"}),
    "/v1/health": lambda _e, _r: (200, {"status": "ok"}),
    "/props": _llama_props,
    "/slots": _llama_slots,
    "/metrics": _llama_metrics,
    "/v1/models": _llama_models,
    "/models": _llama_models,
    "/tokenize": lambda e, r: (200, {"tokens": tokens_in(e, r)}),
    "/detokenize": lambda _e, _r: (200, {"content": "hello world"}),
    "/apply-template": lambda _e, _r: (200, {"prompt": "<|im_start|>user\nhi<|im_end|>\n"}),
    "/v1/messages/count_tokens": lambda _e, _r: (200, {"input_tokens": 32}),
}


# llama-server in router mode


def _router_models(engine: FakeEngine, _: Request) -> Reply:
    data = [
        {
            "id": model,
            "object": "model",
            "created": 1,
            "owned_by": "llamacpp",
            "status": {"value": "loaded" if model in engine.loaded else "unloaded"},
        }
        for model in engine.models
    ]
    return 200, {"object": "list", "data": data}


def _per_model(page: Page, *, without: Reply) -> Page:
    """A page that needs `?model=`, and loads that model unless `autoload=false`."""

    async def asked(engine: FakeEngine, request: Request) -> Reply:
        query = parse_qs(request.query)
        model = query.get("model", [None])[0]
        if model is None:
            return without
        if model not in engine.loaded:
            if query.get("autoload") == ["false"]:
                return 400, error(400, "model is not loaded", "invalid_request_error")
            engine.loads[model] += 1
            engine.loaded.add(model)
        reply = page(engine, request)
        return reply if isinstance(reply, tuple) else await reply

    return asked


_NAMELESS: Reply = (400, error(400, "model name is missing from the request", "invalid"))
_ROUTER_PROPS: Reply = (
    200,
    {"role": "router", "max_instances": 1, "models_autoload": True, "model_alias": "llama-server"},
)

ROUTER: dict[str, Page] = LLAMA | {
    "/v1/models": _router_models,
    "/models": _router_models,
    "/props": _per_model(_llama_props, without=_ROUTER_PROPS),
    "/slots": _per_model(_llama_slots, without=_NAMELESS),
    "/metrics": _per_model(_llama_metrics, without=_NAMELESS),
}
