"""What the scripted engine answers on generation paths when no script was given: slots, prefill, tokens, an honest end."""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from tests.fakes.engine_slots import CHARS_PER_TOKEN, Lease
from tests.fakes.page import error
from tests.fakes.wires import WIRES, Answer, Wire

if TYPE_CHECKING:
    from tests.fakes.connection import Connection, Request
    from tests.fakes.engine import FakeEngine

WHOLE_ONLY: Final[dict[str, dict[str, Any]]] = {
    "/v1/embeddings": {
        "object": "list",
        "data": [{"object": "embedding", "index": 0, "embedding": [0.1, 0.2]}],
        "usage": {"prompt_tokens": 2, "total_tokens": 2},
    },
    "/api/embed": {"embeddings": [[0.1, 0.2]], "prompt_eval_count": 2},
    "/api/embeddings": {"embedding": [0.1, 0.2]},
    "/v1/rerank": {"object": "list", "results": [{"index": 0, "relevance_score": 0.9}]},
    "/v1/score": {"object": "list", "data": [{"index": 0, "object": "score", "score": 0.9}]},
    "/v1/moderations": {"id": "modr-1", "results": [{"flagged": False}]},
    "/v1/audio/transcriptions": {"text": "hello"},
    "/v1/audio/translations": {"text": "hello"},
    "/v1/audio/speech": {"audio": "none"},
    "/v1/images/generations": {"created": 1, "data": [{"b64_json": ""}]},
}

PATHS: Final = frozenset({*WIRES, *WHOLE_ONLY})

_HEADERS_BY_KIND = {"llama-server": "at_start", "ollama": "at_first_token"}


@dataclass(frozen=True, slots=True)
class Ask:
    """What of a request matters here. An unreadable body asks for nothing special."""

    document: dict[str, Any]

    @classmethod
    def of(cls, request: Request) -> Ask:
        try:
            document = json.loads(request.body)
        except ValueError:
            document = {}
        return cls(document if isinstance(document, dict) else {})

    @property
    def model(self) -> str | None:
        model = self.document.get("model")
        return model if isinstance(model, str) else None

    @property
    def choices(self) -> int:
        n = self.document.get("n")
        return n if isinstance(n, int) and not isinstance(n, bool) and n > 0 else 1

    @property
    def permits(self) -> int:
        prompt = self.document.get("prompt")
        several = isinstance(prompt, list) and bool(prompt) and not isinstance(prompt[0], int)
        return self.choices * (len(prompt) if several and isinstance(prompt, list) else 1)

    @property
    def prompt(self) -> str:
        """What the model would read, near enough: tools, system, then message by message."""
        keys = ("tools", "system", "instructions", "messages", "input", "prompt")
        parts = [self.document[key] for key in keys if key in self.document]
        return "".join(_text(part) for part in parts)

    def tokens(self, most: int) -> int:
        for key in ("max_tokens", "max_completion_tokens", "max_output_tokens", "n_predict"):
            asked = self.document.get(key)
            if isinstance(asked, int) and asked >= 0:
                return min(asked, most)
        return most


def cost_of(request: Request) -> tuple[int, str]:
    """How many slots the request takes, and its prompt."""
    ask = Ask.of(request)
    return (ask.permits, ask.prompt) if request.path in WIRES else (1, "")


async def answer(engine: FakeEngine, connection: Connection, permits: int, prompt: str) -> None:
    """The default answer, refusals of a real engine included."""
    request = connection.request
    assert request is not None
    ask = Ask.of(request)
    if (refusal := _refusal(engine, request, ask, permits, prompt)) is not None:
        status, document = refusal
        await connection.respond(status, document, [("Connection", "close")])
        return
    await engine.wake()
    await _load(engine, ask.model)
    wire = WIRES.get(request.path)
    streamed = wire is not None and ask.document.get("stream", wire.streams_by_default) is True
    headers = engine.behaviour.headers or _HEADERS_BY_KIND.get(engine.kind, "at_once")
    async with AsyncExitStack() as stack:
        if streamed and headers == "at_once":
            await _begin(connection, wire)
        lease = await stack.enter_async_context(engine.execution(request, permits, prompt))
        if streamed and headers == "at_start":
            await _begin(connection, wire)
        said = _answer(engine, ask, prompt, lease)
        engine.prompt_tokens += said.prompt_tokens - said.cached_tokens
        engine.cached_tokens += said.cached_tokens
        engine.generated_tokens += said.tokens
        await _prefill(engine, said)
        if not streamed:
            await _generate_silently(engine, said, lease)
        elif wire is not None:
            if headers == "at_first_token":
                await _begin(connection, wire)
            await _generate(engine, connection, wire, said, lease)
            return
    # The slot is free before the last byte is out, as in real engines: a permit that the gateway gets back is good.
    await connection.respond(200, WHOLE_ONLY[request.path] if wire is None else wire.whole(said))


async def _begin(connection: Connection, wire: Wire | None) -> None:
    assert wire is not None
    await connection.begin(200, [("X-Accel-Buffering", "no")], content_type=wire.content_type)


async def _prefill(engine: FakeEngine, said: Answer) -> None:
    behaviour = engine.behaviour
    seconds = behaviour.ttft_s
    if behaviour.prefill_tokens_per_s:
        seconds += (said.prompt_tokens - said.cached_tokens) / behaviour.prefill_tokens_per_s
    await _sleep(seconds)


async def _generate(
    engine: FakeEngine, connection: Connection, wire: Wire, said: Answer, lease: Lease
) -> None:
    start = wire.start(said)  # comes in the same write as the first token, as llama-server does it
    for number in range(said.tokens):
        if number:
            await _sleep(engine.behaviour.itl_s)
        await connection.body((b"" if number else start) + wire.token(said, number))
        lease.slots[0].decoded = number + 1
    await connection.body((b"" if said.tokens else start) + wire.finish(said))
    await connection.end()


async def _generate_silently(engine: FakeEngine, said: Answer, lease: Lease) -> None:
    await _sleep(engine.behaviour.itl_s * max(0, said.tokens - 1))
    lease.slots[0].decoded = said.tokens


async def _load(engine: FakeEngine, model: str | None) -> None:
    """Loads the model when it is not there; an engine that holds one at a time drops the other and its work."""
    if model is None or engine.kind not in ("llama-router", "ollama"):
        return
    model = _own_id(engine, model)
    swap_s = engine.behaviour.swap_s
    if swap_s is not None and engine.current_model not in (None, model):
        engine.swaps += 1
        engine.loaded.clear()
        engine.abort(one for one in engine.occupancy.requests() if not _is_for(engine, one, model))
    engine.current_model = model
    if model not in engine.loaded:
        engine.loads[model] += 1
        engine.loaded.add(model)
        await _sleep(swap_s or 0)


def _answer(engine: FakeEngine, ask: Ask, prompt: str, lease: Lease) -> Answer:
    named = engine.models[0] if engine.kind == "llama-server" else ask.model or engine.models[0]
    options = ask.document.get("stream_options")
    return Answer(
        id=f"chatcmpl-{engine.executions}",
        model=named,
        kind=engine.kind,
        tokens=ask.tokens(engine.behaviour.tokens),
        prompt_tokens=len(prompt) // CHARS_PER_TOKEN,
        cached_tokens=lease.cached_tokens,
        include_usage=isinstance(options, dict) and options.get("include_usage") is True,
        choices=ask.choices,
    )


def _refusal(
    engine: FakeEngine, request: Request, ask: Ask, permits: int, prompt: str
) -> tuple[int, dict[str, Any]] | None:
    behaviour = engine.behaviour
    if behaviour.loading:
        return 503, error(503, "Loading model", "unavailable_error")
    if behaviour.api_key is not None and not _authorised(request, behaviour.api_key):
        return 401, error(401, "Invalid API Key", "authentication_error")
    strict = engine.kind in ("vllm", "ollama", "sglang")
    if strict and ask.model is not None and _own_id(engine, ask.model) not in engine.models:
        return 404, error(404, f"The model `{ask.model}` does not exist.", "NotFoundError")
    if permits > engine.slots and engine.kind == "llama-server":
        return 400, error(400, f"Value must be between 1 <= value <= {engine.slots}", "invalid")
    tokens = len(prompt) // CHARS_PER_TOKEN
    if tokens > behaviour.context_per_slot:
        text = f"request ({tokens} tokens) exceeds the available context size ({behaviour.context_per_slot} tokens)"
        return 400, error(400, text, "exceed_context_size_error")
    if behaviour.max_waiting is not None and engine.waiting >= behaviour.max_waiting:
        return 503, error(503, "The engine is currently busy", "Service Unavailable")
    return None


def _is_for(engine: FakeEngine, request: Request, model: str) -> bool:
    return _own_id(engine, Ask.of(request).model or model) == model


def _own_id(engine: FakeEngine, model: str) -> str:
    """To Ollama, `x` is `x:latest`."""
    if engine.kind == "ollama" and model not in engine.models:
        return f"{model}:latest"
    return model


def _authorised(request: Request, key: str) -> bool:
    return request.headers.get("authorization") == f"Bearer {key}"


def _text(part: Any) -> str:
    if isinstance(part, str):
        return part
    return json.dumps(part, separators=(",", ":"))


async def _sleep(seconds: float) -> None:
    if seconds > 0:
        await asyncio.sleep(seconds)
