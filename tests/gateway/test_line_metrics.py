"""What the metrics say of what people got: TTFT, gaps, waiting, and no series by clients' words. B102, B105, B106."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass

import pytest

from tests.fakes.behaviour import Behaviour
from tests.fakes.connection import Connection
from tests.fakes.engine import FakeEngine
from tests.fakes.gateway import Running, running_gateway
from tests.fakes.invariants import Series
from tests.fakes.running import eventually, in_loop, slack
from tests.fakes.scripts import drop, hang, respond
from tests.gateway.line_talk import CHAT, STREAMING, asking, body_for

BEFORE_S = 0.4  # how long the script says things that are no content
GAP_S = 0.05
GAPS = 6


@dataclass(frozen=True, slots=True)
class Said:
    """What one wire says: without content, with content, at the end."""

    empty: tuple[bytes, ...]
    content: bytes
    end: bytes


def _event(name: str, data: str) -> bytes:
    return f"event: {name}\ndata: {data}\n\n".encode()


def _chat(delta: str) -> bytes:
    return b'data: {"choices":[{"index":0,"delta":' + delta.encode() + b"}]}\n\n"


DONE = b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\ndata: [DONE]\n\n'
ROLE = (_chat('{"role":"assistant"}'), _chat('{"content":""}'))
STARTS = (
    _event("message_start", '{"type":"message_start","message":{"usage":{"input_tokens":3}}}'),
    _event("ping", '{"type": "ping"}'),
)
WIRES = {
    "chat text": (CHAT, Said(ROLE, _chat('{"content":"a"}'), DONE)),
    "chat reasoning": (CHAT, Said(ROLE, _chat('{"reasoning_content":"a"}'), DONE)),
    "chat tool call": (
        CHAT,
        Said(ROLE, _chat('{"tool_calls":[{"index":0,"function":{"arguments":"x"}}]}'), DONE),
    ),
    "responses": (
        "/v1/responses",
        Said(
            (_event("response.created", '{"type":"response.created","response":{}}'),),
            _event(
                "response.output_text.delta", '{"type":"response.output_text.delta","delta":"a"}'
            ),
            _event("response.completed", '{"type":"response.completed","response":{}}'),
        ),
    ),
    "messages": (
        "/v1/messages",
        Said(
            STARTS,
            _event(
                "content_block_delta",
                '{"type":"content_block_delta","index":0,"delta":{"type":"text_delta","text":"a"}}',
            ),
            _event("message_stop", '{"type":"message_stop"}'),
        ),
    ),
}


@pytest.mark.parametrize("name", WIRES)
@in_loop
async def test_ttft_runs_to_the_first_content_and_gaps_between_contents(name: str) -> None:
    """Headers, comments, roles and empty text are none. A read with three events is three gaps of a third."""
    path, said = WIRES[name]

    async def script(connection: Connection) -> None:
        await connection.begin()
        await connection.body(b":\n\n", BEFORE_S / 2)
        for one in said.empty:
            await connection.body(one, BEFORE_S / 2 / len(said.empty))
        for _ in range(GAPS + 1):
            await connection.body(said.content, GAP_S)
        await connection.pause(2 * GAP_S)
        await connection.body(said.content * 3)
        await connection.pause(0.2)
        await connection.body(said.end)
        await connection.end()

    async with FakeEngine() as engine, running_gateway(engine) as slotgate:
        engine.script(script)
        async with await asking(slotgate, path, stream=True) as client:
            assert (await client.response()).ended == "whole"
        at = {"model": "m", "backend": "b1"}
        assert await slotgate.metric("ttft_seconds_count", **at) == 1
        ttft = await slotgate.metric("ttft_seconds_sum", **at)
        assert BEFORE_S * 0.95 <= ttft <= BEFORE_S + 0.5 * slack()
        assert await slotgate.metric("itl_seconds_count", **at) == GAPS + 3
        total = await slotgate.metric("itl_seconds_sum", **at)
        least = GAPS * GAP_S + 3 * GAP_S
        assert least * 0.95 <= total <= least + 0.5 * slack()
        for what in ("ttft", "itl"):
            for model in ("m", "all"):
                labels = {"model": model, "window": "1m"}
                assert await slotgate.metric(f"{what}_p95_seconds", **labels) > 0


@in_loop
async def test_answers_without_a_stream_errors_and_leavers_add_no_ttft() -> None:
    async with FakeEngine(slots=4) as engine, running_gateway(engine) as slotgate:
        # the drop comes first: on a connection that was used before it would be a stale one, and tried again
        engine.script(drop(), respond(500, {"error": "oh"}), respond(400, {"error": "no"}))
        for _ in range(3):
            await slotgate.chat(stream=True)
        await slotgate.chat()
        engine.script(hang(headers=True))
        async with await asking(slotgate, stream=True) as client:
            await client.head()
        await eventually(lambda: slotgate.metric("requests_total", outcome="client_gone"))
        assert await slotgate.metric("ttft_seconds_count") == 0
        assert await slotgate.metric("itl_seconds_count") == 0
        assert await slotgate.metric("request_seconds_count") == 1


@in_loop
async def test_ttft_includes_the_wait_in_line_which_has_a_histogram_of_its_own() -> None:
    service_s = 0.2
    behaviour = Behaviour(ttft_s=service_s, tokens=1)
    async with (
        FakeEngine("vllm", slots=1, behaviour=behaviour) as engine,
        running_gateway({"url": engine.url, "slots": 1}, admission={"queue": 4}) as slotgate,
    ):
        slotgate.models.add("m")
        answers = await asyncio.gather(
            *(slotgate.client.post(CHAT, json=body_for(CHAT, stream=True)) for _ in range(5))
        )
        waits = sorted(int(answer.headers["x-slotgate-queue-ms"]) for answer in answers)
        for number, wait in enumerate(waits):
            assert wait >= 0.9 * 1000 * service_s * number
        waited = await slotgate.metric("queue_wait_seconds_sum", model="m")
        assert waited == pytest.approx(sum(waits) / 1000, abs=0.05)
        ttft = await slotgate.metric("ttft_seconds_sum", model="m")
        assert ttft >= waited + 5 * service_s * 0.95
        assert _last_bound(await slotgate.metrics(), "slotgate_ttft_seconds_bucket") >= 600
        assert _last_bound(await slotgate.metrics(), "slotgate_itl_seconds_bucket") >= 10


def _last_bound(series: Series, name: str) -> float:
    bounds = [float(dict(labels)["le"]) for found, labels in series if found == name]
    return max((bound for bound in bounds if bound != float("inf")), default=0)


@in_loop
async def test_names_that_clients_make_up_never_become_series() -> None:
    rng = random.Random(7)
    async with (
        FakeEngine() as engine,
        running_gateway(engine, keys=["alice"]) as slotgate,
    ):
        for path in STREAMING:
            await _ask_for(slotgate, path, "m")
            await _ask_for(slotgate, path, "no-such-model")
        before = await slotgate.metrics()
        for number in range(300):
            name = f"model-{rng.randrange(10**12)}"
            await _ask_for(slotgate, STREAMING[number % len(STREAMING)], name)
        after = await slotgate.metrics()
        assert set(after) == set(before)
        unknown = await slotgate.metric("requests_total", model="other", outcome="unknown_model")
        assert unknown == 300 + len(STREAMING)
        assert engine.executions == len(STREAMING)


async def _ask_for(slotgate: Running, path: str, model: str) -> None:
    await slotgate.client.post(path, json=body_for(path, model=model))
