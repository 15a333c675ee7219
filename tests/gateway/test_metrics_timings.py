"""Known timings and tokens, driven through every wire that streams, are what the metrics say."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.fakes.behaviour import Behaviour
from tests.fakes.engine import FakeEngine
from tests.fakes.gateway import Running, running_gateway
from tests.fakes.running import in_loop, slack
from tests.fakes.wires import WIRES
from tests.gateway.line_talk import CHAT, body_for

TTFT_S = 0.2
ITL_S = 0.04
TOKENS = 6
ROUNDS = 2
LATE_S = 0.4  # what a busy machine may add; at TTFT and at every gap


@pytest.mark.parametrize("path", sorted(WIRES))
@in_loop
async def test_ttft_itl_and_tokens_are_right_on(path: str) -> None:
    kind = "ollama" if path.startswith("/api/") else "llama-server"
    behaviour = Behaviour(ttft_s=TTFT_S, itl_s=ITL_S, tokens=TOKENS)
    async with (
        FakeEngine(kind, behaviour=behaviour) as engine,
        running_gateway(engine, keys=["alice"]) as slotgate,
    ):
        for _ in range(ROUNDS):
            await _stream(slotgate, path)
        await _stream_not(slotgate, path)
        at = {"model": "m", "backend": "b1"}
        await _check_histogram(slotgate, "ttft_seconds", ROUNDS, TTFT_S, at)
        await _check_histogram(slotgate, "itl_seconds", ROUNDS * (TOKENS - 1), ITL_S, at)
        assert await slotgate.metric("request_seconds_count", **at) == ROUNDS + 1
        for window in ("1m", "5m"):
            for model in ("m", "all"):
                labels = {"model": model, "window": window}
                ttft = await slotgate.metric("ttft_p95_seconds", **labels)
                assert 0.95 * TTFT_S <= ttft <= TTFT_S + LATE_S * slack()
                itl = await slotgate.metric("itl_p95_seconds", **labels)
                assert 0.9 * ITL_S <= itl <= ITL_S + LATE_S * slack()
        await _check_tokens(slotgate, path, engine)
        assert await slotgate.metric("requests_total", outcome="served", model="m") == ROUNDS + 1
        assert await slotgate.metric("key_requests_total", key="alice") == ROUNDS + 1


async def _stream(slotgate: Running, path: str) -> None:
    fields: dict[str, Any] = {"stream": True, **_length(path)}
    if path in (CHAT, "/v1/completions"):
        fields["stream_options"] = {"include_usage": True}
    answer = await slotgate.client.post(path, json=body_for(path, **fields))
    assert answer.status_code == 200


async def _stream_not(slotgate: Running, path: str) -> None:
    answer = await slotgate.client.post(path, json=body_for(path, stream=False, **_length(path)))
    assert answer.status_code == 200


def _length(path: str) -> dict[str, int]:
    """This family must say how many tokens it wants."""
    return {"max_tokens": TOKENS} if path == "/v1/messages" else {}


async def _check_histogram(
    slotgate: Running, name: str, count: int, each_s: float, at: dict[str, str]
) -> None:
    assert await slotgate.metric(f"{name}_count", **at) == count
    mean = await slotgate.metric(f"{name}_sum", **at) / count
    assert 0.95 * each_s <= mean <= each_s + LATE_S * slack()
    below = {bound: n for bound, n in await _buckets(slotgate, name) if bound < 0.9 * each_s}
    assert not any(below.values()), "a sample is shorter than the engine took"


async def _buckets(slotgate: Running, name: str) -> list[tuple[float, float]]:
    return [
        (float(dict(labels)["le"]), value)
        for (found, labels), value in (await slotgate.metrics()).items()
        if found == f"slotgate_{name}_bucket"
    ]


async def _check_tokens(slotgate: Running, path: str, engine: FakeEngine) -> None:
    """As the engine reports them; where it does not, content events."""
    generated = await slotgate.metric("generated_tokens_total", model="m", backend="b1")
    assert generated == (ROUNDS + 1) * TOKENS
    assert await slotgate.metric("key_tokens_total", key="alice", kind="generated") == generated
    prompt = await slotgate.metric("prompt_tokens_total", model="m")
    assert prompt == engine.prompt_tokens + engine.cached_tokens  # its own count is of the computed
    cached = await slotgate.metric("cached_prompt_tokens_total", model="m")
    assert await slotgate.metric("key_tokens_total", key="alice", kind="cached") == cached
    assert cached == (0 if path.startswith("/api/") else engine.cached_tokens)


@in_loop
async def test_a_stream_without_usage_counts_its_events_as_an_estimate() -> None:
    async with (
        FakeEngine("vllm", behaviour=Behaviour(tokens=TOKENS)) as engine,
        running_gateway(engine) as slotgate,
    ):
        await slotgate.chat(stream=True)
        assert await slotgate.metric("generated_tokens_total") == TOKENS
        assert await slotgate.metric("prompt_tokens_total") == 0


@in_loop
async def test_predicted_and_cached_tokens_agree_for_a_chat_that_goes_on() -> None:
    """Only requests whose engine reports; the second turn finds the first one's prefix, in both counts."""
    first = [{"role": "user", "content": "word " * 400}]
    async with FakeEngine(behaviour=Behaviour(tokens=3)) as engine, running_gateway(engine) as gw:
        assert (await gw.chat(messages=first)).status_code == 200
        turn = [*first, {"role": "assistant", "content": "yes"}, {"role": "user", "content": "go"}]
        assert (await gw.chat(messages=turn)).status_code == 200
        predicted = await gw.metric("affinity_predicted_tokens_total", backend="b1")
        cached = await gw.metric("affinity_cached_tokens_total", backend="b1")
        assert cached > 300
        assert predicted == pytest.approx(cached, rel=0.15)
        assert await gw.metric("affinity_total", result="hit") == 1


@in_loop
async def test_what_waits_what_is_refused_and_why_is_counted() -> None:
    behaviour = Behaviour(ttft_s=0.3, tokens=1)
    async with (
        FakeEngine("vllm", behaviour=behaviour) as engine,
        running_gateway({"url": engine.url, "slots": 1}, admission={"queue": 2}) as slotgate,
    ):
        slotgate.models.add("m")
        chats = [slotgate.client.post(CHAT, json=body_for(CHAT)) for _ in range(6)]
        answers = await asyncio.gather(*chats)
        refused = sum(answer.status_code == 503 for answer in answers)
        assert refused == 3
        assert await slotgate.metric("shed_total", model="m", reason="queue_full") == refused
        assert await slotgate.metric("queue_limit", model="m") == 2
        assert await slotgate.metric("queue_wait_seconds_count", model="m") == 3
        wait = await slotgate.metric("queue_wait_seconds_sum", model="m")
        assert wait >= 0.95 * (0.3 + 0.6)
