"""Long prefills: a stream whose engine is silent begins with a head of the gateway's and comments. Cases B030, B032,
B100, B101."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from gateway.core.errors import Family
from gateway.core.routes import ROUTES
from gateway.core.wire import Wire
from gateway.runtime.exchange import Exchange
from gateway.runtime.keepalive import EarlyHead
from tests.fakes.connection import Connection
from tests.fakes.engine import FakeEngine
from tests.fakes.gateway import running_gateway
from tests.fakes.raw_client import RawClient
from tests.fakes.running import eventually, in_loop
from tests.fakes.scripts import HANG, chat_stream, events_of, hang, raw, respond, stream
from tests.gateway.line_talk import CHAT, STREAMING, asking

COMMENT = b": keep-alive\n\n"
SOON = {"early_headers_s": 0.1}
SSE = [path for path in STREAMING if not path.startswith("/api/")]


@pytest.mark.parametrize("silence", ["before headers", "after headers"])
@pytest.mark.parametrize("path", STREAMING)
def test_a_silent_engine_gets_an_early_head_and_its_bytes_then_follow_unchanged(
    path: str, silence: str
) -> None:
    pause = {"headers_after_s" if silence == "before headers" else "first_s": 0.3}

    @in_loop
    async def check() -> None:
        async with FakeEngine() as engine, running_gateway(engine, timeouts=SOON) as slotgate:
            engine.script(chat_stream(3, path=path, **pause))
            async with await asking(slotgate, path, stream=True) as client:
                head = await client.head()
                assert head.status == 200
                if path in SSE:
                    assert (head.header("content-type") or "").startswith("text/event-stream")
                    assert await client.chunk() == COMMENT
                else:
                    assert head.header("content-type") == "application/x-ndjson"
                assert not engine.requests[0].sent, "the engine had spoken already"
                body = b""
                while piece := await client.chunk():
                    body += piece
                assert body == bytes(engine.requests[0].sent)
            assert await slotgate.outcomes() == {"served": 1}

    check()


@in_loop
async def test_a_request_that_waits_in_line_begins_early_too_and_its_timeout_is_an_event() -> None:
    async with (
        FakeEngine(slots=1) as engine,
        running_gateway(
            engine, timeouts=SOON, admission={"queue": 2, "max_wait_s": 0.3}
        ) as slotgate,
    ):
        engine.always(hang())
        async with await asking(slotgate), await asking(slotgate, stream=True) as waiting:
            answer = await waiting.response()
            assert answer.status == 200
            assert answer.ended == "whole"
            assert answer.body.startswith(COMMENT)
            error = json.loads(answer.body.removeprefix(COMMENT).removeprefix(b"data: "))
            assert error["error"]["code"] == "gateway_queue_timeout"
            assert b"[DONE]" not in answer.body
            assert await slotgate.outcomes() == {"queue_timeout": 1}


REFUSAL = {"error": {"message": "no such thing", "type": "invalid_request_error", "code": "odd"}}


def _check_event(path: str, event: bytes, message: str, code: str) -> None:
    if path.startswith("/api/"):
        assert json.loads(event) == {"error": message}
        return
    *named, data = event.strip().split(b"\n")
    document: dict[str, Any] = json.loads(data.removeprefix(b"data: "))
    if path == "/v1/messages":
        assert named == [b"event: error"]
        assert document["type"] == "error"
        assert document["error"]["message"] == message
    elif path == "/v1/responses":
        assert named == [b"event: response.failed"]
        assert document["response"]["status"] == "failed"
        assert document["response"]["error"] == {"code": code, "message": message}
    else:
        assert named == []
        assert document["error"]["message"] == message
        assert document["error"]["code"] == code


@pytest.mark.parametrize("status", [400, 500, 503])
@pytest.mark.parametrize("path", STREAMING)
def test_an_engines_late_refusal_is_told_as_an_event_with_its_own_words(
    path: str, status: int
) -> None:
    @in_loop
    async def check() -> None:
        async with FakeEngine() as engine, running_gateway(engine, timeouts=SOON) as slotgate:
            engine.script(respond(status, REFUSAL, after_s=0.25))
            async with await asking(slotgate, path, stream=True) as client:
                answer = await client.response()
            assert answer.status == 200
            _check_event(path, answer.body.removeprefix(COMMENT), "no such thing", "odd")
            assert await slotgate.outcomes() == {"upstream_refused": 1}

    check()


@in_loop
async def test_a_refusal_whose_body_is_late_is_an_event_too() -> None:
    """Its head came in time, but a head alone is not passed on."""
    body = json.dumps(REFUSAL).encode()
    head = b"HTTP/1.1 400 Bad\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    async with FakeEngine() as engine, running_gateway(engine, timeouts=SOON) as slotgate:
        for status in (b"400", b"503", b"500", b"200"):
            engine.script(raw((head % len(body)).replace(b"400", status), 0.25, body))
            async with await asking(slotgate, stream=True) as client:
                answer = await client.response()
            assert (answer.status, answer.ended) == (200, "whole")
            event = answer.body.removeprefix(COMMENT)
            if status == b"200":
                assert b"upstream_failed" in event
            else:
                _check_event(CHAT, event, "no such thing", "odd")
        assert await slotgate.outcomes() == {"upstream_refused": 3, "upstream_failed": 1}


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"Internal Server Error", "Internal Server Error"),
        (b'{"error":"plain words"}', "plain words"),
        (b'{"object":"error","message":"flat","type":"t","code":400}', "flat"),
        (b"", "The backend answered with status 500."),
    ],
)
@in_loop
async def test_a_late_error_page_of_any_form_becomes_an_error_that_sdks_understand(
    body: bytes, message: str
) -> None:
    async with FakeEngine() as engine, running_gateway(engine, timeouts=SOON) as slotgate:
        engine.script(respond(500, body, after_s=0.25, content_type="text/plain"))
        async with await asking(slotgate, stream=True) as client:
            answer = await client.response()
        document = json.loads(answer.body.removeprefix(COMMENT).removeprefix(b"data: "))
        assert document["error"]["message"] == message


@pytest.mark.parametrize("late", ["drop", "json", "auth"])
@in_loop
async def test_what_cannot_follow_an_early_head_ends_the_stream_as_an_error(late: str) -> None:
    scripts = {
        "drop": raw(0.25, b""),
        "json": respond(200, {"choices": []}, after_s=0.25),
        "auth": respond(401, {"error": {"message": "engine text"}}, after_s=0.25),
    }

    async def dropped(connection: Connection) -> None:
        await connection.pause(0.25)
        connection.rst()

    async with FakeEngine() as engine, running_gateway(engine, timeouts=SOON) as slotgate:
        engine.script(dropped if late == "drop" else scripts[late])
        async with await asking(slotgate, stream=True) as client:
            answer = await client.response()
        document = json.loads(answer.body.removeprefix(COMMENT).removeprefix(b"data: "))
        expected = "upstream_auth" if late == "auth" else "upstream_failed"
        assert document["error"]["code"] == expected
        assert b"engine text" not in answer.body
        assert await slotgate.outcomes() == {"upstream_failed": 1}


@in_loop
async def test_nothing_is_added_when_a_stream_has_begun_and_falls_silent() -> None:
    """Not inside a half-sent event, not between events, not behind an id."""
    events = events_of(CHAT, 3)
    cuts = [
        [events[0], events[1][:-9], events[1][-9:], *events[2:]],
        [b"event: x\n", b"data: {}\n\n", *events],
        [b"id: 1\n" + events[0], *events[1:]],
    ]
    async with FakeEngine() as engine, running_gateway(engine, timeouts=SOON) as slotgate:
        for pieces in cuts:
            engine.script(stream(pieces, every_s=0.25))
            async with await asking(slotgate, stream=True) as client:
                answer = await client.response()
            assert answer.body == bytes(engine.requests[-1].sent)


@pytest.mark.parametrize("why", ["not a stream", "off", "in time"])
@in_loop
async def test_the_status_is_kept_for_the_engine_when(why: str) -> None:
    after_s = {"off": 0, "in time": 5}.get(why, 0.1)
    async with (
        FakeEngine() as engine,
        running_gateway(engine, timeouts={"early_headers_s": after_s}) as slotgate,
    ):
        engine.script(respond(422, REFUSAL, after_s=0.25))
        async with await asking(slotgate, stream=why != "not a stream") as client:
            answer = await client.response()
        assert answer.status == 422
        assert answer.body == bytes(engine.requests[0].sent)


@in_loop
async def test_an_early_head_reaches_http_1_0_and_a_break_is_visible_there() -> None:
    async with FakeEngine() as engine, running_gateway(engine, timeouts=SOON) as slotgate:
        events = events_of(CHAT, 3)
        engine.script(stream([events[0], events[1][:-5]], first_s=0.25, then=HANG))
        body = json.dumps({"model": "m", "messages": [], "stream": True}).encode()
        async with await RawClient.connect(slotgate.port) as client:
            await client.request("POST", CHAT, body=body, version="1.0")
            head = await client.head()
            assert (head.status, head.framing) == (200, "close")
            await client.until(COMMENT)
            await client.until(events[1][:-5])
            engine.requests[0].connection.rst()
            assert await client.ending() == "reset"


@in_loop
async def test_a_client_that_leaves_after_an_early_head_frees_the_engine() -> None:
    async with FakeEngine() as engine, running_gateway(engine, timeouts=SOON) as slotgate:
        engine.always(hang())
        async with await asking(slotgate, stream=True) as client:
            await client.until(COMMENT)
        await engine.until(engine.requests[0].connection.left.is_set, within_s=1)
        await eventually(lambda: slotgate.metric("requests_total", outcome="client_gone"))


class _Edge:
    """The connection, as far as an early head touches it: what was written to it."""

    write_paused = False

    def __init__(self) -> None:
        self.written: list[bytes] = []
        self.notes: dict[Any, Any] = {}

    def start(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        assert dict(headers)[b"content-type"] == b"text/event-stream"
        self.written.append(b"%d" % status)

    def write(self, data: bytes, *, more: bool) -> None:
        assert more
        self.written.append(data)


def _exchange(edge: _Edge) -> Exchange:
    scope = {"method": "POST", "query_string": b"", "headers": []}
    scope["extensions"] = {"slotgate.edge": edge}
    unused: Any = None
    exchange = Exchange(scope, unused, unused, route=ROUTES[CHAT], path=CHAT, family=Family.OPENAI)
    exchange.received_at = asyncio.get_running_loop().time()
    return exchange


@in_loop
async def test_comments_go_on_until_the_engine_speaks() -> None:
    edge = _Edge()
    exchange = _exchange(edge)
    with EarlyHead(exchange, Wire.CHAT, 0.01, every_s=0.01):
        await eventually(lambda: len(edge.written) >= 4)
        assert set(edge.written) == {b"200", COMMENT}
        await exchange.write(b"data: {}\n\n")
        await asyncio.sleep(0.1)
        assert edge.written[-1] == b"data: {}\n\n"


@in_loop
async def test_a_request_that_has_ended_gets_no_early_head() -> None:
    edge = _Edge()
    with EarlyHead(_exchange(edge), Wire.CHAT, 0.01, every_s=0.01):
        pass
    await asyncio.sleep(0.05)
    assert not edge.written


@in_loop
async def test_the_real_openai_sdk_reads_a_stream_that_began_with_comments() -> None:
    import openai  # noqa: PLC0415  (slow to import)

    async with (
        FakeEngine() as engine,
        running_gateway(engine, timeouts=SOON) as slotgate,
        openai.AsyncOpenAI(
            base_url=f"{slotgate.base_url}/v1", api_key="none", max_retries=0
        ) as sdk,
    ):
        engine.script(chat_stream(3, headers_after_s=0.3), respond(400, REFUSAL, after_s=0.25))
        messages: Any = [{"role": "user", "content": "hello"}]
        got = await sdk.chat.completions.create(model="m", messages=messages, stream=True)
        words = [c.choices[0].delta.content async for c in got if c.choices]
        assert "".join(word for word in words if word) == " word0 word1 word2"
        with pytest.raises(openai.APIError, match="no such thing"):
            async for _ in await sdk.chat.completions.create(
                model="m", messages=messages, stream=True
            ):
                pass
