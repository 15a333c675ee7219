"""Reload: by signal and by file change, whole or not at all, without a stream broken."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

from tests.fakes.engine import FakeEngine
from tests.fakes.running import eventually, in_loop
from tests.gateway.reloading import Reloading, body, held_stream, key_record, write


@in_loop
async def test_a_changed_file_adds_and_removes_backends_without_breaking_a_stream(
    tmp_path: Path,
) -> None:
    file = tmp_path / "slotgate.yaml"
    async with FakeEngine(models=["old"]) as first, FakeEngine(models=["new"]) as second:
        first.always(held_stream(release := asyncio.Event()))
        write(file, first.url)
        async with Reloading(file) as slotgate:
            stream = asyncio.create_task(
                slotgate.client.post("/v1/chat/completions", json=body("old", stream=True))
            )
            await first.until_requests(1)
            file.write_text(
                json.dumps({"backends": [{"name": "b2", "url": second.url}], "listen": {"port": 0}})
            )

            async def changed() -> bool:
                return await slotgate.models() == {"new"}

            await eventually(changed, why="the new backend is not listed alone")
            answer = await slotgate.client.post("/v1/chat/completions", json=body("new"))
            assert answer.headers["x-slotgate-backend"] == "b2"
            assert not stream.done(), "the stream outlives the change of the list"
            release.set()
            whole = await stream
            assert whole.status_code == 200
            assert whole.text.rstrip().endswith("data: [DONE]")


@in_loop
async def test_a_bad_file_changes_nothing_and_a_good_one_after_it_is_taken(tmp_path: Path) -> None:
    file = tmp_path / "slotgate.yaml"
    async with FakeEngine(models=["m"]) as engine:
        write(file, engine.url)
        async with Reloading(file) as slotgate:
            file.write_text("backends: [{url: ftp://nowhere}]\nadmision: {}\n")

            async def reported() -> bool:
                return "slotgate_config_reload_success 0.0" in slotgate.gateway.metrics_text()

            await eventually(reported, why="the bad file is not reported")
            answer = await slotgate.client.post("/v1/chat/completions", json=body("m"))
            assert answer.status_code == 200
            write(file, engine.url, admission={"queue": 7})

            async def taken() -> bool:
                models = slotgate.gateway.status()["models"]
                return bool(models["m"]["queue_limit"] == 7)

            await eventually(taken, why="the good file is not taken up")
            assert "slotgate_config_reload_success 1.0" in slotgate.gateway.metrics_text()


@in_loop
async def test_a_revoked_key_is_refused_and_a_new_one_accepted_without_a_restart(
    tmp_path: Path,
) -> None:
    file, keys = tmp_path / "slotgate.yaml", tmp_path / "keys.yaml"
    keys.write_text(json.dumps([key_record("ann", "sk-sg-ann")]))
    async with FakeEngine(models=["m"]) as engine:
        write(file, engine.url)
        async with Reloading(file) as slotgate:
            assert await slotgate.models(authorization="Bearer sk-sg-ann") == {"m"}
            keys.write_text(json.dumps([key_record("bob", "sk-sg-bob")]))

            async def bob_may() -> bool:
                return await slotgate.models(authorization="Bearer sk-sg-bob") == {"m"}

            await eventually(bob_may, why="the new key is not accepted")
            answer = await slotgate.client.get(
                "/v1/models", headers={"authorization": "Bearer sk-sg-ann"}
            )
            assert answer.status_code == 401


@in_loop
async def test_a_gateway_with_keys_never_becomes_keyless_by_a_reload(tmp_path: Path) -> None:
    file, keys = tmp_path / "slotgate.yaml", tmp_path / "keys.yaml"
    keys.write_text(json.dumps([key_record("ann", "sk-sg-ann")]))
    async with FakeEngine(models=["m"]) as engine:
        write(file, engine.url)
        async with Reloading(file) as slotgate:
            keys.unlink()
            await slotgate.gateway.reload()
            assert (await slotgate.client.get("/v1/models")).status_code == 401
            old = await slotgate.client.get("/v1/models", headers={"x-api-key": "sk-sg-ann"})
            assert old.status_code == 401, "a file that is gone leaves no keys"


@in_loop
async def test_a_drained_backend_takes_no_new_work(tmp_path: Path) -> None:
    file = tmp_path / "slotgate.yaml"
    async with FakeEngine(models=["m"]) as first, FakeEngine(models=["m"]) as second:
        write(file, first.url, second.url)
        async with Reloading(file) as slotgate:
            document = json.loads(file.read_text())
            document["backends"][0]["drain"] = True
            file.write_text(json.dumps(document))
            await slotgate.gateway.reload()
            before = first.executions
            for _ in range(6):
                answer = await slotgate.client.post("/v1/chat/completions", json=body("m"))
                assert answer.headers["x-slotgate-backend"] == "b2"
            assert first.executions == before
