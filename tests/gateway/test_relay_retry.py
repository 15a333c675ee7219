"""What is tried again, where, and how often, through the whole gateway. Cases B048, B050, B056; SGLang's queue."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.fakes.connection import Connection
from tests.fakes.engine import FakeEngine
from tests.fakes.gateway import Running, running_gateway
from tests.fakes.invariants import bytes_are_unchanged
from tests.fakes.running import eventually, in_loop, slack
from tests.fakes.scripts import chat_stream, events_of, hang, respond, stream
from tests.gateway.line_talk import CHAT, asking

FULL = {
    "object": "error",
    "message": "The request queue is full.",
    "type": "SERVICE_UNAVAILABLE",
    "param": None,
    "code": 503,
}
FULL_EVENT = (
    b'data: {"error": {"object": "error", "message": "The request queue is full.", '
    b'"type": "SERVICE_UNAVAILABLE", "param": null, "code": 503}}\n\n'
)


async def _is_loading(slotgate: Running, number: int = 0) -> bool:
    return (await slotgate.status())["backends"][number]["state"] == "loading"


@in_loop
async def test_a_lone_engine_that_loads_its_model_is_waited_for() -> None:
    async with FakeEngine() as engine, running_gateway(engine) as slotgate:
        engine.behaviour.loading = True
        call = asyncio.create_task(slotgate.chat())
        await eventually(lambda: _is_loading(slotgate))
        await eventually(lambda: slotgate.metric("queue_depth"))
        assert await slotgate.metric("backend_errors_total") == 0
        engine.behaviour.loading = False
        answer = await call
        assert answer.status_code == 200
        assert (await slotgate.status())["backends"][0]["breaker"] == "closed"
        assert engine.executions == 1
        slotgate.sent = 1


@in_loop
async def test_an_engine_that_loads_for_too_long_costs_one_queue_timeout() -> None:
    async with (
        FakeEngine() as engine,
        running_gateway(engine, admission={"max_wait_s": 0.5}) as slotgate,
    ):
        engine.behaviour.loading = True
        answer = await slotgate.chat()
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "gateway_queue_timeout"
        assert 1 <= int(answer.headers["retry-after"]) <= 60
        assert await slotgate.outcomes() == {"queue_timeout": 1}


@in_loop
async def test_while_one_engine_loads_the_other_one_serves() -> None:
    async with (
        FakeEngine() as loading,
        FakeEngine() as other,
        running_gateway(loading, other) as slotgate,
    ):
        loading.behaviour.loading = True
        began = time.monotonic()
        answers = await asyncio.gather(*(slotgate.chat() for _ in range(4)))
        assert [answer.status_code for answer in answers] == [200] * 4
        assert time.monotonic() - began < 5 * slack()
        assert other.executions == 4
        assert await slotgate.metric("backend_errors_total") == 0


def _beside(engine: FakeEngine) -> dict[str, Any]:
    return {"url": engine.url, "engine": "sglang", "slots": 2, "models": ["m"]}


@in_loop
async def test_a_queue_that_is_full_inside_a_200_is_tried_elsewhere() -> None:
    async with (
        FakeEngine("sglang") as full,
        FakeEngine("sglang") as other,
        running_gateway(_beside(full), _beside(other), check=False) as slotgate,
    ):
        for engine in (full, other):
            engine.script(stream([FULL_EVENT, b"data: [DONE]\n\n"]))
        for _ in range(2):
            async with await asking(slotgate, stream=True) as client:
                answer = await client.response()
            assert answer.status in (200, 503)
            if answer.status == 200:
                assert b"queue is full" not in answer.body
        assert await slotgate.metric("retries_total", reason="busy") >= 1
        assert await slotgate.metric("backend_errors_total") == 0


@in_loop
async def test_a_queue_that_is_full_inside_a_200_is_passed_on_as_the_503_that_it_is() -> None:
    async with (
        FakeEngine("sglang") as full,
        running_gateway(_beside(full), check=False) as slotgate,
    ):
        full.script(stream([FULL_EVENT, b"data: [DONE]\n\n"], first_s=0.1))
        async with await asking(slotgate, stream=True) as client:
            answer = await client.response()
        assert answer.status == 503
        assert answer.json() == {"error": FULL}
        assert 1 <= int(answer.header("retry-after") or 0) <= 60
        assert await slotgate.outcomes() == {"upstream_refused": 1}


@pytest.mark.parametrize("kind", ["sglang", "vllm"])
@in_loop
async def test_an_error_later_in_the_stream_passes_as_it_is_also_with_done_behind_it(
    kind: str,
) -> None:
    """vLLM tells an error and then says [DONE]: the bytes pass, and nobody calls it served."""
    async with FakeEngine(kind) as engine, running_gateway(engine) as slotgate:
        pieces = [*events_of(CHAT, 2)[:-1], FULL_EVENT, b"data: [DONE]\n\n"]
        engine.script(stream(pieces, every_s=0.01))
        async with await asking(slotgate, stream=True) as client:
            answer = await client.response()
        assert (answer.status, answer.ended) == (200, "whole")
        bytes_are_unchanged(answer.body, bytes(engine.requests[0].sent))
        assert await slotgate.outcomes() == {"upstream_broke": 1}


@contextlib.asynccontextmanager
async def _one_request_a_connection(how: str) -> AsyncIterator[tuple[str, list[bytes]]]:
    """An engine that closes when a second request begins on a connection, without having read it."""
    ran: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            head = await reader.readuntil(b"\r\n\r\n")
            if head.startswith(b"POST"):
                await reader.readuntil(b"}]}")
                ran.append(head)
            body = b'{"data":[{"id":"m"}],"choices":[]}'
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n")
            writer.write(b"Content-Length: %d\r\n\r\n%b" % (len(body), body))
            await reader.readexactly(1)
        if how == "rst":
            writer.transport.abort()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", ran


@pytest.mark.parametrize("how", ["fin", "rst"])
@in_loop
async def test_a_stale_connection_costs_a_retry_that_the_client_never_sees(how: str) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}
    async with (
        _one_request_a_connection(how) as (url, ran),
        running_gateway(
            {"url": url, "models": ["m"], "slots": 2, "engine": "openai"}, check=False
        ) as slotgate,
    ):
        for _ in range(10):
            answer = await slotgate.client.post(CHAT, json=body)
            assert answer.status_code == 200
        assert len(ran) == 10
        assert await slotgate.metric("retries_total", reason="stale") >= 5
        assert await slotgate.metric("backend_errors_total") == 0
        assert await slotgate.outcomes() == {"served": 10}


@in_loop
async def test_requests_at_the_very_time_of_the_engines_idle_close_are_all_served_once() -> None:
    async with FakeEngine() as engine, running_gateway(engine) as slotgate:
        engine.behaviour.idle_close_s = 0.05
        for number in range(60):
            assert (await slotgate.chat()).status_code == 200
            await asyncio.sleep(0.048 + 0.0001 * (number % 40))
        assert engine.executions == 60
        slotgate.sent = 60


@in_loop
async def test_all_attempts_of_a_request_share_one_deadline() -> None:
    """Busy here, then a wait for the other one, which is full: the whole of it is max_wait_s."""
    async with (
        FakeEngine(slots=1) as busy,
        FakeEngine(slots=1) as held,
        running_gateway(
            busy, held, admission={"queue": 5, "max_wait_s": 0.6}, routing={"affinity": False}
        ) as slotgate,
    ):
        for engine in (busy, held):
            engine.always(hang())
        async with await asking(slotgate), await asking(slotgate):
            await eventually(lambda: busy.inside + held.inside == 2)
            busy.normal()
            busy.always(respond(503, {"error": "busy"}))
            busy.requests[0].connection.rst()  # the first one breaks and leaves its slot
            began = time.monotonic()
            async with await asking(slotgate) as client:
                answer = await client.response()
            assert answer.status == 503
            assert answer.json()["error"]["code"] == "gateway_queue_timeout"
            assert 0.5 <= time.monotonic() - began < 6 * slack()


@in_loop
async def test_a_retry_goes_before_those_who_wait_already() -> None:
    async with (
        FakeEngine(slots=1) as busy,
        FakeEngine(slots=1) as other,
        running_gateway(busy, other, admission={"queue": 5}) as slotgate,
    ):
        gate = asyncio.Event()

        async def held(connection: Connection) -> None:
            await gate.wait()
            await chat_stream(1)(connection)

        busy.always(respond(503, {"error": "busy"}, after_s=0.3))
        other.script(held)
        other.always(chat_stream(1))
        calls = []
        for number in range(2):  # one is held by `other`, one meets `busy`
            calls.append(asyncio.create_task(slotgate.chat(seed=number, stream=True)))
            await eventually(lambda: busy.inside + other.inside == len(calls))
        first = busy.requests[0].json()["seed"]
        calls.append(asyncio.create_task(slotgate.chat(seed=99, stream=True)))
        await eventually(lambda: slotgate.metric("queue_depth"))
        await eventually(lambda: slotgate.metric("retries_total", reason="busy"))
        gate.set()
        answers = await asyncio.gather(*calls)
        assert [answer.status_code for answer in answers[:2]] == [200, 200]
        order = [request.json()["seed"] for request in other.requests]
        assert order.index(first) < order.index(99)
