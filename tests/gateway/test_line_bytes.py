"""Bytes pass: what the client wrote reaches the engine, what the engine wrote reaches the client. B034, B035, B057, B111."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from tests.fakes.behaviour import Behaviour
from tests.fakes.connection import Connection
from tests.fakes.engine import FakeEngine
from tests.fakes.gateway import running_gateway
from tests.fakes.invariants import bytes_are_unchanged
from tests.fakes.raw_client import RawClient
from tests.fakes.running import in_loop
from tests.fakes.scripts import events_of, respond, stream
from tests.gateway.line_talk import CHAT, GENERATING, STREAMING, asking, body_for

USAGE = b'"usage":{"prompt_tokens":7,"completion_tokens":3,"total_tokens":10}'
USAGE_CHUNKS = {
    "empty choices": b'data: {"choices":[],' + USAGE + b"}\n\n",
    "null choices": b'data: {"choices":null,' + USAGE + b"}\n\n",
    "no choices": b"data: {" + USAGE + b"}\n\n",
}


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("name", USAGE_CHUNKS)
@in_loop
async def test_a_chunk_with_usage_and_no_choices_is_understood_and_passes(
    name: str, first: bool
) -> None:
    async with FakeEngine() as engine, running_gateway(engine) as slotgate:
        *tokens, end = events_of(CHAT, 3)
        usage = USAGE_CHUNKS[name]
        events = [usage, *tokens, end] if first else [*tokens, usage, end]
        engine.script(stream(events, every_s=0.01))
        answer = await slotgate.chat(stream=True)
        bytes_are_unchanged(answer.content, b"".join(events))
        assert await slotgate.outcomes() == {"served": 1}
        assert await slotgate.metric("prompt_tokens_total", model="m") == 7
        assert await slotgate.metric("generated_tokens_total", model="m") == 3
        assert await slotgate.metric("ttft_seconds_count", model="m") == 1


@pytest.mark.parametrize("options", [None, {"include_usage": True}])
@in_loop
async def test_stream_options_are_what_the_client_wrote_and_never_ours(options: Any) -> None:
    async with FakeEngine() as engine, running_gateway(engine) as slotgate:
        fields = {} if options is None else {"stream_options": options}
        await slotgate.chat(stream=True, **fields)
        assert engine.requests[0].json().get("stream_options") == options


DELTAS = [
    b'{"reasoning":"hm"}',
    b'{"reasoning_content":"hm"}',
    b'{"reasoning_items":[{"id":"r"}]}',
    b'{"tool_calls":[{"index":0,"function":{"arguments":"{"}}]}',
]


@pytest.mark.parametrize("delta", DELTAS)
@in_loop
async def test_unknown_fields_pass_and_a_delta_of_reasoning_or_tools_is_the_first_token(
    delta: bytes,
) -> None:
    async with FakeEngine() as engine, running_gateway(engine) as slotgate:
        one = (
            b'data: {"choices":[{"index":0,"delta":' + delta + b',"zz_future":1,"token_ids":[5]}],'
            b'"timings":{"predicted_ms":1.50},"prompt_progress":{"total":3}}\n\n'
        )
        end = events_of(CHAT, 0)[-1]
        engine.script(stream([one, end]))
        answer = await slotgate.chat(stream=True)
        bytes_are_unchanged(answer.content, one + end)
        assert await slotgate.metric("ttft_seconds_count", model="m") == 1


@pytest.mark.parametrize("path", GENERATING)
@in_loop
async def test_the_body_reaches_the_engine_byte_for_byte(path: str) -> None:
    async with FakeEngine() as engine, running_gateway(engine) as slotgate:
        odd = {"seed": 9223372036854775807, "zz": None, "chat_template_kwargs": {"a": {}}}
        text = json.dumps(body_for(path, **odd), indent=3, ensure_ascii=False)
        body = text.replace('"zz": null', '"zz" :  1.0e-7 , "é\\u0000" : [ ]').encode()
        headers = {"content-type": "application/json"}
        answer = await slotgate.client.post(path, content=body, headers=headers)
        assert answer.status_code == 200
        assert engine.requests[0].body == body
        assert engine.requests[0].target == path
        bytes_are_unchanged(answer.content, bytes(engine.requests[0].sent))


@pytest.mark.parametrize("path", STREAMING)
@in_loop
async def test_each_event_of_a_stream_arrives_when_it_was_written(path: str) -> None:
    """One at a time: the second is only written when the client has the first."""
    events = events_of(path, 4)
    go_on = asyncio.Event()

    async def script(connection: Connection) -> None:
        kind = "text/event-stream"
        await connection.begin(content_type=kind)
        for event in events:
            await connection.body(event)
            await go_on.wait()
            go_on.clear()
        await connection.end()

    async with FakeEngine() as engine, running_gateway(engine) as slotgate:
        engine.script(script)
        async with await asking(slotgate, path, stream=True) as client:
            head = await client.head()
            assert head.header("cache-control") == "no-cache, no-transform"
            assert head.header("x-accel-buffering") == "no"
            for event in events:
                assert await client.chunk() == event
                go_on.set()
            assert await client.chunk() == b""


async def refuses_ids_that_it_knows(connection: Connection) -> None:
    """As an engine that keys its requests by id."""
    request = connection.request
    assert request is not None
    seen = [one for one in connection.engine.requests if one.id == request.id]
    await connection.pause(0.05)
    status = 400 if len(seen) > 1 else 200
    await connection.respond(status, {"choices": [], "id": request.id})


@in_loop
async def test_two_requests_with_the_same_id_both_succeed_and_both_get_it_back() -> None:
    async with FakeEngine(slots=2) as engine, running_gateway(engine) as slotgate:
        engine.always(refuses_ids_that_it_knows)
        headers = {"X-Request-Id": "same"}
        answers = await asyncio.gather(
            *(slotgate.client.post(CHAT, json=body_for(CHAT), headers=headers) for _ in range(2))
        )
        assert [answer.status_code for answer in answers] == [200, 200]
        assert {answer.headers["x-request-id"] for answer in answers} == {"same"}
        assert "same" not in {request.id for request in engine.requests}


@pytest.mark.parametrize("odd", ["x" * 129, "caf\xe9", "tab\tbed", ""])
@in_loop
async def test_an_id_that_is_too_long_or_unprintable_is_replaced(odd: str) -> None:
    async with FakeEngine() as engine, running_gateway(engine) as slotgate:
        async with await asking(slotgate, headers={"X-Request-Id": odd}) as client:
            answer = await client.response()
        own = answer.header("x-request-id")
        assert answer.status == 200
        assert own is not None
        assert own.startswith("req-")
        assert engine.requests[0].id not in {odd, own}


@in_loop
async def test_an_id_of_a_mebibyte_is_a_header_block_that_is_too_large() -> None:
    async with (
        FakeEngine() as engine,
        running_gateway(engine) as slotgate,
        await asking(slotgate, headers={"X-Request-Id": "x" * (1 << 20)}) as client,
    ):
        assert (await client.response()).status == 431
        assert engine.requests == []


@pytest.mark.parametrize("how", ["authorization", "x-api-key", "api-key"])
@pytest.mark.parametrize("own", [None, "sk-engine-own-key"])
@in_loop
async def test_the_key_of_a_client_never_reaches_an_engine(how: str, own: str | None) -> None:
    async with (
        FakeEngine(behaviour=Behaviour(api_key=own)) as engine,
        running_gateway(engine, keys=["alice"]) as slotgate,
    ):
        secret = slotgate.keys["alice"]
        credentials = {
            how: f"Bearer {secret}" if how == "authorization" else secret,
            "cookie": f"key={secret}",
            "x-goog-api-key": secret,
            "proxy-authorization": secret,
        }
        async with await RawClient.connect(slotgate.port) as client:
            await client.request(
                "POST", CHAT, headers=credentials, body=json.dumps(body_for(CHAT)).encode()
            )
            assert (await client.response()).status == 200
        everything = b"".join(
            data for connection in engine.connections for _, data in connection.received
        )
        assert secret.encode() not in everything
        for request in engine.received:
            expected = None if own is None else f"Bearer {own}"
            assert request.headers.get("authorization") == expected


@in_loop
async def test_the_key_of_a_client_does_not_travel_with_a_retry_either() -> None:
    async with (
        FakeEngine() as busy,
        FakeEngine(behaviour=Behaviour(api_key="sk-second")) as free,
        running_gateway(busy, free, keys=["alice"]) as slotgate,
    ):
        busy.always(respond(503, {"error": "busy"}))
        for number in range(20):
            conversation = [{"role": "user", "content": f"{number} " * 50}]
            assert (await slotgate.chat(messages=conversation)).status_code == 200
        assert busy.requests, "the busy one was asked first at least once"
        for engine in (busy, free):
            for connection in engine.connections:
                for _, data in connection.received:
                    assert slotgate.keys["alice"].encode() not in data
        for request in busy.received:
            assert "authorization" not in request.headers
