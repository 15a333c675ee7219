"""The Anthropic SDK for Python: what it sends is understood, what it gets it understands, errors as its own classes."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from typing import Any

import anthropic
import pytest

from tests.fakes.engine import FakeEngine
from tests.fakes.gateway import Running, running_gateway
from tests.fakes.running import in_loop, slack
from tests.fakes.scripts import hang, respond, stream
from tests.fakes.wires import typed

SDK_LAG_S = 5.0  # the SDK works in the same loop, and builds its types when first used
HELLO: Any = {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": "hello"}]}
TOOL: Any = {
    "name": "weather",
    "description": "the weather",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}


@contextlib.asynccontextmanager
async def sdk(
    engine: FakeEngine, *, retries: int = 0, header: str = "bearer", **config: Any
) -> AsyncIterator[tuple[anthropic.AsyncAnthropic, Running]]:
    keys = config.pop("keys", ["alice"])
    async with running_gateway(engine, keys=keys, lag_limit_s=SDK_LAG_S, **config) as slotgate:
        secret = next(iter(slotgate.keys.values()))
        auth: Any = {"auth_token": secret} if header == "bearer" else {"api_key": secret}
        async with anthropic.AsyncAnthropic(
            base_url=slotgate.base_url, max_retries=retries, **auth
        ) as client:
            yield client, slotgate


@pytest.mark.parametrize("header", ["bearer", "x-api-key"])
@in_loop
async def test_a_message_whole_and_streamed(header: str) -> None:
    async with FakeEngine() as engine, sdk(engine, header=header) as (client, _):
        whole = await client.messages.create(**HELLO)
        assert whole.content[0].type == "text"
        async with client.messages.stream(**HELLO) as streamed:
            text = "".join([piece async for piece in streamed.text_stream])
            final = await streamed.get_final_message()
        assert text == whole.content[0].text == " word0 word1 word2 word3 word4"
        assert final.stop_reason == "end_turn"
        assert final.usage.output_tokens == 5


@in_loop
async def test_a_tool_call_arrives_with_its_input_streamed_too() -> None:
    use = {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Bonn"}}
    message = {
        "id": "msg_1",
        "type": "message",
        "role": "assistant",
        "model": "m",
        "content": [use],
        "stop_reason": "tool_use",
        "stop_sequence": None,
        "usage": {"input_tokens": 5, "output_tokens": 9},
    }
    started = {**message, "content": [], "stop_reason": None}
    events = [
        {"type": "message_start", "message": started},
        {"type": "content_block_start", "index": 0, "content_block": {**use, "input": {}}},
        _input('{"city":'),
        {"type": "ping"},
        _input('"Bonn"}'),
        {"type": "content_block_stop", "index": 0},
        {
            "type": "message_delta",
            "delta": {"stop_reason": "tool_use", "stop_sequence": None},
            "usage": {"output_tokens": 9},
        },
        {"type": "message_stop"},
    ]
    async with FakeEngine() as engine, sdk(engine) as (client, slotgate):
        engine.script(respond(200, message), stream([typed(event) for event in events]))
        whole = await client.messages.create(**HELLO, tools=[TOOL])
        async with client.messages.stream(**HELLO, tools=[TOOL]) as streamed:
            final = await streamed.get_final_message()
        for found in (whole, final):
            assert found.content[0].type == "tool_use"
            assert found.content[0].input == {"city": "Bonn"}
        assert await slotgate.outcomes() == {"served": 2}
        assert await slotgate.metric("ttft_seconds_count") == 1


def _input(piece: str) -> dict[str, Any]:
    delta = {"type": "input_json_delta", "partial_json": piece}
    return {"type": "content_block_delta", "index": 0, "delta": delta}


@in_loop
async def test_tokens_are_counted_by_the_engine_or_estimated() -> None:
    asked: Any = {"model": "m", "messages": HELLO["messages"]}
    async with FakeEngine() as engine, sdk(engine) as (client, _):
        assert (await client.messages.count_tokens(**asked)).input_tokens == 32
    async with FakeEngine("ollama") as engine, sdk(engine) as (client, _):
        assert 1 <= (await client.messages.count_tokens(**asked)).input_tokens < 32


@in_loop
async def test_the_models_are_listed_and_found() -> None:
    async with FakeEngine("vllm", models=["a", "org/b"]) as engine, sdk(engine) as (client, _):
        page = await client.models.list(limit=1)
        assert [model.id for model in page.data] == ["a", "org/b"]
        assert not page.has_next_page()
        found = await client.models.retrieve("org/b")
        assert (found.id, found.type, found.display_name) == ("org/b", "model", "org/b")
        assert found.created_at.year == 1970


@in_loop
async def test_refusals_are_the_sdks_own_classes_with_the_id_of_the_request() -> None:
    keys: list[Any] = [
        {"name": "alice"},
        {"name": "bob", "models": ["other"]},
        {"name": "carl", "rpm": 1},
    ]
    limits = {"body_mib": 0.0625}
    async with FakeEngine() as engine, sdk(engine, keys=keys, limits=limits) as (client, slotgate):
        with pytest.raises(anthropic.AuthenticationError):
            await client.with_options(auth_token="sk-sg-wrong").messages.create(**HELLO)
        bob = client.with_options(auth_token=slotgate.keys["bob"])
        with pytest.raises(anthropic.PermissionDeniedError):
            await bob.messages.create(**HELLO)
        with pytest.raises(anthropic.NotFoundError) as unknown:
            await client.messages.create(**{**HELLO, "model": "mm"})
        assert unknown.value.request_id
        assert unknown.value.body["request_id"] == unknown.value.request_id  # type: ignore[index]
        large = [{"role": "user", "content": "x" * 100_000}]
        with pytest.raises(anthropic.APIStatusError) as too_large:
            await client.messages.create(**{**HELLO, "messages": large})
        assert too_large.value.status_code == 413
        carl = client.with_options(auth_token=slotgate.keys["carl"])
        await carl.messages.create(**HELLO)
        with pytest.raises(anthropic.RateLimitError) as limited:
            await carl.messages.create(**HELLO)
        assert 1 <= int(limited.value.response.headers["retry-after"]) <= 60
        engine.script(respond(400, {"error": {"message": "'messages' is required"}}))
        with pytest.raises(anthropic.BadRequestError):
            await client.messages.create(**HELLO)


@in_loop
async def test_a_full_queue_is_an_overload_with_a_time_to_come_back() -> None:
    async with (
        FakeEngine(slots=1) as engine,
        sdk(engine, admission={"queue": 0}) as (client, slotgate),
    ):
        engine.script(hang())
        holder = asyncio.create_task(slotgate.chat())
        await engine.until(lambda: engine.inside)
        with pytest.raises(anthropic.APIStatusError) as full:
            await client.messages.create(**HELLO)
        assert full.value.status_code == 529
        assert type(full.value).__name__ in {"OverloadedError", "InternalServerError"}
        assert "overloaded" in str(full.value)
        assert 1 <= int(full.value.response.headers["retry-after"]) <= 60
        holder.cancel()
        await asyncio.gather(holder, return_exceptions=True)


@in_loop
async def test_the_sdk_retries_as_often_and_as_late_as_it_is_told() -> None:
    busy = respond(503, {"error": {"message": "busy"}}, [("Retry-After", "1")])
    async with FakeEngine() as engine, sdk(engine, retries=2) as (client, _):
        engine.script(busy, busy)
        since = time.monotonic()
        answer = await client.messages.create(**HELLO)
        assert answer.content
        assert len(engine.requests) == 3
        first, second, third = [request.head_at for request in engine.requests]
        for gap in (second - first, third - second):
            assert 0.9 <= gap < 10 * slack()
        assert time.monotonic() - since < 30 * slack()
