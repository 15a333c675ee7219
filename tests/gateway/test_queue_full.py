"""More than slots and queue: exactly the rest is refused, at once, in every family's own words. B014 to B016, B097, B098."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import openai
import pytest

from gateway.core.errors import Family
from gateway.core.routes import ROUTES
from tests.fakes.behaviour import Behaviour
from tests.fakes.engine import FakeEngine
from tests.fakes.gateway import ADMIN, Running, running_gateway
from tests.fakes.raw_client import RawClient, RawResponse
from tests.fakes.running import eventually, in_loop, slack
from tests.fakes.scripts import hang
from tests.gateway.line_talk import CHAT, GENERATING, STREAMING, asking, body_for, error_of

NEVER = {
    "server_is_overloaded",
    "slow_down",
    "insufficient_quota",
    "usage_not_included",
    "context_length_exceeded",
}
PROMPT_S = 0.5  # for what the contract wants in 50 ms


@dataclass(frozen=True, slots=True)
class Full:
    """A gateway that can take no more, and its engine."""

    engine: FakeEngine
    slotgate: Running


@contextlib.asynccontextmanager
async def full(slots: int = 1, queue: int = 1, **config: Any) -> AsyncIterator[Full]:
    """An engine with all slots busy for as long as the block lasts, and a queue that is full."""
    async with (
        FakeEngine(slots=slots) as engine,
        running_gateway(engine, keys=["alice"], admission={"queue": queue}, **config) as slotgate,
        contextlib.AsyncExitStack() as stack,
    ):
        engine.always(hang(), path=CHAT)
        for number in range(slots + queue):
            await stack.enter_async_context(await asking(slotgate, stream=bool(number % 2)))
        await engine.until(lambda: engine.inside == slots)
        await eventually(lambda: _depth(slotgate, queue))
        yield Full(engine, slotgate)


async def _depth(slotgate: Running, depth: int) -> bool:
    return await slotgate.metric("queue_depth", model="m") == depth


async def _refused(slotgate: Running, path: str, **fields: Any) -> RawResponse:
    since = time.monotonic()
    async with await asking(slotgate, path, **fields) as client:
        response = await client.response()
    assert time.monotonic() - since < PROMPT_S * slack()
    return response


@pytest.mark.parametrize("kind", ["llama-server", "vllm", "openai"])
@in_loop
async def test_of_ten_at_once_with_two_slots_and_a_queue_of_two_exactly_four_are_served(
    kind: str,
) -> None:
    behaviour = Behaviour(ttft_s=0.3, tokens=5)
    async with (
        FakeEngine(kind, slots=2, behaviour=behaviour) as engine,
        running_gateway({"url": engine.url, "slots": 2}, admission={"queue": 2}) as slotgate,
    ):
        slotgate.engines = [engine]
        slotgate.sent = 10
        await eventually(lambda: slotgate.metric("backend_up"))
        answers = await asyncio.gather(
            *(slotgate.chat(stream=bool(number % 2)) for number in range(10))
        )
        statuses = sorted(answer.status_code for answer in answers)
        assert statuses == [200] * 4 + [503] * 6
        for answer in answers:
            if answer.status_code == 503:
                assert 1 <= int(answer.headers["retry-after"]) <= 60
        assert engine.peak == 2
        assert engine.executions == 4
        assert await slotgate.outcomes() == {"served": 4, "queue_full": 6}
        assert await slotgate.metric("shed_total", reason="queue_full") == 6


@pytest.mark.parametrize(
    ("path", "stream"),
    [*((path, False) for path in GENERATING), *((path, True) for path in STREAMING)],
)
@in_loop
async def test_a_full_queue_refuses_every_route_in_its_own_form(path: str, stream: bool) -> None:
    async with full() as at:
        response = await _refused(at.slotgate, path, stream=stream)
        anthropic = ROUTES[path].family is Family.ANTHROPIC
        assert response.status == (529 if anthropic else 503)
        assert response.header("content-type") == "application/json"
        assert 1 <= int(response.header("retry-after") or 0) <= 60
        assert response.header("x-should-retry") is None
        document = response.json()
        error = error_of(document)
        assert error["message"].startswith("Server overloaded")
        assert "Please try again in" in error["message"]
        if anthropic:
            assert document["type"] == "error"
            assert error["type"] == "overloaded_error"
            assert document["request_id"] == response.header("request-id")
        elif ROUTES[path].family is Family.OPENAI:
            assert error["type"] == "server_error"
            assert error["code"] == "gateway_queue_full"
            assert set(error) == {"message", "type", "param", "code"}
        assert error.get("code") not in NEVER
        assert await at.slotgate.metric("shed_total", reason="queue_full") == 1
        assert await at.slotgate.metric("backend_errors_total") == 0
        assert at.engine.executions == 1


@in_loop
async def test_a_refusal_comes_before_the_body_and_the_connection_lives_on() -> None:
    async with full() as at, await RawClient.connect(at.slotgate.port) as client:
        whole = b'{"model":"m","messages":[]}' + b" " * 100_000
        head = {**at.slotgate.header(), "Content-Length": str(len(whole))}
        await client.request("POST", "/v1/chat/completions", headers=head)
        refused = await client.response()
        assert refused.status == 503
        await client.send(whole)
        await client.request("GET", "/healthz")
        assert (await client.response()).status == 200


@in_loop
async def test_whatever_the_mix_never_more_than_the_slots_are_inside_and_the_queue_waits() -> None:
    """Routes, models of one backend, streams or not, new and kept connections: one limit for all."""
    deepest = 0.0
    behaviour = Behaviour(ttft_s=0.05, tokens=2)
    async with (
        FakeEngine("vllm", slots=2, models=["m", "n"], behaviour=behaviour) as engine,
        running_gateway(
            {"url": engine.url, "slots": 2},
            admission={"queue": 2},
            models={"alias": {"ids": ["n"]}},
        ) as slotgate,
    ):
        slotgate.models |= {"m", "n"}

        async def watch() -> None:
            nonlocal deepest
            while True:
                deepest = max(deepest, slotgate.gateway.dispatcher.dispatch.queued)
                await asyncio.sleep(0.001)

        async def one(number: int) -> int:
            path = GENERATING[number % len(GENERATING)]
            fields = {"model": ("m", "n", "alias")[number % 3]}
            if number % 2:
                response = await slotgate.client.post(path, json=body_for(path, **fields))
                return response.status_code
            async with await asking(slotgate, path, **fields) as client:
                return (await client.response()).status

        watching = asyncio.create_task(watch())
        for _ in range(2):
            statuses = await asyncio.gather(*(one(number) for number in range(50)))
            assert set(statuses) == {200, 503, 529}
        watching.cancel()
        assert engine.peak == 2
        assert deepest == 2


CHEAP = [
    ("GET", "/", 200),
    ("GET", "/healthz", 200),
    ("GET", "/health", 200),
    ("GET", "/readyz", 200),
    ("HEAD", "/readyz", 200),
    ("GET", "/v1/models", 200),
    ("GET", "/v1/models/m", 200),
    ("GET", "/metrics", 200),
    ("GET", "/status", 200),
    ("OPTIONS", "/v1/chat/completions", 204),
    ("GET", "/v1/chat/completions", 405),
    ("POST", "/nothing/here", 404),
]


@in_loop
async def test_what_needs_no_slot_is_answered_while_everything_is_full() -> None:
    async with full() as at:
        for method, path, status in CHEAP:
            since = time.monotonic()
            headers = at.slotgate.header(ADMIN)
            answer = await at.slotgate.client.request(method, path, headers=headers)
            assert answer.status_code == status, path
            assert time.monotonic() - since < 1 * slack(), path


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"content": "hello"}),
        ("/v1/messages/count_tokens", body_for("/v1/messages")),
        ("/apply-template", body_for("/v1/chat/completions")),
    ],
)
@in_loop
async def test_counting_tokens_takes_no_permit_and_never_queues(path: str, body: Any) -> None:
    async with full() as at:
        since = time.monotonic()
        asked = at.slotgate.client.post(path, json={"model": "m", **body})
        answer = await asyncio.wait_for(asked, 10 * slack())
        assert answer.status_code == 200, answer.text
        assert time.monotonic() - since < 2 * slack()
        assert await at.slotgate.metric("in_flight") == 1
        assert await at.slotgate.metric("shed_total") == 0


@in_loop
async def test_retry_after_is_a_whole_number_of_seconds_that_spreads() -> None:
    async with full() as at:
        exact: list[int] = []
        for _ in range(100):
            answer = await at.slotgate.chat()
            assert answer.status_code == 503
            assert answer.headers["retry-after"].isdigit()
            assert 1 <= int(answer.headers["retry-after"]) <= 60
            exact.append(int(answer.headers["retry-after-ms"]))
            assert exact[-1] <= int(answer.headers["retry-after"]) * 1000
        middle = sorted(exact)[50]
        assert min(exact) < 0.85 * middle
        assert max(exact) > 1.15 * middle


@in_loop
async def test_the_openai_sdk_rides_out_a_crowd_by_the_retry_after_it_is_given() -> None:
    """Twelve clients on two slots and no queue: with a second or two of retries, all are served."""
    async with (
        FakeEngine(slots=2, behaviour=Behaviour(ttft_s=0.02, tokens=1)) as engine,
        running_gateway(engine, admission={"queue": 2}) as slotgate,
        openai.AsyncOpenAI(
            base_url=f"{slotgate.base_url}/v1", api_key="none", max_retries=6
        ) as sdk,
    ):
        for _ in range(2):  # so that the pace of this engine is known
            await slotgate.chat()
        messages: Any = [{"role": "user", "content": "hello"}]
        calls = [sdk.chat.completions.create(model="m", messages=messages) for _ in range(12)]
        answers = await asyncio.gather(*calls)
        assert all(answer.choices for answer in answers)
        assert engine.peak <= 2
        assert (await slotgate.outcomes())["served"] == 14
