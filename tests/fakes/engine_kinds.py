"""What each kind of engine says about itself: health, versions, models, slots, metrics. Shapes from the recorded samples.

A path that the kind does not know is answered as that kind answers unknown paths.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.fakes.llama_pages import LLAMA, ROUTER, tokens_in
from tests.fakes.page import PROM, Page, Reply, error, prom
from tests.fakes.wires import compact

if TYPE_CHECKING:
    from tests.fakes.connection import Connection, HeaderPairs, Request
    from tests.fakes.engine import FakeEngine


def common_headers(engine: FakeEngine) -> HeaderPairs:
    """What the kind puts on every answer."""
    if engine.kind in ("llama-server", "llama-router"):
        return (("Server", "llama.cpp"), ("Access-Control-Allow-Origin", ""))
    return (("Server", "uvicorn"),) if engine.kind in ("vllm", "sglang") else ()


async def answer(connection: Connection) -> None:
    """Answers what is not a generation."""
    request, engine = connection.request, connection.engine
    assert request is not None
    page = _PAGES[engine.kind].get(request.path)
    if engine.behaviour.loading and engine.kind == "llama-server":
        reply: Any = (503, error(503, "Loading model", "unavailable_error"))
    elif not _authorised(engine, request):
        reply = (401, error(401, "Invalid API Key", "authentication_error"))
    elif page is None:
        reply = _UNKNOWN[engine.kind]
    else:
        reply = page(engine, request)
    status, body, content_type = _settled(reply if isinstance(reply, tuple) else await reply)
    close = [("Connection", "close")] if status >= 400 else []
    await connection.respond(status, body, close, content_type=content_type)


def _settled(reply: Reply) -> tuple[int, bytes, str]:
    body = reply[1] if isinstance(reply[1], bytes) else compact(reply[1])
    return reply[0], body, reply[2] if len(reply) == 3 else "application/json"


def _authorised(engine: FakeEngine, request: Request) -> bool:
    key = engine.behaviour.api_key
    if key is None or request.path in ("/health", "/metrics", "/version"):
        return True
    return request.headers.get("authorization") == f"Bearer {key}"


# vLLM and SGLang


def _openai_models(owner: str) -> Page:
    def page(engine: FakeEngine, _: Request) -> Reply:
        more = {"max_model_len": engine.behaviour.context_per_slot} if owner != "openai" else {}
        data = [
            {"id": model, "object": "model", "created": 1, "owned_by": owner, **more}
            for model in engine.models
        ]
        return 200, {"object": "list", "data": data}

    return page


def _vllm_metrics(engine: FakeEngine, _: Request) -> Reply:
    if not engine.behaviour.metrics:
        return 404, {"detail": "Not Found"}
    kv = engine.behaviour.kv_tokens
    at = f'{{engine="0",model_name="{engine.models[0]}"}}'
    lines = {
        f"vllm:num_requests_running{at}": engine.running,
        f"vllm:num_requests_waiting{at}": engine.waiting,
        f"vllm:kv_cache_usage_perc{at}": engine.running / max(1, engine.slots),
        f"vllm:num_preemptions_total{at}": 0,
        f"vllm:prompt_tokens_total{at}": engine.prompt_tokens,
        f"vllm:prefix_cache_queries_total{at}": engine.prompt_tokens,
        f"vllm:prefix_cache_hits_total{at}": engine.cached_tokens,
        f"vllm:generation_tokens_total{at}": engine.generated_tokens,
        "process_start_time_seconds": engine.incarnation,
        f'vllm:cache_config_info{{block_size="16",engine="0",kv_cache_size_tokens="{kv}"}}': 1,
    }
    return 200, prom(lines), PROM


def _sglang_loads(engine: FakeEngine, _: Request) -> Reply:
    load = {
        "dp_rank": 0,
        "num_running_reqs": engine.running,
        "num_waiting_reqs": engine.waiting,
        "max_total_num_tokens": engine.behaviour.kv_tokens,
        "max_running_requests": engine.slots,
        "token_usage": engine.running / max(1, engine.slots),
    }
    return 200, {"version": engine.behaviour.version, "num_accelerators": 1, "loads": [load]}


_VLLM: dict[str, Page] = {
    "/health": lambda _e, _r: (200, b"", "text/plain"),
    "/ping": lambda _e, _r: (200, b"", "text/plain"),
    "/version": lambda e, _r: (200, {"version": e.behaviour.version}),
    "/load": lambda _e, _r: (200, {"server_load": 0}),
    "/metrics": _vllm_metrics,
    "/v1/models": _openai_models("vllm"),
    "/tokenize": lambda e, r: (200, {"count": len(tokens_in(e, r)), "tokens": tokens_in(e, r)}),
    "/detokenize": lambda _e, _r: (200, {"prompt": "hello world"}),
    "/v1/messages/count_tokens": lambda _e, _r: (200, {"input_tokens": 32}),
}

_SGLANG: dict[str, Page] = {
    "/health": lambda _e, _r: (200, b"", "text/plain"),
    "/model_info": lambda e, _r: (200, {"model_path": e.models[0], "is_generation": True}),
    "/v1/models": _openai_models("sglang"),
    "/v1/loads": _sglang_loads,
}


# Ollama


def _ollama_entry(model: str) -> dict[str, Any]:
    return {
        "name": model,
        "model": model,
        "size": 2_019_393_189,
        "digest": "a80c4f17acd55265",
        "details": {"format": "gguf", "family": "llama"},
    }


def _ollama_tags(engine: FakeEngine, _: Request) -> Reply:
    return 200, {"models": [_ollama_entry(model) for model in engine.models]}


def _ollama_ps(engine: FakeEngine, _: Request) -> Reply:
    context = engine.behaviour.context_per_slot
    loaded = [model for model in engine.models if model in engine.loaded]
    return 200, {"models": [_ollama_entry(one) | {"context_length": context} for one in loaded]}


_OLLAMA: dict[str, Page] = {
    "/": lambda _e, _r: (200, b"Ollama is running", "text/plain; charset=utf-8"),
    "/api/version": lambda e, _r: (200, {"version": e.behaviour.version}),
    "/api/tags": _ollama_tags,
    "/api/ps": _ollama_ps,
    "/api/show": lambda _e, _r: (200, {"details": {"family": "llama"}, "model_info": {}}),
    "/v1/models": _openai_models("library"),
}


# Anything that speaks the OpenAI API and no more

_OPENAI: dict[str, Page] = {"/v1/models": _openai_models("openai")}

_PAGES = {
    "llama-server": LLAMA,
    "llama-router": ROUTER,
    "vllm": _VLLM,
    "sglang": _SGLANG,
    "ollama": _OLLAMA,
    "openai": _OPENAI,
}

_NOT_FOUND: Reply = (404, {"detail": "Not Found"})
_UNKNOWN: dict[str, Reply] = {
    "llama-server": (404, error(404, "File Not Found", "not_found_error")),
    "llama-router": (404, error(404, "File Not Found", "not_found_error")),
    "ollama": (404, b"404 page not found", "text/plain"),
    "vllm": _NOT_FOUND,
    "sglang": _NOT_FOUND,
    "openai": _NOT_FOUND,
}
