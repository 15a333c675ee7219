"""Files that change while they are read: broken, half-written, empty for a moment, or asking for too much."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

from tests.fakes.engine import FakeEngine
from tests.fakes.running import eventually, in_loop
from tests.gateway.reloading import Heard, Reloading, key_record, write


@in_loop
async def test_a_file_that_is_empty_or_half_written_for_a_moment_is_not_noticed(
    tmp_path: Path,
) -> None:
    file = tmp_path / "slotgate.yaml"
    async with FakeEngine() as engine:
        write(file, engine.url)
        with Heard() as log:
            async with Reloading(file) as slotgate:
                write(file, engine.url, admission={"queue": 7})
                whole = file.read_bytes()
                for part in (b"", whole[:40], whole[:-30]):  # for less than the watcher's patience
                    file.write_bytes(part)
                    await asyncio.sleep(0.1)
                file.write_bytes(whole)
                await slotgate.until("queue_limit", 7, model="m")
        assert [line for line in log.lines("reload") if "failed" in line] == []


@in_loop
async def test_a_bad_file_is_told_once_in_the_log_and_until_it_is_mended_in_the_metric(
    tmp_path: Path,
) -> None:
    file = tmp_path / "slotgate.yaml"
    async with FakeEngine() as engine:
        write(file, engine.url)
        with Heard() as log:
            async with Reloading(file) as slotgate:
                file.write_text("backends: [")
                await slotgate.until("config_reload_success", 0)
                await asyncio.sleep(1.2)  # the watcher looks twice more, and has nothing to add
                assert slotgate.metric("config_reload_success") == 0
                assert (await slotgate.ask()).status_code == 200
                write(file, engine.url)
                await slotgate.until("config_reload_success", 1)
        failed = [line for line in log.lines("reload") if "failed" in line]
        assert len(failed) == 1
        assert f"{file}:1" in failed[0]["failed"]
        assert failed[0]["level"] == "error"


@in_loop
async def test_a_configuration_that_vanishes_changes_nothing(tmp_path: Path) -> None:
    file = tmp_path / "slotgate.yaml"
    async with FakeEngine() as engine:
        write(file, engine.url)
        async with Reloading(file) as slotgate:
            file.unlink()
            await slotgate.until("config_reload_success", 0)
            assert (await slotgate.ask()).status_code == 200


@in_loop
async def test_a_bad_keys_file_leaves_the_keys_and_the_configuration_as_they_were(
    tmp_path: Path,
) -> None:
    file, keys = tmp_path / "slotgate.yaml", tmp_path / "keys.yaml"
    keys.write_text(json.dumps([key_record("ann", "sk-sg-ann")]))
    async with FakeEngine() as engine:
        write(file, engine.url)
        async with Reloading(file) as slotgate:
            slotgate.client.headers["x-api-key"] = "sk-sg-ann"
            keys.write_text("- {name: ann, hash: nonsense}\n")
            write(file, engine.url, admission={"queue": 7})
            await slotgate.gateway.reload()
            assert slotgate.metric("config_reload_success") == 0
            assert (await slotgate.ask()).status_code == 200
            assert slotgate.metric("queue_limit", model="m") != 7, "one half was taken up"


@in_loop
async def test_a_reload_does_not_open_a_gateway_that_other_machines_reach(tmp_path: Path) -> None:
    """The file says a loopback address, where `anonymous` may be; the socket listens on all of them."""
    file, keys = tmp_path / "slotgate.yaml", tmp_path / "keys.yaml"
    keys.write_text(json.dumps([key_record("ann", "sk-sg-ann")]))
    async with FakeEngine() as engine:
        write(file, engine.url, listen={"host": "0.0.0.0", "port": 0})
        async with Reloading(file) as slotgate:
            write(file, engine.url, listen={"port": 0}, auth={"anonymous": True})
            await slotgate.gateway.reload()
            assert slotgate.metric("config_reload_success") == 0
            assert (await slotgate.ask()).status_code == 401


@in_loop
async def test_what_needs_a_restart_is_named_and_the_rest_is_taken_up(tmp_path: Path) -> None:
    file = tmp_path / "slotgate.yaml"
    async with FakeEngine() as engine:
        write(file, engine.url)
        with Heard() as log:
            async with Reloading(file) as slotgate:
                base = slotgate.gateway.base_url
                write(file, engine.url, listen={"host": "::1", "port": 9}, admission={"queue": 7})
                await slotgate.gateway.reload()
                assert slotgate.gateway.base_url == base
                assert (await slotgate.ask()).status_code == 200
                assert slotgate.metric("queue_limit", model="m") == 7
        named = {line["setting"] for line in log.lines("config")}
        assert named == {"listen.host", "listen.port"}


@in_loop
async def test_limits_and_the_log_level_count_from_the_next_request_on(tmp_path: Path) -> None:
    file = tmp_path / "slotgate.yaml"
    async with FakeEngine() as engine:
        write(file, engine.url)
        with Heard() as log:
            async with Reloading(file) as slotgate:
                pad = "x" * 200_000
                assert (await slotgate.ask(user=pad)).status_code == 200
                write(file, engine.url, limits={"body_mib": 0.1}, log={"level": "error"})
                await slotgate.gateway.reload()
                assert (await slotgate.ask(user=pad)).status_code == 413
        assert [line["status"] for line in log.lines("request")] == [200]


@in_loop
async def test_the_form_of_the_log_changes_from_the_next_line_on(tmp_path: Path) -> None:
    file = tmp_path / "slotgate.yaml"
    async with FakeEngine() as engine:
        write(file, engine.url)
        with Heard() as log:
            async with Reloading(file) as slotgate:
                assert (await slotgate.ask()).status_code == 200
                write(file, engine.url, log={"format": "console"})
                await slotgate.gateway.reload()
                assert (await slotgate.ask()).status_code == 200
        assert len(log.lines("request")) == 1
        assert " request " in log.text.splitlines()[-1]


@in_loop
async def test_a_keys_file_that_is_new_is_read_once_and_watched_from_then_on(
    tmp_path: Path,
) -> None:
    file, keys = tmp_path / "slotgate.yaml", tmp_path / "team.yaml"
    keys.write_text(json.dumps([key_record("ann", "sk-sg-ann")]))
    async with FakeEngine() as engine:
        write(file, engine.url)
        with Heard() as log:
            async with Reloading(file) as slotgate:
                write(file, engine.url, auth={"keys_file": "team.yaml"})

                async def answers(status: int, key: str) -> bool:
                    answer = await slotgate.client.get("/v1/models", headers={"x-api-key": key})
                    return answer.status_code == status

                await eventually(lambda: answers(401, "sk-sg-none"))
                assert await answers(200, "sk-sg-ann")
                keys.write_text(json.dumps([key_record("bob", "sk-sg-bob")]))
                await eventually(lambda: answers(200, "sk-sg-bob"))
                assert await answers(401, "sk-sg-ann")
        assert len(log.lines("reload")) == 2
