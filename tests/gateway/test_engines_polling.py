"""Looking does no harm: what engines meet of the gateway's questions while it works. Law 6; B058, B065, B066, B067."""

from __future__ import annotations

import asyncio
import time
from itertools import pairwise

import pytest

from tests.fakes.behaviour import Behaviour
from tests.fakes.connection import Script
from tests.fakes.engine import FakeEngine
from tests.fakes.gateway import Running, running_gateway
from tests.fakes.running import eventually, in_loop, slack
from tests.fakes.scripts import chat_stream, hang, respond
from tests.gateway.line_talk import CHAT, asking

PAIR = ("/slots", "/metrics")
HUNDRED = "word " * 100


def times(engine: FakeEngine, path: str) -> list[float]:
    return [request.head_at for request in engine.probes if request.path == path]


@in_loop
async def test_an_idle_engine_falls_asleep_on_time_and_is_left_alone() -> None:
    """B066: the questions that wake it are asked only while there is traffic, and shortly after."""
    async with (
        FakeEngine(behaviour=Behaviour(sleep_idle_s=3.0)) as engine,
        running_gateway(engine) as slotgate,
    ):
        assert (await slotgate.chat()).status_code == 200
        await eventually(lambda: engine.asleep, within_s=14)
        health = engine.calls["/health"]
        await eventually(lambda: engine.calls["/health"] >= health + 2, within_s=20)
        assert engine.asleep
        assert engine.wakes == 0
        state = (await slotgate.status())["backends"][0]["state"]
        assert state == "sleeping"
        assert (await slotgate.client.get("/readyz")).status_code == 200
        assert (await slotgate.chat()).status_code == 200, "a sleeper takes work"


@in_loop
async def test_a_router_loads_only_the_model_that_somebody_asked_for() -> None:
    """B066, the variant with several models."""
    async with (
        FakeEngine("llama-router", models=["a", "b", "c"]) as engine,
        running_gateway(engine) as slotgate,
    ):
        assert (await slotgate.chat(model="a")).status_code == 200
        rounds = engine.calls["/health"]
        await eventually(lambda: engine.calls["/health"] >= rounds + 2, within_s=20)
        assert engine.loads == {"a": 1}
        asked = [request.query for request in engine.probes if "model=" in request.query]
        assert asked, "the loaded one was weighed while it had traffic"
        assert all("model=a&autoload=false" in query for query in asked)


@in_loop
async def test_under_traffic_and_with_many_who_leave_one_pair_of_looks_comes_in_two_seconds() -> (
    None
):
    async with (
        FakeEngine(slots=4, behaviour=Behaviour(itl_s=0.05, tokens=200)) as engine,
        running_gateway(engine, admission={"queue": 20}) as slotgate,
    ):
        until = time.monotonic() + 7
        while time.monotonic() < until:
            client = await asking(slotgate, stream=True)
            await asyncio.sleep(0.1)
            client.rst()
        looks = [request for request in engine.probes if request.path in PAIR]
        slots, metrics = times(engine, "/slots"), times(engine, "/metrics")
        assert len(slots) >= 2
        assert [request.path for request in looks[:4]] == list(PAIR) * 2, "back to back"
        assert all(later - earlier >= 2.0 for earlier, later in pairwise(slots))
        assert all(later - earlier >= 1.9 for earlier, later in pairwise(metrics))


@in_loop
async def test_a_slot_that_settles_is_lent_again_when_a_look_shows_it_idle() -> None:
    """A prompt that would take a minute was cancelled, and the engine noticed at once."""
    slow = Behaviour(prefill_tokens_per_s=2.0)
    async with (
        FakeEngine(slots=1, behaviour=slow) as engine,
        running_gateway(engine) as slotgate,
    ):
        slotgate.gateway.dispatcher.dispatch.habits.prefill_rate.learn(2.0)
        messages = [{"role": "user", "content": HUNDRED}]
        client = await asking(slotgate, messages=messages)
        await engine.until_requests(1)
        client.rst()
        await eventually(lambda: slotgate.metric("settling"))
        engine.behaviour.prefill_tokens_per_s = 0
        began = time.monotonic()
        assert (await slotgate.chat()).status_code == 200
        assert time.monotonic() - began < 10 * slack(), "long before the minute is over"
        assert len(times(engine, "/slots")) >= 1


@in_loop
async def test_health_pages_that_hang_hold_up_neither_streams_nor_answers() -> None:
    """B058: five engines are deaf; a sixth one streams."""
    deaf = [FakeEngine(models=["other"]) for _ in range(5)]
    for one in deaf:
        one.always(hang(), path="*")
    async with (
        FakeEngine() as engine,
        deaf[0], deaf[1], deaf[2], deaf[3], deaf[4],
        running_gateway(engine, *deaf, wait=False) as slotgate,
    ):  # fmt: skip
        await eventually(lambda: slotgate.metric("backend_up"))
        engine.always(chat_stream(80, every_s=0.05))
        body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": True}
        gaps, answers = [], []
        async with slotgate.client.stream("POST", CHAT, json=body) as answer:
            last = time.monotonic()
            async for _ in answer.aiter_raw():
                now = time.monotonic()
                gaps.append(now - last)
                if len(gaps) % 10 == 0:
                    assert (await slotgate.client.get("/healthz")).status_code == 200
                    answers.append(time.monotonic() - now)
                last = time.monotonic()
        assert max(gaps[1:]) < 0.05 + 1.0 * slack()
        assert sorted(answers)[len(answers) // 2] < 0.5 * slack()
        for one in deaf:
            open_probes = [
                request
                for request in one.probes
                if request.gone_at is None and not request.answered
            ]
            assert len(open_probes) <= 1, "one question at a time"


DEGRADED: dict[str, tuple[str, Behaviour]] = {
    "llama-server without metrics": ("llama-server", Behaviour(metrics=False)),
    "llama-server without slots and metrics": (
        "llama-server",
        Behaviour(metrics=False, slots_endpoint=False),
    ),
    "vllm without metrics": ("vllm", Behaviour(metrics=False)),
    "a server that says nothing": ("openai", Behaviour()),
}


@pytest.mark.parametrize("name", DEGRADED)
@in_loop
async def test_what_an_engine_does_not_say_is_missing_and_not_zero_and_is_told_once(
    name: str,
) -> None:
    """B067."""
    kind, behaviour = DEGRADED[name]
    path = "/v1/models" if kind == "openai" else "/health"
    async with (
        FakeEngine(kind, slots=4, behaviour=behaviour) as engine,
        running_gateway(engine) as slotgate,
    ):
        for _ in range(2):
            assert (await slotgate.chat()).status_code == 200
            rounds = engine.calls[path]
            await eventually(lambda: engine.calls[path] > rounds)  # noqa: B023  (awaited at once)
        text = await slotgate.metrics_text()
        assert 'slotgate_backend_waiting{backend="b1"}' not in text
        warnings = [line for line in slotgate.log.getvalue().splitlines() if '"warning":' in line]
        assert len(warnings) == len(set(warnings))
        kinds = [line.partition('"warning":')[2] for line in warnings]
        assert len(kinds) == len(set(kinds)), "one for each kind"
        assert await slotgate.outcomes() == {"served": 2}


ODD_FIGURES: dict[str, Script] = {
    "hang": hang(),
    "fail": respond(500, "oh"),
    "are HTML": respond(200, "<html>no</html>", content_type="text/html"),
    "are cut off": respond(200, "llamacpp:requests_proc", content_type="text/plain"),
}


@pytest.mark.parametrize("figures", ODD_FIGURES)
@in_loop
async def test_figures_that_go_bad_on_all_engines_at_once_refuse_nobody(figures: str) -> None:
    """B065: our own count decides; the age of what is known grows, and is told."""
    async with (
        FakeEngine(slots=2, behaviour=Behaviour(ttft_s=0.05)) as one,
        FakeEngine(slots=2, behaviour=Behaviour(ttft_s=0.05)) as other,
        running_gateway(one, other, admission={"queue": 8}) as slotgate,
    ):
        for engine in (one, other):
            for path in PAIR:
                engine.always(ODD_FIGURES[figures], path=path)
        until = time.monotonic() + 4
        while time.monotonic() < until:
            answers = await asyncio.gather(*(slotgate.chat() for _ in range(8)))
            assert {answer.status_code for answer in answers} == {200}
        assert await slotgate.metric("backend_up") == 2
        assert one.peak <= 2
        assert other.peak <= 2
        assert set(await slotgate.outcomes()) == {"served"}


async def _age(slotgate: Running) -> float:
    return await slotgate.metric("backend_report_age_seconds", backend="b1")


@in_loop
async def test_a_silent_engine_that_streams_is_busy_and_not_dead_and_its_report_ages() -> None:
    async with FakeEngine(slots=2) as engine, running_gateway(engine) as slotgate:
        engine.always(chat_stream(400, every_s=0.02), path=CHAT)
        client = await asking(slotgate, stream=True)
        await client.head()
        engine.always(hang(), path="/health")
        reading = asyncio.create_task(client.until(b"[DONE]"))
        health = engine.calls["/health"]
        await eventually(lambda: engine.calls["/health"] > health, within_s=20)
        await asyncio.sleep(0.5)
        assert await slotgate.metric("backend_up") == 1
        await eventually(lambda: _older_than(slotgate, 3), within_s=20)
        assert await slotgate.metric("backend_up") == 1
        await reading
        client.close()


async def _older_than(slotgate: Running, seconds: float) -> bool:
    return await _age(slotgate) > seconds
