"""Law 4: another backend only while the request cannot have run. Law 7: busy is not broken. B056, B061."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence

import httpx2
import pytest

from tests.fakes.behaviour import Behaviour
from tests.fakes.connection import Script
from tests.fakes.engine import FakeEngine
from tests.fakes.gateway import Running, running_gateway
from tests.fakes.running import eventually, in_loop
from tests.fakes.scripts import RST, chat_stream, drop, hang, respond
from tests.gateway.line_talk import asking


@contextlib.asynccontextmanager
async def two(**config: object) -> AsyncIterator[tuple[FakeEngine, FakeEngine, Running]]:
    """Two engines of one model."""
    async with (
        FakeEngine(slots=4) as one,
        FakeEngine(slots=4) as other,
        running_gateway(one, other, **config) as slotgate,
    ):
        yield one, other, slotgate


async def conversation(slotgate: Running, number: int, *, stream: bool = False) -> httpx2.Response:
    """Chats with different beginnings spread over the backends."""
    messages = [{"role": "user", "content": f"{number} " * 40}]
    return await slotgate.chat(messages=messages, stream=stream)


async def until_met(
    engine: FakeEngine, slotgate: Running, *, stream: bool = False
) -> Sequence[httpx2.Response]:
    """Conversations until one of them has met this engine; their answers."""
    answers = []
    for number in range(60):
        answers.append(await conversation(slotgate, number, stream=stream))
        if engine.requests:
            return answers
    raise AssertionError("nothing ever went to this engine")


MAY_HAVE_RUN: dict[str, tuple[Script, int]] = {
    "breaks": (drop(RST), 502),
    "is silent for too long": (hang(), 504),
    "fails": (respond(500, {"error": "oh"}), 500),
    "breaks after one event": (chat_stream(1, whole=False, then=RST), 200),
}


@pytest.mark.parametrize("how", MAY_HAVE_RUN)
@in_loop
async def test_what_may_have_run_is_never_sent_again_when_the_engine(how: str) -> None:
    script, status = MAY_HAVE_RUN[how]

    async with two(timeouts={"first_byte_s": 0.3}) as (one, other, slotgate):
        one.always(script)
        *served, failed = await until_met(one, slotgate, stream=True)
        assert failed.status_code == status
        assert {answer.status_code for answer in served} <= {200}
        assert one.executions == 1
        assert other.executions == len(served)
        assert await slotgate.metric("retries_total") == 0
        if status == 200:
            assert b'"upstream_broke"' in failed.content


@pytest.mark.parametrize("status", [503, 429])
@in_loop
async def test_a_busy_engine_costs_one_more_attempt_and_no_trust(status: int) -> None:
    async with two() as (one, other, slotgate):
        one.always(respond(status, {"error": "busy"}))
        answers = await until_met(one, slotgate)
        assert {answer.status_code for answer in answers} == {200}
        assert {answer.headers["x-slotgate-backend"] for answer in answers} == {"b2"}
        assert other.executions == len(answers)
        assert await slotgate.metric("retries_total", backend="b1", reason="busy") == 1
        assert await slotgate.metric("backend_errors_total") == 0
        for one_of_them in (await slotgate.status())["backends"]:
            assert one_of_them["breaker"] == "closed"


@in_loop
async def test_when_all_are_busy_the_last_word_is_passed_on_and_each_was_asked_once() -> None:
    async with two() as (one, other, slotgate):
        for engine in (one, other):
            engine.always(respond(503, b"busy", [("Retry-After", "3")], content_type="text/plain"))
        answer = await slotgate.chat()
        assert (answer.status_code, answer.content) == (503, b"busy")
        assert answer.headers["retry-after"] == "3"
        assert (len(one.requests), len(other.requests)) == (1, 1)
        assert await slotgate.outcomes() == {"upstream_refused": 1}


@in_loop
async def test_a_dead_engine_is_met_once_and_its_requests_are_served_elsewhere() -> None:
    async with two() as (one, other, slotgate):
        await one.go_down()
        answers = await asyncio.gather(*(conversation(slotgate, number) for number in range(30)))
        assert {answer.status_code for answer in answers} == {200}
        assert {answer.headers["x-slotgate-backend"] for answer in answers} == {"b2"}
        assert other.executions == 30
        met = await slotgate.metric("backend_errors_total", backend="b1")
        for number in range(30, 60):
            assert (await conversation(slotgate, number)).status_code == 200
        assert await slotgate.metric("backend_errors_total", backend="b1") == met
        assert (await slotgate.client.get("/readyz")).status_code == 200


@in_loop
async def test_an_engine_that_comes_back_is_tried_with_one_request_and_then_trusted() -> None:
    behaviour = Behaviour(ttft_s=0.05)
    async with (
        FakeEngine(slots=4, behaviour=behaviour) as engine,
        running_gateway(engine, admission={"queue": 50}) as slotgate,
    ):
        await engine.go_down()
        refused = await slotgate.chat()
        assert refused.status_code in (502, 503)
        await engine.come_back()
        await eventually(lambda: slotgate.metric("backend_up"))
        answers = await asyncio.gather(*(slotgate.chat() for _ in range(20)))
        assert {answer.status_code for answer in answers} == {200}
        assert engine.peak <= 4
        assert (await slotgate.status())["backends"][0]["breaker"] == "closed"


@in_loop
async def test_a_trial_whose_client_leaves_does_not_block_the_way_back() -> None:
    async with (
        FakeEngine("vllm", slots=4) as engine,
        running_gateway(engine, admission={"queue": 50}) as slotgate,
    ):
        await engine.go_down()
        await slotgate.chat()
        await engine.come_back()
        engine.script(hang())
        await eventually(lambda: slotgate.metric("backend_up"))
        async with await asking(slotgate):
            await engine.until_requests(1)
        answers = await asyncio.gather(*(slotgate.chat() for _ in range(10)))
        assert {answer.status_code for answer in answers} == {200}


@in_loop
async def test_runs_of_5xx_take_an_engine_out_when_another_one_can_serve() -> None:
    async with two() as (one, _, slotgate):
        one.always(respond(502, {"error": "oh"}))
        statuses = [(await conversation(slotgate, number)).status_code for number in range(60)]
        assert statuses.count(502) == len(one.requests)
        assert 3 <= len(one.requests) <= 6
        assert set(statuses[-10:]) == {200}
