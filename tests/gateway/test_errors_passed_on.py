"""An engine's own refusal reaches the client as it is, and says nothing against the engine. B042, B046, B059, B099."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pytest

from tests.fakes.connection import Script
from tests.fakes.engine import FakeEngine
from tests.fakes.gateway import running_gateway
from tests.fakes.running import eventually, in_loop
from tests.fakes.scripts import FIN, RST, drop, hang, raw, respond
from tests.gateway.line_talk import CHAT, asking, error_of

STATUSES = [400, 404, 408, 409, 413, 422, 429, 500, 501, 502, 503, 504, 529]
ODD: dict[str, Any] = {"error": {"message": "no 北", "zz": [1, None]}, "detail": {"x": 1.0}}
ODD_BYTES = json.dumps(ODD, ensure_ascii=False, indent=1).encode()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("status", STATUSES)
@in_loop
async def test_a_status_of_the_engine_is_passed_on_with_its_very_bytes(
    status: int, stream: bool
) -> None:
    async with FakeEngine() as engine, running_gateway(engine) as slotgate:
        engine.script(respond(status, ODD_BYTES, [("Retry-After", "2")]))
        answer = await slotgate.chat(stream=stream)
        assert answer.status_code == status
        assert answer.content == ODD_BYTES
        assert answer.headers["content-type"] == "application/json"
        assert answer.headers["retry-after"] == "2"
        assert answer.headers["x-slotgate-backend"] == "b1"
        assert await slotgate.outcomes() == {"upstream_refused": 1}
        assert await slotgate.metric("ttft_seconds_count") == 0


@pytest.mark.parametrize("status", [429, 503])
@in_loop
async def test_a_busy_engine_without_a_retry_after_gets_one(status: int) -> None:
    async with FakeEngine() as engine, running_gateway(engine) as slotgate:
        engine.script(respond(status, b'{"error":"busy"}'))
        answer = await slotgate.chat()
        assert answer.status_code == status
        assert answer.content == b'{"error":"busy"}'
        assert 1 <= int(answer.headers["retry-after"]) <= 60


@pytest.mark.parametrize("path", [CHAT, "/v1/messages"])
@pytest.mark.parametrize("status", [401, 403])
@in_loop
async def test_the_engine_refusing_our_key_is_the_operators_matter(status: int, path: str) -> None:
    async with FakeEngine() as engine, running_gateway(engine) as slotgate:
        secret = "sk-engine-secret-text"
        engine.script(respond(status, {"error": {"message": f"bad key {secret}"}}))
        async with await asking(slotgate, path) as client:
            answer = await client.response()
        assert answer.status == 502
        assert secret.encode() not in answer.body
        assert answer.header("www-authenticate") is None
        error = error_of(answer.json())
        assert error["type"] == ("api_error" if path == "/v1/messages" else "server_error")
        assert error.get("code") in {None, "upstream_auth"}


PAGES: dict[str, tuple[int, bytes, str]] = {
    "an HTML page": (502, b"<html><body>Bad gateway</body></html>", "text/html"),
    "an empty 500": (500, b"", "application/json"),
    "an empty 200": (200, b"", "application/json"),
    "a bare word": (503, b"Loading", "text/plain"),
    "no JSON": (400, b"not json", "application/json"),
    "five MiB": (400, b'{"error":"' + b"x" * (5 << 20) + b'"}', "application/json"),
}


@pytest.mark.parametrize("name", PAGES)
@in_loop
async def test_an_odd_error_page_passes_as_it_is_and_fills_no_log(name: str) -> None:
    status, body, kind = PAGES[name]

    async with FakeEngine() as engine, running_gateway(engine) as slotgate:
        engine.script(respond(status, body, content_type=kind))
        answer = await slotgate.chat()
        assert answer.status_code == status
        assert answer.content == body
        assert answer.headers["content-type"] == kind
        assert len(slotgate.log.getvalue()) < 20_000


BROKEN: dict[str, Script] = {
    "nothing and FIN": drop(FIN),
    "nothing and RST": drop(RST),
    "garbage": raw(b"garbage\r\n\r\n", FIN),
    "half a status line": raw(b"HTTP/1.1 20", FIN),
    "half a head": raw(b"HTTP/1.1 200 OK\r\nContent-Le", RST),
    "a head of 64 KiB": raw(b"HTTP/1.1 200 OK\r\nX: " + b"x" * 65_536 * 2 + b"\r\n\r\n", FIN),
    "a head without its body": raw(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n", RST),
    "half a chunk size": raw(
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nContent-Type: application/json\r\n\r\n1",
        FIN,
    ),
}


@pytest.mark.parametrize("name", BROKEN)
@in_loop
async def test_an_engine_that_breaks_before_its_first_byte_is_a_502_that_is_not_to_be_repeated(
    name: str,
) -> None:
    async with FakeEngine() as engine, running_gateway(engine) as slotgate:
        engine.script(BROKEN[name])
        answer = await slotgate.chat()
        assert answer.status_code == 502
        assert answer.json()["error"]["code"] == "upstream_failed"
        assert answer.json()["error"]["type"] == "server_error"
        assert answer.headers["x-should-retry"] == "false"
        assert engine.url.removeprefix("http://") not in answer.text
        assert await slotgate.metric("backend_errors_total") == 1
        assert await slotgate.outcomes() == {"upstream_failed": 1}
        assert len(engine.requests) == 1, "never repeated"


@pytest.mark.parametrize("status", [400, 404, 413, 422, 429, 500])
@in_loop
async def test_fifty_mistakes_of_clients_leave_the_engine_in_rotation(status: int) -> None:
    async with FakeEngine() as engine, running_gateway(engine) as slotgate:
        engine.script(respond(status, {"error": "yours"}), times=50)
        answers = [await slotgate.chat() for _ in range(50)]
        assert {answer.status_code for answer in answers} == {status}
        assert (await slotgate.chat()).status_code == 200
        assert (await slotgate.status())["backends"][0]["breaker"] == "closed"


@in_loop
async def test_clients_that_leave_keep_the_engine_in_rotation() -> None:
    async with FakeEngine(slots=8) as engine, running_gateway(engine) as slotgate:
        engine.script(hang(), times=24)
        for number in range(24):
            async with await asking(slotgate) as client:
                await engine.until_requests(number + 1)
                (client.rst if number % 2 else client.fin)()
            await eventually(lambda: _none_in_flight_or_settling(slotgate))
        assert (await slotgate.chat()).status_code == 200
        assert await slotgate.metric("backend_errors_total") == 0


async def _none_in_flight_or_settling(slotgate: Any) -> bool:
    return await slotgate.metric("in_flight") + await slotgate.metric("settling") < 8


@pytest.mark.parametrize("how", ["it breaks", "it is too slow"])
@in_loop
async def test_an_sdk_does_not_repeat_a_generation_that_may_have_run(how: str) -> None:
    async with (
        FakeEngine() as engine,
        running_gateway(engine, timeouts={"first_byte_s": 0.3}) as slotgate,
        openai.AsyncOpenAI(
            base_url=f"{slotgate.base_url}/v1", api_key="none", max_retries=2
        ) as sdk,
    ):
        engine.always(drop(RST, after_s=0.1) if how == "it breaks" else hang())
        messages: Any = [{"role": "user", "content": "hello"}]
        with pytest.raises(openai.InternalServerError):
            await sdk.chat.completions.create(model="m", messages=messages)
        await asyncio.sleep(0)
        assert engine.executions == 1
