"""No key, no prompt and no answer is told to anybody it does not belong to, at any log level, however a request ends.

Law 9, with canaries: words that are nowhere else. Case B110.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest

from tests.fakes.behaviour import Behaviour
from tests.fakes.engine import FakeEngine
from tests.fakes.gateway import Running, running_gateway
from tests.fakes.raw_client import HangupError, RawClient
from tests.fakes.running import in_loop
from tests.fakes.scripts import RST, chat_stream, raw, respond

PROMPT, ANSWER, ENGINE_KEY = "canary-prompt-7f3a", "canary-answer-91bd", "canary-engine-key-c04e"
STRAY = "sk-sg-canary-of-another-house-5d21"
CHAT = "/v1/chat/completions"


def body(**fields: Any) -> bytes:
    messages = [{"role": "user", "content": PROMPT}]
    return json.dumps({"model": "m", "messages": messages, **fields}).encode()


@asynccontextmanager
async def canaries(level: str, form: str) -> AsyncIterator[tuple[Running, FakeEngine]]:
    behaviour = Behaviour(api_key=ENGINE_KEY)
    async with (
        FakeEngine(behaviour=behaviour) as engine,
        running_gateway(
            engine,
            keys=["ann"],
            auth={"key_in_path": True},
            log={"level": level, "format": form},
            canaries=[PROMPT, ANSWER, ENGINE_KEY, STRAY],
        ) as slotgate,
    ):
        yield slotgate, engine


@pytest.mark.parametrize("form", ["json", "console"])
@pytest.mark.parametrize("level", ["debug", "info", "error"])
@in_loop
async def test_no_ending_of_a_request_tells_a_secret(level: str, form: str) -> None:
    """`running_gateway` looks for the canaries in log, metrics and status when it ends."""
    async with canaries(level, form) as (slotgate, engine):
        echo = {"error": {"message": f"{ANSWER}: bad key {ENGINE_KEY} for {PROMPT}"}}
        for script in (
            respond(200, {"choices": [], "text": ANSWER}),
            respond(401, echo),  # to our key: the client must not see the engine's words
            respond(403, echo),
            respond(400, {"error": {"message": f"{ANSWER} {PROMPT}"}}),
            respond(500, ANSWER),
            chat_stream(tokens=3, whole=False, then=RST),
            raw(b"HTTP/1.1 200 OK\r\nX-Canary: " + ANSWER.encode() + b"\r\nbroken\r\n\r\n", RST),
            raw(ANSWER.encode(), RST),
            raw(RST),
        ):
            engine.script(script)
            with suppress(Exception):  # broken connections are among the endings
                answer = await slotgate.client.post(CHAT, content=body(stream=True))
                assert ENGINE_KEY not in answer.text
                assert ENGINE_KEY not in str(answer.headers)
        await _refusals(slotgate)
        await _keys(slotgate, engine)


async def _refusals(slotgate: Running) -> None:
    """Before any engine: broken bodies, unknown names, keys of others, and keys where none belong."""
    stray = {"Authorization": f"Bearer {STRAY}"}
    secret = slotgate.keys["ann"]
    for path, content, headers in (
        (CHAT, body()[:-3], {}),
        (CHAT, body(model=PROMPT), {}),
        (CHAT, body(model=["m", PROMPT]), {}),
        (CHAT, body(), stray),
        (CHAT, body(), {"x-api-key": STRAY, "Authorization": "Bearer"}),
        (f"{CHAT}?api_key={STRAY}&prompt={PROMPT}", body(), {}),
        (f"/k/{secret}{CHAT}", body(), {}),
        (f"/k/{STRAY}{CHAT}", body(), {}),
        (f"/k/{STRAY}/v1/nowhere", body(), {}),
        (f"//k/{STRAY}/v1/models/{STRAY[:4]}", body(), {}),
        (CHAT, body(), {"content-encoding": "gzip"}),
        (CHAT, body(), {"content-encoding": PROMPT}),
        (CHAT, body(), {"x-request-id": "x" * 200}),
        ("/v1/messages", body(), {}),
        ("/api/chat", body(), {}),
    ):
        answer = await slotgate.client.post(path, content=content, headers=headers)
        said = answer.text + str(answer.headers)
        for word in (STRAY, ENGINE_KEY, secret):
            assert word not in said, (path, said)
    for broken in (b"GET / HTTP/9\r\n", b"POST /k/%b/v1 HTTP/1.1\r\nX Y: %b\r\n\r\n"):
        async with await RawClient.connect(slotgate.port) as client:
            await client.send(broken.replace(b"%b", STRAY.encode()) + b"\r\n")
            with suppress(HangupError):
                assert STRAY.encode() not in (await client.response()).body


async def _keys(slotgate: Running, engine: FakeEngine) -> None:
    """The engine has its own key, and nobody else's."""
    for name, value in (
        ("Authorization", f"bEARER {slotgate.keys['ann']}"),
        ("x-api-key", slotgate.keys["ann"]),
        ("api-key", slotgate.keys["ann"]),
    ):
        headers = {"Authorization": "", "Cookie": f"session={STRAY}", name: value}
        answer = await slotgate.client.post(CHAT, content=body(), headers=headers)
        assert answer.status_code == 200, answer.text
    for request in engine.received:
        told = repr(request.head) + repr(bytes(request.body))
        assert STRAY not in told.replace(PROMPT, "")
        assert slotgate.keys["ann"] not in told
        assert request.head.get("authorization") == f"Bearer {ENGINE_KEY}"


@in_loop
async def test_what_a_client_writes_cannot_begin_a_line_of_the_log_or_a_series() -> None:
    async with (
        FakeEngine() as engine,
        running_gateway(engine, log={"format": "console"}) as slotgate,
    ):
        forged = '"} 1\nslotgate_forged_total 7\n09:00:00 error  forged'
        for model in (forged, "m\x1b[31m", "m\u2028forged"):
            await slotgate.client.post(CHAT, json={"model": model, "messages": []})
        for path in ("/v1/%0aforged", "/v1/%1b[2Jforged", "/v1/models/%0d%0aforged"):
            await slotgate.client.get(path, headers={"x-request-id": "a forged id"})
        assert "forged_total" not in await slotgate.metrics_text()
    lines = slotgate.log.getvalue().splitlines()
    assert [line for line in lines if line.lstrip().startswith(("forged", "09:00:00"))] == []
    assert "\x1b" not in slotgate.log.getvalue()
