"""After the first byte: a stream that broke never looks finished, in the form of its wire. B033, B043, B044."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from tests.fakes.connection import Script
from tests.fakes.engine import FakeEngine
from tests.fakes.gateway import Running, running_gateway
from tests.fakes.raw_client import RawResponse
from tests.fakes.running import eventually, in_loop
from tests.fakes.scripts import FIN, RST, chat_stream, events_of, stream
from tests.gateway.line_talk import CHAT, STREAMING, asking

MARKS = (b"[DONE]", b"message_stop", b"response.completed", b'"done":true', b'"done": true')
CUTS = {"a reset": RST, "a FIN": FIN, "a proper end": None}


async def answer_to(slotgate: Running, path: str) -> RawResponse:
    async with await asking(slotgate, path, stream=True) as client:
        return await client.response()


def last_event(body: bytes, path: str) -> tuple[str, Any]:
    """The name and the document of the last event."""
    lines = body.rstrip().split(b"\n\n")[-1].split(b"\n")
    if path.startswith("/api/"):
        return "", json.loads(lines[-1])
    fields = dict(line.split(b": ", 1) for line in lines)
    return fields.get(b"event", b"").decode(), json.loads(fields[b"data"])


def check_error(path: str, name: str, document: Any) -> None:
    if path == "/v1/responses":
        assert name == "response.failed"
        assert document["type"] == "response.failed"
        assert document["response"]["object"] == "response"
        assert document["response"]["status"] == "failed"
        assert document["response"]["error"]["code"] == "upstream_broke"
    elif path == "/v1/messages":
        assert name == "error"
        assert document["type"] == "error"
        assert document["error"]["type"] == "api_error"
        assert document["error"]["message"]
    elif path.startswith("/api/"):
        assert isinstance(document["error"], str)
    else:
        assert name == ""
        assert document["error"]["code"] == "upstream_broke"
        assert document["error"]["message"]


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("path", STREAMING)
@in_loop
async def test_a_stream_that_ends_too_early_ends_with_one_error_of_its_wire(
    path: str, cut: str
) -> None:
    async with FakeEngine() as engine, running_gateway(engine) as slotgate:
        engine.script(chat_stream(3, 0.01, path=path, whole=False, then=CUTS[cut]))
        answer = await answer_to(slotgate, path)
        sent = bytes(engine.requests[0].sent)
        assert answer.status == 200
        assert answer.body.startswith(sent)
        name, document = last_event(answer.body, path)
        check_error(path, name, document)
        added = answer.body.removeprefix(sent)
        assert not any(mark in added for mark in MARKS)
        assert engine.url.removeprefix("http://").encode() not in added
        await eventually(lambda: slotgate.metric("requests_total", outcome="upstream_broke"))
        if cut != "a proper end":
            assert await slotgate.metric("backend_errors_total") == 1


@pytest.mark.parametrize("path", STREAMING)
@in_loop
async def test_an_event_cut_in_half_breaks_the_connection(path: str) -> None:
    async with FakeEngine() as engine, running_gateway(engine) as slotgate:
        events = events_of(path, 3)
        engine.script(stream([*events[:2], events[2][:-7]], every_s=0.01, then=RST))
        answer = await answer_to(slotgate, path)
        assert answer.ended in ("cut", "reset")
        assert bytes(engine.requests[0].sent).startswith(answer.body)
        await eventually(lambda: slotgate.metric("requests_total", outcome="upstream_broke"))


@in_loop
async def test_a_chat_without_done_but_with_a_finish_reason_is_whole_and_stays_as_it_is() -> None:
    async with FakeEngine() as engine, running_gateway(engine) as slotgate:
        *tokens, end = events_of(CHAT, 3)
        end = end.replace(b"data: [DONE]\n\n", b"")
        assert b"finish_reason" in end
        engine.script(stream([*tokens, end]))
        answer = await answer_to(slotgate, CHAT)
        assert answer.ended == "whole"
        assert answer.body == bytes(engine.requests[0].sent)
        assert await slotgate.outcomes() == {"served": 1}


@pytest.mark.parametrize("pieces", [[], [b": ping\n\n", b": ping\n\n"]], ids=["empty", "comments"])
@pytest.mark.parametrize("path", STREAMING)
@in_loop
async def test_a_stream_without_any_event_is_no_answer(path: str, pieces: list[bytes]) -> None:
    async with FakeEngine() as engine, running_gateway(engine) as slotgate:
        engine.script(stream(pieces, every_s=0.01))
        answer = await answer_to(slotgate, path)
        if answer.status == 200:
            name, document = last_event(answer.body, path)
            check_error(path, name, document)
        else:
            assert answer.status == 502
            assert "error" in answer.json()
        assert not any(mark in answer.body for mark in MARKS)
        outcomes = await slotgate.outcomes()
        assert set(outcomes) <= {"upstream_broke", "upstream_failed"}


@in_loop
async def test_a_stream_without_a_byte_is_a_status_and_not_a_200() -> None:
    async with FakeEngine() as engine, running_gateway(engine) as slotgate:
        engine.script(stream([], then=FIN))
        answer = await answer_to(slotgate, CHAT)
        assert answer.status == 502 or b'"error"' in answer.body


@pytest.mark.parametrize("cut", ["a reset", "a FIN", "a proper end"])
@in_loop
async def test_the_openai_sdk_raises_on_a_broken_stream(cut: str) -> None:
    script: Script = chat_stream(3, 0.01, whole=False, then=CUTS[cut])

    async with (
        FakeEngine() as engine,
        running_gateway(engine) as slotgate,
        openai.AsyncOpenAI(
            base_url=f"{slotgate.base_url}/v1", api_key="none", max_retries=0
        ) as sdk,
    ):
        engine.script(script)
        messages: Any = [{"role": "user", "content": "hello"}]
        chunks: list[Any] = []

        async def read() -> None:
            answer = await sdk.chat.completions.create(model="m", messages=messages, stream=True)
            async for chunk in answer:
                chunks.append(chunk)  # noqa: PERF401  (what came before the error counts)

        with pytest.raises(openai.APIError, match="broke"):
            await read()
        assert len(chunks) == 4
