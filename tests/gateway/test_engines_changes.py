"""Engines that become somebody else while the gateway looks on: restarted, loading, with other models. B048, B061."""

from __future__ import annotations

import asyncio

from tests.fakes.behaviour import Behaviour
from tests.fakes.engine import FakeEngine
from tests.fakes.gateway import Running, running_gateway
from tests.fakes.running import eventually, in_loop


async def ids(slotgate: Running) -> list[str]:
    answer = await slotgate.client.get("/v1/models")
    return [entry["id"] for entry in answer.json()["data"]]


async def state(slotgate: Running, number: int = 0) -> str:
    return str((await slotgate.status())["backends"][number]["state"])


async def _is(slotgate: Running, wanted: str) -> bool:
    return await state(slotgate) == wanted


@in_loop
async def test_an_engine_that_comes_back_with_another_model_is_listed_anew_and_told_in_the_log() -> (
    None
):
    async with FakeEngine("vllm", models=["old"]) as engine, running_gateway(engine) as slotgate:
        slotgate.models |= {"old", "new"}
        assert await ids(slotgate) == ["old"]
        await engine.go_down()
        await eventually(lambda: _is(slotgate, "down"), within_s=15)
        engine.models = ["new"]
        await engine.come_back()
        await eventually(lambda: _is(slotgate, "up"), within_s=15)
        assert await ids(slotgate) == ["new"]
        assert (await slotgate.chat(model="new")).status_code == 200
        assert (await slotgate.chat(model="old")).status_code == 404
        told = '"models_new":["new"],"models_gone":["old"]'
        await eventually(lambda: told in slotgate.log.getvalue())


@in_loop
async def test_the_models_of_an_engine_that_stays_down_are_still_known_and_a_503() -> None:
    async with (
        FakeEngine("vllm", models=["one"]) as engine,
        FakeEngine("vllm", models=["other"]) as other,
        running_gateway(engine, other) as slotgate,
    ):
        await engine.go_down()
        await eventually(lambda: _is(slotgate, "down"), within_s=15)
        probes = slotgate.gateway.backends.known["b1"].reported_at
        await eventually(lambda: _later(slotgate, (probes or 0) + 2.5), within_s=15)
        answer = await slotgate.chat(model="one")
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_backend")
        assert await ids(slotgate) == ["one", "other"]


def _later(slotgate: Running, moment: float) -> bool:
    """Have more looks ended since?"""
    return (slotgate.gateway.backends.known["b1"].reported_at or 0) > moment


@in_loop
async def test_a_model_that_is_added_while_the_engine_runs_is_found() -> None:
    async with FakeEngine("ollama", models=["a"]) as engine, running_gateway(engine) as slotgate:
        slotgate.models |= {"a", "b"}
        engine.models = ["a", "b"]

        async def both() -> bool:
            return await ids(slotgate) == ["a", "b"]

        await eventually(both, within_s=25)
        assert (await slotgate.chat(model="b")).status_code == 200


@in_loop
async def test_a_loading_engine_is_loading_and_not_down_and_serves_soon_after() -> None:
    async with (
        FakeEngine(behaviour=Behaviour(loading=True)) as engine,
        running_gateway(engine, wait=False) as slotgate,
    ):
        await eventually(lambda: _is(slotgate, "loading"))
        assert (await slotgate.client.get("/readyz")).status_code == 503
        engine.behaviour.loading = False
        await eventually(lambda: _is(slotgate, "up"), within_s=10)
        assert (await slotgate.chat()).status_code == 200
        assert '"level":"warning","event":"backend"' not in slotgate.log.getvalue()


@in_loop
async def test_a_lone_engine_that_reloads_keeps_its_line_and_serves_it() -> None:
    """Requests that meet `Loading model` wait inside their budget, and run once."""
    async with FakeEngine(slots=2) as engine, running_gateway(engine) as slotgate:
        engine.behaviour.loading = True
        asked = [asyncio.create_task(slotgate.chat()) for _ in range(3)]
        await eventually(lambda: _is(slotgate, "loading"), within_s=10)
        await asyncio.sleep(0.5)
        assert not any(task.done() for task in asked)
        engine.behaviour.loading = False
        answers = await asyncio.gather(*asked)
        assert [answer.status_code for answer in answers] == [200] * 3
        assert engine.executions == 3


@in_loop
async def test_an_engine_whose_slots_are_all_in_use_is_busy_and_the_gateway_is_ready() -> None:
    async with (
        FakeEngine(slots=1, behaviour=Behaviour(ttft_s=1.0)) as engine,
        running_gateway(engine) as slotgate,
    ):
        asked = asyncio.create_task(slotgate.chat())
        await eventually(lambda: _is(slotgate, "busy"))
        assert (await slotgate.client.get("/readyz")).status_code == 200
        assert await slotgate.metric("backend_up") == 1
        assert (await asked).status_code == 200
        await eventually(lambda: _is(slotgate, "up"))


@in_loop
async def test_an_engine_that_died_under_load_is_met_by_one_trial_and_then_by_more() -> None:
    """B061: a hundred wait; the one that comes back is not run over."""
    slow = Behaviour(ttft_s=0.15)
    async with (
        FakeEngine(slots=4, behaviour=Behaviour(ttft_s=0.05)) as steady,
        FakeEngine(slots=4, behaviour=Behaviour(ttft_s=0.05)) as shaky,
        running_gateway(steady, shaky, admission={"queue": 200}) as slotgate,
    ):
        await asyncio.gather(*(slotgate.chat() for _ in range(8)))
        await shaky.stop_listening()
        for connection in shaky.connections:
            if not connection.lost.is_set():
                connection.fin()
        crowd = [asyncio.create_task(slotgate.chat()) for _ in range(100)]
        await eventually(lambda: sum(task.done() for task in crowd) > 30, within_s=30)
        shaky.behaviour = slow
        shaky.occupancy.peak = 0
        await shaky.come_back()
        more = [asyncio.create_task(slotgate.chat()) for _ in range(90)]
        await eventually(lambda: shaky.inside or shaky.peak, within_s=20)
        assert shaky.peak == 1, "one trial"
        answers = await asyncio.gather(*crowd, *more)
        assert {answer.status_code for answer in answers} == {200}
        await eventually(lambda: _trusted(slotgate), within_s=20)


async def _trusted(slotgate: Running) -> bool:
    if (await slotgate.status())["backends"][1]["breaker"] == "closed":
        return True
    await slotgate.chat()
    return False


@in_loop
async def test_a_number_of_slots_that_nobody_vouches_for_is_not_certain_until_it_is_configured() -> (
    None
):
    """Law 2's half second counts slots that exist; more than one of an assumed number may not."""
    async with FakeEngine("openai") as one, FakeEngine("llama-server") as other:
        async with running_gateway(one, other) as slotgate:
            assert uncertain(slotgate) == [True, False]
        configured = {"url": one.url, "slots": 3}
        async with running_gateway(configured, other, check=False) as slotgate:
            assert uncertain(slotgate) == [False, False]


def uncertain(slotgate: Running) -> list[bool]:
    backends = slotgate.gateway.dispatcher.dispatch.backends
    return [backends[name].slots_assumed for name in ("b1", "b2")]
