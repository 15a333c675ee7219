"""The Ollama client for Python in front of scripted Ollamas: chats, lists, and errors as its own class."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import ollama
import pytest

from tests.fakes.engine import FakeEngine
from tests.fakes.gateway import Running, running_gateway
from tests.fakes.running import in_loop
from tests.fakes.scripts import respond

SDK_LAG_S = 5.0  # the SDK works in the same loop, and builds its types when first used
MESSAGES: Any = [{"role": "user", "content": "hello"}]
TEXT = " word0 word1 word2 word3 word4"


@contextlib.asynccontextmanager
async def sdk(
    *engines: FakeEngine, in_path: bool = False, **config: Any
) -> AsyncIterator[tuple[ollama.AsyncClient, Running]]:
    """With a key in a header, or in the path as for clients that cannot send one."""
    auth = {"key_in_path": in_path}
    async with running_gateway(
        *engines, keys=["alice"], auth=auth, lag_limit_s=SDK_LAG_S, **config
    ) as slotgate:
        host = slotgate.base_url + (f"/k/{slotgate.keys['alice']}" if in_path else "")
        headers = {} if in_path else slotgate.header()
        client = ollama.AsyncClient(host=host, headers=headers)
        try:
            yield client, slotgate
        finally:
            await client._client.aclose()


@pytest.mark.parametrize("in_path", [False, True], ids=["header", "path"])
@in_loop
async def test_a_chat_whole_and_streamed(in_path: bool) -> None:
    async with FakeEngine("ollama") as engine, sdk(engine, in_path=in_path) as (client, slotgate):
        whole = await client.chat(model="m", messages=MESSAGES)
        assert whole.message.content == TEXT
        parts = await client.chat(model="m", messages=MESSAGES, stream=True)
        assert "".join([part.message.content or "" async for part in parts]) == TEXT
        made = await client.generate(model="m", prompt="hello")
        assert made.response == TEXT
        assert await slotgate.outcomes() == {"served": 3}
        assert await slotgate.metric("ttft_seconds_count") == 1


@in_loop
async def test_vectors_take_a_permit_and_arrive() -> None:
    async with FakeEngine("ollama") as engine, sdk(engine) as (client, slotgate):
        vectors = await client.embed(model="m", input="hello")
        assert vectors.embeddings == [[0.1, 0.2]]
        assert await slotgate.outcomes() == {"served": 1}


@in_loop
async def test_what_is_installed_loaded_and_shown() -> None:
    async with (
        FakeEngine("ollama", models=["a:latest"]) as one,
        FakeEngine("ollama", models=["b:1b"]) as two,
        sdk(one, two) as (client, slotgate),
    ):
        slotgate.models.add("a")
        listed = await client.list()
        assert sorted(model.model or "" for model in listed.models) == ["a:latest", "b:1b"]
        loaded = await client.ps()
        assert sorted(model.name or "" for model in loaded.models) == ["a:latest", "b:1b"]
        shown = await client.show("b:1b")
        assert shown.details is not None
        assert shown.details.family == "llama"
        assert [request.path for request in two.requests] == ["/api/show"]


@in_loop
async def test_a_refusal_is_a_response_error_with_its_status_and_a_sentence() -> None:
    async with FakeEngine("ollama") as engine, sdk(engine) as (client, _):
        with pytest.raises(ollama.ResponseError) as unknown:
            await client.chat(model="mm", messages=MESSAGES)
        assert unknown.value.status_code == 404
        assert "'m'" in unknown.value.error
        engine.script(respond(400, {"error": "the input length exceeds the context length"}))
        with pytest.raises(ollama.ResponseError) as told:
            await client.generate(model="m", prompt="hello")
        assert told.value.error == "the input length exceeds the context length"
        with pytest.raises(ollama.ResponseError) as pulled:
            await client.pull("m")
        assert pulled.value.status_code == 404
        assert engine.calls["/api/pull"] == 0
