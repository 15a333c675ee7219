"""The openai SDK against a real llama.cpp server through the gateway."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

from gateway.cli.local_engine import MODEL_NAME
from tests.engines.conftest import real_engine
from tests.fakes.gateway import Running, running_gateway
from tests.fakes.running import eventually, in_loop

MESSAGES: Any = [{"role": "user", "content": "Say something short."}]

pytestmark = pytest.mark.engine("llama-server")


@contextlib.asynccontextmanager
async def sdk(
    key: str | None = None, **config: Any
) -> AsyncIterator[tuple[openai.AsyncOpenAI, Running]]:
    """A client of the SDK, the gateway, and a real engine."""
    async with (
        real_engine(slots=2) as engine,
        running_gateway(engine.url, keys=["alice"], **config) as slotgate,
        openai.AsyncOpenAI(
            base_url=f"{slotgate.base_url}/v1", api_key=key or slotgate.keys["alice"], max_retries=0
        ) as client,
    ):
        slotgate.models.add(MODEL_NAME)
        await eventually(lambda: slotgate.metric("backend_up"))
        yield client, slotgate


@in_loop
async def test_it_streams_a_chat_token_by_token_with_the_usage_at_the_end() -> None:
    async with sdk() as (client, slotgate):
        stream = await client.chat.completions.create(
            model=MODEL_NAME,
            messages=MESSAGES,
            max_tokens=12,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        usage = chunks[-1].usage
        assert text
        assert len(chunks) > 3
        assert usage is not None
        assert usage.completion_tokens <= 12
        assert await slotgate.metric("ttft_seconds_count", model=MODEL_NAME) == 1
        generated = await slotgate.metric("generated_tokens_total", model=MODEL_NAME)
        assert generated == usage.completion_tokens
        assert await slotgate.metric("key_tokens_total", key="alice", kind="prompt") > 0
        slotgate.sent = 1


@in_loop
async def test_it_gets_whole_answers_completions_and_models() -> None:
    async with sdk() as (client, slotgate):
        answer = await client.chat.completions.create(
            model=MODEL_NAME, messages=MESSAGES, max_tokens=8
        )
        assert answer.choices[0].message.content
        text = await client.completions.create(model=MODEL_NAME, prompt="One, two,", max_tokens=4)
        assert text.choices[0].text
        models = [model.id async for model in await client.models.list()]
        assert models == [MODEL_NAME]
        raw = await client.chat.completions.with_raw_response.create(
            model=MODEL_NAME, messages=MESSAGES, max_tokens=2
        )
        assert raw.headers["x-slotgate-backend"] == "b1"
        assert await slotgate.outcomes() == {"served": 3}


@in_loop
async def test_closing_a_stream_early_frees_the_slot() -> None:
    async with sdk() as (client, slotgate):
        stream = await client.chat.completions.create(
            model=MODEL_NAME,
            messages=MESSAGES,
            max_tokens=1500,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        async for chunk in stream:
            if chunk.choices and chunk.choices[0].delta.content:
                break
        await stream.close()
        await eventually(lambda: slotgate.metric("requests_total", outcome="client_gone"), 2)
        answer = await client.chat.completions.create(
            model=MODEL_NAME, messages=MESSAGES, max_tokens=2
        )
        assert answer.choices


@in_loop
async def test_its_errors_are_those_that_it_knows() -> None:
    async with sdk() as (client, _):
        with pytest.raises(openai.NotFoundError) as missing:
            await client.chat.completions.create(model="no-such", messages=MESSAGES)
        assert missing.value.code == "model_not_found"
        assert missing.value.param == "model"
        stranger = client.with_options(api_key="sk-wrong")
        with pytest.raises(openai.AuthenticationError) as refused:
            await stranger.chat.completions.create(model=MODEL_NAME, messages=MESSAGES)
        assert refused.value.code == "invalid_api_key"
        with pytest.raises(openai.BadRequestError) as many:
            await client.chat.completions.create(model=MODEL_NAME, messages=MESSAGES, n=5)
        assert many.value.code == "too_many_choices"
