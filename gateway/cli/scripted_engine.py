"""A stand-in for an engine, for `slotgate demo` on machines where no real one can run. It computes nothing.

Run as `python -m gateway.cli.scripted_engine --slots 2` by the demo. It speaks enough of llama-server's API to be routed to:
slots that really fill up, a prompt cache that remembers the last conversation of each slot, and words at a steady pace.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from gateway.cli.child_server import die_with_parent, say

HOST = "127.0.0.1"
MODEL = "scripted"
CONTEXT = 4096
CHARS_PER_TOKEN = 4
TOKENS_PER_SECOND = 60.0
PREFILL_PER_SECOND = 1500.0
WORDS = [
    "These",
    "words",
    "come",
    "from",
    "a",
    "script,",
    "not",
    "from",
    "a",
    "model,",
    "because",
    "no",
    "real",
    "engine",
    "can",
    "run",
    "on",
    "this",
    "machine.",
    "Everything",
    "around",
    "them",
    "is",
    "real:",
    "the",
    "slots,",
    "the",
    "queue,",
    "the",
    "refusals,",
    "the",
    "choice",
    "of",
    "an",
    "engine",
    "and",
    "the",
    "figures.",
]


@dataclass(slots=True)
class Slot:
    number: int
    text: str = ""  # the conversation it still knows
    busy: bool = False


@dataclass(slots=True)
class Slots:
    """Owns the slots; more requests than slots wait in order."""

    places: list[Slot]
    free: asyncio.Semaphore = field(init=False)

    def __post_init__(self) -> None:
        self.free = asyncio.Semaphore(len(self.places))

    @contextlib.asynccontextmanager
    async def take(self, prompt: str) -> AsyncIterator[int]:
        """Holds the idle slot that knows most of the prompt; gives how many tokens that is."""
        async with self.free:
            idle = [slot for slot in self.places if not slot.busy]
            slot = max(idle, key=lambda slot: _common(slot.text, prompt))
            cached = _common(slot.text, prompt) // CHARS_PER_TOKEN
            slot.busy, slot.text = True, prompt
            try:
                yield cached
            finally:
                slot.busy = False


def build(slots: int) -> Starlette:
    """The engine as an app."""
    engine = Slots([Slot(number) for number in range(slots)])

    async def health(_: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def props(_: Request) -> Response:
        return JSONResponse(
            {
                "total_slots": slots,
                "default_generation_settings": {"n_ctx": CONTEXT},
                "model_alias": MODEL,
                "endpoint_slots": True,
                "endpoint_metrics": True,
                "is_sleeping": False,
                "build_info": "scripted",
            }
        )

    async def states(_: Request) -> Response:
        return JSONResponse(
            [{"id": s.number, "n_ctx": CONTEXT, "is_processing": s.busy} for s in engine.places]
        )

    async def metrics(_: Request) -> Response:
        busy = sum(slot.busy for slot in engine.places)
        return PlainTextResponse(
            f"llamacpp:requests_processing {busy}\nllamacpp:requests_deferred 0\n"
        )

    async def models(_: Request) -> Response:
        entry = {"id": MODEL, "object": "model", "owned_by": "llamacpp", "meta": {"n_ctx": CONTEXT}}
        return JSONResponse({"object": "list", "data": [entry]})

    async def chat(request: Request) -> Response:
        body = await request.json()
        if body.get("stream") is True:
            return StreamingResponse(_stream(engine, body), media_type="text/event-stream")
        return JSONResponse(await _whole(engine, body))

    return Starlette(
        routes=[
            Route("/health", health),
            Route("/props", props),
            Route("/slots", states),
            Route("/metrics", metrics),
            Route("/v1/models", models),
            Route("/v1/chat/completions", chat, methods=["POST"]),
        ]
    )


async def _stream(engine: Slots, body: dict[str, Any]) -> AsyncIterator[bytes]:
    prompt = _prompt(body)
    async with engine.take(prompt) as cached:
        await _prefill(prompt, cached)
        said = 0
        for word in _words(body):
            yield _event({"delta": {"content": word}, "index": 0, "finish_reason": None})
            said += 1
            await asyncio.sleep(1 / TOKENS_PER_SECOND)
        yield _event({"delta": {}, "index": 0, "finish_reason": "stop"})
        yield _event(None, usage=_usage(prompt, cached, said))
        yield b"data: [DONE]\n\n"


async def _whole(engine: Slots, body: dict[str, Any]) -> dict[str, Any]:
    prompt, words = _prompt(body), _words(body)
    async with engine.take(prompt) as cached:
        await _prefill(prompt, cached)
        await asyncio.sleep(len(words) / TOKENS_PER_SECOND)
    message = {"role": "assistant", "content": "".join(words)}
    return {
        "object": "chat.completion",
        "model": MODEL,
        "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
        "usage": _usage(prompt, cached, len(words)),
    }


async def _prefill(prompt: str, cached: int) -> None:
    await asyncio.sleep((len(prompt) // CHARS_PER_TOKEN - cached) / PREFILL_PER_SECOND)


def _prompt(body: dict[str, Any]) -> str:
    messages = body.get("messages", [])
    return "".join(f"<{one.get('role')}>{one.get('content')}" for one in messages)


def _words(body: dict[str, Any]) -> list[str]:
    most = body.get("max_tokens")
    return [f"{word} " for word in WORDS[: most if isinstance(most, int) else None]]


def _usage(prompt: str, cached: int, said: int) -> dict[str, Any]:
    tokens = len(prompt) // CHARS_PER_TOKEN
    return {
        "prompt_tokens": tokens,
        "completion_tokens": said,
        "total_tokens": tokens + said,
        "prompt_tokens_details": {"cached_tokens": min(cached, max(0, tokens - 1))},
    }


def _event(choice: dict[str, Any] | None, **more: Any) -> bytes:
    document = {
        "object": "chat.completion.chunk",
        "model": MODEL,
        "choices": [] if choice is None else [choice],
        **more,
    }
    return b"data: " + json.dumps(document, separators=(",", ":")).encode() + b"\n\n"


def _common(one: str, other: str) -> int:
    """How many leading characters are the same."""
    pairs = zip(one, other, strict=False)
    return next((place for place, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def main() -> None:
    """Serve on a free port until told to end."""
    parser = argparse.ArgumentParser(prog="gateway.cli.scripted_engine")
    parser.add_argument("--slots", type=int, default=2)
    options = parser.parse_args()
    die_with_parent()
    listener = socket.socket()
    listener.bind((HOST, 0))
    listener.listen()
    say(url=f"http://{HOST}:{listener.getsockname()[1]}")
    headers = [("server", "llama.cpp")]
    config = uvicorn.Config(
        build(options.slots), log_level="warning", server_header=False, headers=headers
    )
    uvicorn.Server(config).run(sockets=[listener])


if __name__ == "__main__":
    main()
