"""What a reload does to backends: added, gone, back again, smaller. Nothing that runs is broken, no permit is lost."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

from tests.fakes.engine import FakeEngine
from tests.fakes.running import eventually, in_loop
from tests.gateway.reloading import Heard, Reloading, held_stream, key_record, write


@in_loop
async def test_a_backend_that_comes_back_under_its_name_still_counts_what_it_has_in_flight(
    tmp_path: Path,
) -> None:
    """Law 1: else its engine would get a second request beside the first one."""
    file = tmp_path / "slotgate.yaml"
    async with FakeEngine(slots=1) as engine, FakeEngine(models=["other"]) as other:
        engine.always(held_stream(release := asyncio.Event()))
        write(file, engine.url, other.url)
        async with Reloading(file) as slotgate:
            running = asyncio.create_task(slotgate.ask(stream=True))
            await engine.until_requests(1)
            file.write_text(json.dumps({"backends": [{"name": "b2", "url": other.url}]}))
            await slotgate.gateway.reload()
            assert slotgate.metric("in_flight", backend="b1") == 0, "its series are gone"
            write(file, engine.url, other.url)
            await slotgate.gateway.reload()
            await slotgate.until("backend_up", 1, backend="b1")
            assert slotgate.metric("in_flight", backend="b1") == 1
            second = asyncio.create_task(slotgate.ask(stream=True))
            await slotgate.until("queue_depth", 1, model="m")
            assert engine.peak_permits == 1
            release.set()
            assert (await running).text.rstrip().endswith("[DONE]")
            assert (await second).text.rstrip().endswith("[DONE]")
            assert engine.peak_permits == 1
            await slotgate.until("in_flight", 0)


@in_loop
async def test_the_series_of_what_is_gone_go_and_those_of_what_stays_stay(tmp_path: Path) -> None:
    file, keys = tmp_path / "slotgate.yaml", tmp_path / "keys.yaml"
    ann, bob = "sk-sg-ann", "sk-sg-bob"
    keys.write_text(json.dumps([key_record("ann", ann), key_record("bob", bob)]))
    async with FakeEngine(models=["old"]) as first, FakeEngine(models=["kept"]) as second:
        write(file, {"name": "gone", "url": first.url}, {"name": "stays", "url": second.url})
        async with Reloading(file) as slotgate:
            for model, key in (("old", ann), ("kept", bob)):
                slotgate.client.headers["authorization"] = f"Bearer {key}"
                assert (await slotgate.ask(model, stream=True)).status_code == 200
            before = slotgate.gateway.metrics_text()
            assert all(f'"{name}"' in before for name in ("gone", "old", "ann"))
            keys.write_text(json.dumps([key_record("bob", bob)]))
            write(file, {"name": "stays", "url": second.url})
            await slotgate.gateway.reload()
            after = slotgate.gateway.metrics_text()
            assert [name for name in ("gone", "old", "ann") if f'"{name}"' in after] == []
            assert slotgate.metric("requests_total", model="kept") == 1
            assert slotgate.metric("ttft_seconds_count", backend="stays") == 1
            assert slotgate.metric("key_requests_total", key="bob") == 1


@in_loop
async def test_a_smaller_backend_cuts_nothing_and_lends_nothing_new_until_it_is_below(
    tmp_path: Path,
) -> None:
    file = tmp_path / "slotgate.yaml"
    async with FakeEngine("openai", slots=3) as engine:
        engine.always(held_stream(release := asyncio.Event()))
        write(file, {"url": engine.url, "slots": 3}, admission={"queue": 5})
        async with Reloading(file) as slotgate:
            running = [asyncio.create_task(slotgate.ask(stream=True)) for _ in range(3)]
            await engine.until_requests(3)
            write(file, {"url": engine.url, "slots": 1}, admission={"queue": 5})
            await slotgate.gateway.reload()
            assert slotgate.metric("slots", backend="b1") == 1
            assert slotgate.metric("in_flight", backend="b1") == 3
            late = [asyncio.create_task(slotgate.ask(stream=True)) for _ in range(2)]
            await slotgate.until("queue_depth", 2, model="m")
            release.set()
            texts = [(await one).text for one in (*running, *late)]
            assert all(text.rstrip().endswith("[DONE]") for text in texts)
            began = sorted(one.started_at or 0 for one in engine.requests)
            ended = sorted(one.ended_at or 0 for one in engine.requests)
            assert began[3] >= ended[2], "the fourth began before all three had ended"
            assert began[4] >= ended[3]


@in_loop
async def test_those_who_wait_keep_their_place_through_a_reload(tmp_path: Path) -> None:
    file = tmp_path / "slotgate.yaml"
    async with FakeEngine(slots=1) as engine:
        engine.always(held_stream(release := asyncio.Event()))
        write(file, engine.url, admission={"queue": 4})
        async with Reloading(file) as slotgate:
            asking = []
            for number in range(4):
                asking.append(asyncio.create_task(slotgate.ask(stream=True, seed=number)))
                await eventually(
                    lambda n=number: slotgate.metric("queue_depth") + len(engine.requests) == n + 1
                )
            write(file, engine.url, admission={"queue": 9})
            await slotgate.gateway.reload()
            assert slotgate.metric("queue_depth", model="m") == 3
            assert slotgate.metric("queue_limit", model="m") == 9
            release.set()
            answers = [await one for one in asking]
            assert [answer.status_code for answer in answers] == [200] * 4
            assert [json.loads(one.body)["seed"] for one in engine.requests] == [0, 1, 2, 3]


@in_loop
async def test_a_reload_does_not_forget_who_is_warm(tmp_path: Path) -> None:
    file = tmp_path / "slotgate.yaml"
    async with FakeEngine() as first, FakeEngine() as second:
        write(file, first.url, second.url)
        async with Reloading(file) as slotgate:
            long = [{"role": "user", "content": "a long story about a slot " * 200}]
            home = (await slotgate.ask(messages=long)).headers["x-slotgate-backend"]
            write(file, first.url, second.url, drain_s=7)
            await slotgate.gateway.reload()
            again = await slotgate.ask(messages=[*long, {"role": "user", "content": "and then?"}])
            assert again.headers["x-slotgate-backend"] == home
            assert again.headers["x-slotgate-affinity"] == "hit"


@in_loop
async def test_a_removed_backend_serves_on_and_its_waiting_requests_go_elsewhere_or_are_told(
    tmp_path: Path,
) -> None:
    file = tmp_path / "slotgate.yaml"
    async with FakeEngine(slots=1) as first, FakeEngine(models=["other"]) as other:
        first.always(held_stream(release := asyncio.Event()))
        write(file, first.url, other.url, admission={"queue": 3})
        with Heard() as log:
            async with Reloading(file) as slotgate:
                running = asyncio.create_task(slotgate.ask(stream=True))
                await first.until_requests(1)
                waiting = asyncio.create_task(slotgate.ask())
                await slotgate.until("queue_depth", 1, model="m")
                file.write_text(json.dumps({"backends": [{"name": "b2", "url": other.url}]}))
                await slotgate.gateway.reload()
                refused = await waiting
                assert refused.status_code == 503
                assert refused.json()["error"]["code"] == "no_backend"
                release.set()
                assert (await running).text.rstrip().endswith("[DONE]")
                assert len(first.requests) == 1
                await eventually(lambda: first.open_connections == 0, why="a connection is left")
        states = [line.get("state") for line in log.lines("backend")]
        assert states.count("removed") == 1
