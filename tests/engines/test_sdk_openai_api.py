"""The OpenAI SDK for Python on every path it has: answers, streams, tools, forms, and errors as its own classes."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

from tests.fakes.engine import FakeEngine
from tests.fakes.gateway import Running, running_gateway
from tests.fakes.running import eventually, in_loop, slack
from tests.fakes.scripts import hang, respond, stream
from tests.fakes.wires import DONE, sse

SDK_LAG_S = 5.0  # the SDK works in the same loop, and builds its types when first used
MESSAGES: Any = [{"role": "user", "content": "hello"}]
TEXT = " word0 word1 word2 word3 word4"
CALL = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "weather", "arguments": '{"city":"Bonn"}'},
}
TOOLS: Any = [
    {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
]


@contextlib.asynccontextmanager
async def sdk(
    engine: FakeEngine, *, retries: int = 0, **config: Any
) -> AsyncIterator[tuple[openai.AsyncOpenAI, Running]]:
    keys = config.pop("keys", ["alice"])
    async with (
        running_gateway(engine, keys=keys, lag_limit_s=SDK_LAG_S, **config) as slotgate,
        openai.AsyncOpenAI(
            base_url=f"{slotgate.base_url}/v1",
            api_key=next(iter(slotgate.keys.values())),
            max_retries=retries,
        ) as client,
    ):
        yield client, slotgate


@in_loop
async def test_a_chat_and_a_completion_whole_and_streamed() -> None:
    async with FakeEngine() as engine, sdk(engine) as (client, _):
        whole = await client.chat.completions.create(model="m", messages=MESSAGES)
        assert whole.choices[0].message.content == TEXT
        chunks = await client.chat.completions.create(model="m", messages=MESSAGES, stream=True)
        pieces = [chunk.choices[0].delta.content or "" async for chunk in chunks]
        assert "".join(pieces) == TEXT
        plain = await client.completions.create(model="m", prompt="hello")
        assert plain.choices[0].text == TEXT
        parts = await client.completions.create(model="m", prompt="hello", stream=True)
        assert "".join([part.choices[0].text async for part in parts]) == TEXT


@in_loop
async def test_a_response_whole_and_streamed() -> None:
    async with FakeEngine() as engine, sdk(engine) as (client, _):
        whole = await client.responses.create(model="m", input="hello")
        assert whole.output_text == TEXT
        events = await client.responses.create(model="m", input="hello", stream=True)
        seen = [event async for event in events]
        deltas = [event.delta for event in seen if event.type == "response.output_text.delta"]
        assert "".join(deltas) == TEXT
        assert seen[-1].type == "response.completed"


@in_loop
async def test_tool_calls_arrive_whole_and_in_pieces() -> None:
    message = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    choice = {"index": 0, "message": message, "finish_reason": "tool_calls"}
    answer = {"id": "c", "object": "chat.completion", "created": 1, "model": "m"}
    pieces = [
        {"index": 0, "id": "call_1", "type": "function", "function": {"name": "weather"}},
        {"index": 0, "function": {"arguments": '{"city":'}},
        {"index": 0, "function": {"arguments": '"Bonn"}'}},
    ]
    events = [_delta({"tool_calls": [piece]}) for piece in pieces]
    async with FakeEngine() as engine, sdk(engine) as (client, slotgate):
        engine.script(
            respond(200, {**answer, "choices": [choice]}),
            stream([*events, _delta({}, "tool_calls"), DONE]),
        )
        asked: Any = {"model": "m", "messages": MESSAGES, "tools": TOOLS}
        whole = await client.chat.completions.create(**asked)
        calls = whole.choices[0].message.tool_calls
        assert calls is not None
        assert calls[0].model_dump(include={"id", "type", "function"})["id"] == "call_1"
        said = ""
        async for chunk in await client.chat.completions.create(**asked, stream=True):
            for part in chunk.choices[0].delta.tool_calls or ():
                said += (part.function.arguments if part.function else "") or ""
        assert json.loads(said) == {"city": "Bonn"}
        assert await slotgate.outcomes() == {"served": 2}


def _delta(delta: dict[str, Any], finish: str | None = None) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    return sse(
        {
            "id": "c",
            "object": "chat.completion.chunk",
            "created": 1,
            "model": "m",
            "choices": [choice],
        }
    )


@in_loop
async def test_vectors_models_judgements_sound_and_pictures() -> None:
    async with FakeEngine("openai") as engine, sdk(engine) as (client, _):
        vectors = await client.embeddings.create(model="m", input="a", encoding_format="float")
        assert vectors.data[0].embedding == [0.1, 0.2]
        assert [model.id async for model in client.models.list()] == ["m"]
        assert (await client.models.retrieve("m")).owned_by == "openai"
        judged = await client.moderations.create(model="m", input="a")
        assert judged.results[0].flagged is False
        heard = await client.audio.transcriptions.create(model="m", file=("a.wav", b"RIFF\x00"))
        assert heard.text == "hello"
        assert b"RIFF\x00" in engine.requests[-1].body
        engine.script(respond(200, b"ID3\x00\xff", content_type="audio/mpeg"))
        spoken = await client.audio.speech.create(model="m", voice="alloy", input="hello")
        assert spoken.content == b"ID3\x00\xff"
        drawn = await client.images.generate(model="m", prompt="a cat")
        assert drawn.data


@in_loop
async def test_refusals_are_the_sdks_own_classes_with_the_code_and_the_id_of_the_request() -> None:
    keys: list[Any] = [
        {"name": "alice"},
        {"name": "bob", "models": ["other"]},
        {"name": "carl", "rpm": 1},
    ]
    limits = {"body_mib": 0.0625}
    overflow = {"error": {"code": 400, "type": "exceed_context_size_error", "message": "too long"}}
    chat: Any = {"model": "m", "messages": MESSAGES}
    async with FakeEngine() as engine, sdk(engine, keys=keys, limits=limits) as (client, slotgate):
        wrong = client.with_options(api_key="sk-sg-wrong")
        bob = client.with_options(api_key=slotgate.keys["bob"])
        carl = client.with_options(api_key=slotgate.keys["carl"])
        await carl.chat.completions.create(**chat)
        large = [{"role": "user", "content": "x" * 100_000}]
        cells: list[tuple[Any, dict[str, Any], type[openai.APIStatusError], str]] = [
            (wrong, chat, openai.AuthenticationError, "invalid_api_key"),
            (bob, chat, openai.PermissionDeniedError, "model_not_allowed"),
            (client, {**chat, "model": "mm"}, openai.NotFoundError, "model_not_found"),
            (client, {**chat, "messages": large}, openai.APIStatusError, "body_too_large"),
            (carl, chat, openai.RateLimitError, "key_rate_limit"),
            (client, chat, openai.BadRequestError, "context_length_exceeded"),
        ]
        for who, asked, kind, code in cells:
            if code == "context_length_exceeded":
                engine.script(respond(400, overflow))
            with pytest.raises(kind) as refused:
                await who.chat.completions.create(**asked)
            assert refused.value.code == code
            assert refused.value.request_id
            assert refused.value.message


@in_loop
async def test_a_full_queue_is_retried_when_the_gateway_said_and_then_served() -> None:
    """The first attempt meets a full gateway; what held the slot ends before the second."""
    async with (
        FakeEngine("sglang", slots=1) as engine,
        sdk(engine, retries=2, admission={"queue": 0}) as (client, slotgate),
    ):
        for _ in range(10):  # from which it learns how soon a slot is free again
            await slotgate.chat()
        engine.script(hang())
        holder = asyncio.create_task(slotgate.chat())
        await engine.until(lambda: engine.inside)
        asked = asyncio.create_task(client.chat.completions.create(model="m", messages=MESSAGES))
        await _until_outcome(slotgate, "queue_full")
        holder.cancel()
        await asyncio.gather(holder, return_exceptions=True)
        answer = await asked
        assert answer.choices[0].message.content == TEXT


async def _until_outcome(slotgate: Running, outcome: str) -> None:
    async def is_there() -> bool:
        return outcome in await slotgate.outcomes()

    await eventually(is_there)


@in_loop
async def test_the_sdk_retries_as_often_and_as_late_as_it_is_told() -> None:
    busy = respond(503, {"error": {"message": "busy"}}, [("Retry-After", "1")])
    async with FakeEngine() as engine, sdk(engine, retries=2) as (client, _):
        engine.script(busy, busy, busy)
        with pytest.raises(openai.InternalServerError):
            await client.chat.completions.create(model="m", messages=MESSAGES)
        assert len(engine.requests) == 3
        first, second, third = [request.head_at for request in engine.requests]
        for gap in (second - first, third - second):
            assert 0.9 <= gap < 10 * slack()


@in_loop
async def test_a_broken_stream_is_an_error_of_the_sdk_and_not_an_end() -> None:
    events = [_delta({"content": "a"}), sse({"error": {"message": "out of memory", "code": 500}})]
    async with FakeEngine() as engine, sdk(engine) as (client, slotgate):
        engine.script(stream(events))
        chunks = await client.chat.completions.create(model="m", messages=MESSAGES, stream=True)
        with pytest.raises(openai.APIError, match="out of memory"):
            async for _ in chunks:
                pass
        assert await slotgate.outcomes() == {"upstream_broke": 1}
