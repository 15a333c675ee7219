"""The shapes of default answers, per API path: what the recorded engines send, without the parts that nobody reads.

Each wire turns an Answer into the events of a stream (`start`, one `token` each, `finish`) and into a whole body.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(slots=True)
class Answer:
    """What is to be said, apart from the wire it is said in."""

    id: str
    model: str
    kind: str  # of the engine: some fields are one engine's alone
    tokens: int
    prompt_tokens: int
    cached_tokens: int
    include_usage: bool
    choices: int = 1

    def word(self, number: int) -> str:
        return f" word{number}"

    @property
    def text(self) -> str:
        return "".join(self.word(number) for number in range(self.tokens))

    def usage(self) -> dict[str, Any]:
        out: dict[str, Any] = {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.tokens,
            "total_tokens": self.prompt_tokens + self.tokens,
        }
        if self.kind != "ollama":  # the one engine that never says what it had cached
            out["prompt_tokens_details"] = {"cached_tokens": self.cached_tokens}
        return out

    def timings(self) -> dict[str, Any]:
        if self.kind != "llama-server":
            return {}
        fresh = self.prompt_tokens - self.cached_tokens
        return {
            "timings": {
                "cache_n": self.cached_tokens,
                "prompt_n": fresh,
                "prompt_ms": float(fresh),
                "predicted_n": self.tokens,
                "predicted_ms": float(self.tokens),
            }
        }


Events = Callable[[Answer], bytes]


@dataclass(frozen=True, slots=True)
class Wire:
    content_type: str
    start: Events
    token: Callable[[Answer, int], bytes]
    finish: Events
    whole: Callable[[Answer], dict[str, Any]]
    streams_by_default: bool = False


def compact(document: Any) -> bytes:
    """JSON without spaces: one editor plugin accepts nothing else."""
    return json.dumps(document, separators=(",", ":")).encode()


def sse(document: Any, event: str | None = None) -> bytes:
    """One server-sent event."""
    name = f"event: {event}\n".encode() if event else b""
    return name + b"data: " + compact(document) + b"\n\n"


def typed(document: dict[str, Any]) -> bytes:
    """One event named by its own `type`, as in Responses and Messages."""
    return sse(document, document["type"])


DONE = b"data: [DONE]\n\n"


def _chunk(answer: Answer, choices: list[dict[str, Any]], **more: Any) -> bytes:
    return sse(
        {
            "choices": choices,
            "created": 1,
            "id": answer.id,
            "model": answer.model,
            "object": "chat.completion.chunk",
            **more,
        }
    )


def _delta(delta: dict[str, Any], finish: str | None = None) -> list[dict[str, Any]]:
    return [{"finish_reason": finish, "index": 0, "delta": delta}]


def _chat_finish(answer: Answer) -> bytes:
    out = _chunk(answer, _delta({}, "stop"), **({} if answer.include_usage else answer.timings()))
    if answer.include_usage:
        out += _chunk(answer, [], usage=answer.usage(), **answer.timings())
    return out + DONE


def _chat_whole(answer: Answer) -> dict[str, Any]:
    message = {"role": "assistant", "content": answer.text}
    return {
        "choices": [
            {"finish_reason": "stop", "index": index, "message": message}
            for index in range(answer.choices)
        ],
        "created": 1,
        "model": answer.model,
        "object": "chat.completion",
        "usage": answer.usage(),
        "id": answer.id,
        **answer.timings(),
    }


CHAT = Wire(
    "text/event-stream",
    lambda a: _chunk(a, _delta({"role": "assistant", "content": None})),
    lambda a, i: _chunk(a, _delta({"content": a.word(i)})),
    _chat_finish,
    _chat_whole,
)


def _text(answer: Answer, text: str, finish: str | None, **more: Any) -> dict[str, Any]:
    choice = {"text": text, "index": 0, "logprobs": None, "finish_reason": finish}
    return {
        "choices": [{**choice, "index": index} for index in range(answer.choices)],
        "created": 1,
        "model": answer.model,
        "object": "text_completion",
        "id": answer.id,
        **more,
    }


COMPLETIONS = Wire(
    "text/event-stream",
    lambda a: b"",
    lambda a, i: sse(_text(a, a.word(i), None)),
    lambda a: sse(_text(a, "", "length", usage=a.usage(), **a.timings())) + DONE,
    lambda a: _text(a, a.text, "length", usage=a.usage(), **a.timings()),
)


def _response(answer: Answer, status: str, *, whole: bool) -> dict[str, Any]:
    out: dict[str, Any] = {"id": f"resp_{answer.id}", "object": "response", "status": status}
    if not whole:
        return out
    part = {"type": "output_text", "annotations": [], "text": answer.text}
    item = {"type": "message", "role": "assistant", "status": "completed", "content": [part]}
    return out | {
        "model": answer.model,
        "output": [{"id": f"msg_{answer.id}", **item}],
        "usage": {
            "input_tokens": answer.prompt_tokens,
            "output_tokens": answer.tokens,
            "total_tokens": answer.prompt_tokens + answer.tokens,
            "input_tokens_details": {"cached_tokens": answer.cached_tokens},
        },
    }


RESPONSES = Wire(
    "text/event-stream",
    lambda a: typed(
        {"type": "response.created", "response": _response(a, "in_progress", whole=False)}
    ),
    lambda a, i: typed(
        {"type": "response.output_text.delta", "item_id": f"msg_{a.id}", "delta": a.word(i)}
    ),
    lambda a: typed(
        {"type": "response.completed", "response": _response(a, "completed", whole=True)}
    ),
    lambda a: _response(a, "completed", whole=True),
)


def _message(answer: Answer, content: list[dict[str, Any]], stop: str | None) -> dict[str, Any]:
    return {
        "id": answer.id,
        "type": "message",
        "role": "assistant",
        "content": content,
        "model": answer.model,
        "stop_reason": stop,
        "stop_sequence": None,
        "usage": {
            "cache_read_input_tokens": answer.cached_tokens,
            "input_tokens": answer.prompt_tokens - answer.cached_tokens,
            "output_tokens": answer.tokens if stop else 0,
        },
    }


def _message_end(answer: Answer) -> bytes:
    return (
        typed({"type": "content_block_stop", "index": 0})
        + typed(
            {
                "type": "message_delta",
                "delta": {"stop_reason": "end_turn", "stop_sequence": None},
                "usage": {"output_tokens": answer.tokens},
            }
        )
        + typed({"type": "message_stop"})
    )


MESSAGES = Wire(
    "text/event-stream",
    lambda a: (
        typed({"type": "message_start", "message": _message(a, [], None)})
        + typed(
            {
                "type": "content_block_start",
                "index": 0,
                "content_block": {"type": "text", "text": ""},
            }
        )
    ),
    lambda a, i: typed(
        {
            "type": "content_block_delta",
            "index": 0,
            "delta": {"type": "text_delta", "text": a.word(i)},
        }
    ),
    _message_end,
    lambda a: _message(a, [{"type": "text", "text": a.text}], "end_turn"),
)


def _native(answer: Answer, content: str, *, stop: bool) -> dict[str, Any]:
    return {"content": content, "stop": stop, **(answer.timings() if stop else {})}


NATIVE = Wire(  # llama-server's /completion and /infill
    "text/event-stream",
    lambda a: b"",
    lambda a, i: sse(_native(a, a.word(i), stop=False)),
    lambda a: sse(_native(a, "", stop=True)),
    lambda a: _native(a, a.text, stop=True),
)


def _line(answer: Answer, said: Mapping[str, Any], *, done: bool) -> dict[str, Any]:
    out = {"model": answer.model, "created_at": "2026-11-29T00:00:00Z", **said, "done": done}
    if not done:
        return out
    return out | {
        "done_reason": "stop",
        "total_duration": 1_000_000,
        "prompt_eval_count": answer.prompt_tokens,
        "eval_count": answer.tokens,
    }


def _ollama(said: Callable[[str], dict[str, Any]]) -> Wire:
    return Wire(
        "application/x-ndjson",
        lambda a: b"",
        lambda a, i: compact(_line(a, said(a.word(i)), done=False)) + b"\n",
        lambda a: compact(_line(a, said(""), done=True)) + b"\n",
        lambda a: _line(a, said(a.text), done=True),
        streams_by_default=True,
    )


OLLAMA_CHAT = _ollama(lambda text: {"message": {"role": "assistant", "content": text}})
OLLAMA_GENERATE = _ollama(lambda text: {"response": text})

WIRES: dict[str, Wire] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": COMPLETIONS,
    "/v1/responses": RESPONSES,
    "/v1/messages": MESSAGES,
    "/completion": NATIVE,
    "/infill": NATIVE,
    "/api/chat": OLLAMA_CHAT,
    "/api/generate": OLLAMA_GENERATE,
}
