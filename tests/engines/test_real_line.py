"""Real llama.cpp servers behind the gateway: what is promised holds with a real engine's timing and framing."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import httpx2
import pytest

from gateway.cli.local_engine import MODEL_NAME, LocalEngine
from tests.engines.conftest import real_engine
from tests.fakes.gateway import Running, running_gateway
from tests.fakes.raw_client import RawClient
from tests.fakes.running import eventually, in_loop, slack

CHAT = "/v1/chat/completions"
LOOK_EVERY_S = (
    1.5  # a look at /slots is a task of the engine itself: looking more often would slow it
)
FREE_WITHIN_S = 5.0

pytestmark = pytest.mark.engine("llama-server")


def chat(content: str = "Tell a story.", **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": content}]
    return {"model": MODEL_NAME, "messages": messages, "max_tokens": 16} | fields


async def asking(slotgate: Running, **fields: Any) -> RawClient:
    """A client that has sent a chat and has read nothing."""
    client = await RawClient.connect(slotgate.port)
    headers = {"Content-Type": "application/json"}
    await client.request("POST", CHAT, headers=headers, body=json.dumps(chat(**fields)).encode())
    return client


def in_front_of(engine: LocalEngine, **config: Any) -> Any:
    """The gateway; a real model has other names than the scripted one."""
    return running_gateway(engine.url, admission={"queue": 2}, **config)


async def ready(slotgate: Running) -> None:
    slotgate.models.add(MODEL_NAME)
    await eventually(lambda: slotgate.metric("backend_up"))
    assert await slotgate.metric("slots") > 0


@in_loop
async def test_of_ten_chats_at_once_four_are_served_and_six_may_come_again_later() -> None:
    async with real_engine(slots=2) as engine, in_front_of(engine) as slotgate:
        await ready(slotgate)
        slotgate.sent = 10
        calls = [
            slotgate.client.post(CHAT, json=chat(f"Count to {n}.", stream=bool(n % 2)))
            for n in range(10)
        ]
        answers = await asyncio.gather(*calls)
        assert sorted(answer.status_code for answer in answers) == [200] * 4 + [503] * 6
        for answer in answers:
            if answer.status_code == 503:
                assert 1 <= int(answer.headers["retry-after"]) <= 60
                assert answer.json()["error"]["code"] == "gateway_queue_full"
            elif answer.headers["content-type"].startswith("text/event-stream"):
                assert answer.content.endswith(b"data: [DONE]\n\n")
            else:
                assert answer.json()["choices"]
        assert await slotgate.outcomes() == {"served": 4, "queue_full": 6}
        assert await slotgate.metric("ttft_seconds_count", model=MODEL_NAME) == 2


async def is_idle(engine: LocalEngine, http: httpx2.AsyncClient) -> bool:
    slots = (await http.get(f"{engine.url}/slots")).json()
    return not any(slot["is_processing"] for slot in slots)


async def frees_its_slot(engine: LocalEngine, slotgate: Running, left_at: float) -> None:
    """The engine says so itself, and the gateway's own gauges are zero."""
    await eventually(lambda: slotgate.metric("requests_total", outcome="client_gone"), within_s=1)
    async with httpx2.AsyncClient(trust_env=False) as http:
        while not await is_idle(engine, http):
            assert time.monotonic() - left_at < FREE_WITHIN_S * slack(), "it is still at work"
            await asyncio.sleep(LOOK_EVERY_S)
    assert await slotgate.metric("in_flight") == 0
    assert await slotgate.metric("backend_errors_total") == 0


async def counter(engine: LocalEngine, name: str) -> float:
    """A counter of the engine's own metrics."""
    async with httpx2.AsyncClient(trust_env=False) as http:
        text = (await http.get(f"{engine.url}/metrics")).text
    values = [line.split()[1] for line in text.splitlines() if line.startswith(f"llamacpp:{name} ")]
    return float(values[0])


async def is_at_work(slotgate: Running) -> bool:
    return await slotgate.metric("in_flight") > 0


@pytest.mark.parametrize("stream", [True, False])
@in_loop
async def test_a_client_that_leaves_in_prefill_frees_its_slot(stream: bool) -> None:
    """More than three thousand tokens in steps of 128: many seconds of work that is not done."""
    long = " ".join(f"word{number % 97}" for number in range(1100))
    options = {"slots": 2, "ctx": 8192, "batch": 128}
    async with real_engine(**options) as engine, in_front_of(engine) as slotgate:
        await ready(slotgate)
        async with await asking(slotgate, content=long, stream=stream):
            await eventually(lambda: is_at_work(slotgate))
            await asyncio.sleep(1)  # into the prefill: a second of it is what the test is about
        await frees_its_slot(engine, slotgate, time.monotonic())
        assert await counter(engine, "prompt_tokens_total") < 3000, "the prefill ran to its end"
        assert await slotgate.metric("ttft_seconds_count") == 0


@in_loop
async def test_a_client_that_leaves_in_the_stream_frees_its_slot() -> None:
    async with real_engine(slots=2, ctx=8192) as engine, in_front_of(engine) as slotgate:
        await ready(slotgate)
        fields = {"stream": True, "max_tokens": 3000, "ignore_eos": True}
        async with await asking(slotgate, **fields) as client:
            assert (await client.head()).status == 200
            for _ in range(4):
                assert await client.chunk()
        await frees_its_slot(engine, slotgate, time.monotonic())
        assert await counter(engine, "tokens_predicted_total") < 1500
        assert await slotgate.metric("ttft_seconds_count") == 1


@in_loop
async def test_a_client_that_leaves_while_it_waits_for_a_whole_answer_frees_its_slot() -> None:
    async with real_engine(slots=2, ctx=8192) as engine, in_front_of(engine) as slotgate:
        await ready(slotgate)
        async with await asking(slotgate, max_tokens=3000, ignore_eos=True):
            await eventually(lambda: is_at_work(slotgate))
            await asyncio.sleep(1)  # into the decode
        await frees_its_slot(engine, slotgate, time.monotonic())
        assert await counter(engine, "tokens_predicted_total") < 1500


@in_loop
async def test_a_client_that_leaves_the_queue_is_never_known_to_the_engine() -> None:
    async with real_engine(slots=1, ctx=4096) as engine, in_front_of(engine) as slotgate:
        await ready(slotgate)
        fields = {"stream": True, "max_tokens": 3000, "ignore_eos": True}
        async with await asking(slotgate, **fields) as first:
            await first.head()
            assert await first.chunk()
            async with await asking(slotgate):
                await eventually(lambda: slotgate.metric("queue_depth", model=MODEL_NAME))
            await eventually(lambda: _nobody_waits(slotgate), within_s=1)
        left_at = time.monotonic()
        await frees_its_slot(engine, slotgate, left_at)
        answer = await slotgate.client.post(CHAT, json=chat())
        assert answer.status_code == 200
        assert await slotgate.outcomes() == {"client_gone": 2, "served": 1}


async def _nobody_waits(slotgate: Running) -> bool:
    return await slotgate.metric("queue_depth", model=MODEL_NAME) == 0


@in_loop
async def test_a_prompt_beyond_the_context_is_the_engines_own_refusal() -> None:
    async with real_engine(slots=2, ctx=1024) as engine, in_front_of(engine) as slotgate:
        await ready(slotgate)
        answer = await slotgate.client.post(CHAT, json=chat("word " * 3000))
        assert answer.status_code == 400
        assert "context" in answer.json()["error"]["message"]
        assert (await slotgate.client.post(CHAT, json=chat())).status_code == 200
        assert (await slotgate.status())["backends"][0]["breaker"] == "closed"
