"""Keys and their limits in two gateways with one Redis: what one learns, both obey."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from pathlib import Path

import httpx2
from click.testing import CliRunner

from gateway.__main__ import main
from gateway.core.keys import KeyRing
from tests.fakes.engine import FakeEngine
from tests.fakes.gateway import Running
from tests.fakes.redis_server import RedisServer, redis_server
from tests.fakes.running import eventually, in_loop, slack
from tests.fakes.scripts import chat_stream
from tests.gateway.conftest import running_gateway
from tests.gateway.line_talk import CHAT, body_for


async def slotgate(*words: str) -> str:
    """Runs the command beside the loop; what it printed, the secret first for `keys new`."""
    result = await asyncio.to_thread(CliRunner().invoke, main, words, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def config_in(folder: Path, redis: RedisServer) -> str:
    file = folder / "fleet.yaml"
    file.write_text(json.dumps({"redis": {"url": redis.url}, "backends": [{"url": "http://h"}]}))
    return str(file)


def knows(gateway: Running, *names: str) -> bool:
    """Has it heard of these keys in Redis?"""
    cluster = gateway.gateway.cluster
    return cluster is not None and {key.name for key in cluster.keys.ring(KeyRing(())).keys} >= set(
        names
    )


async def status_of(gateway: Running, secret: str, **body: int) -> int:
    async with httpx2.AsyncClient(trust_env=False, timeout=None) as http:
        answer = await http.post(
            f"{gateway.base_url}{CHAT}",
            json=body_for(CHAT) | body,
            headers={"Authorization": f"Bearer {secret}"},
        )
        return answer.status_code


async def all_answer(gateways: Sequence[Running], secret: str, status: int) -> bool:
    return all([await status_of(one, secret) == status for one in gateways])


@in_loop
async def test_a_key_made_in_redis_opens_every_gateway_and_a_revoked_one_closes_them(
    tmp_path: Path,
) -> None:
    async with redis_server() as redis, FakeEngine(slots=2) as engine:
        sections = {"redis": {"url": redis.url}}
        async with (
            running_gateway(engine, keys=["own"], check=False, **sections) as one,
            running_gateway(engine, keys=["own"], check=False, **sections) as two,
        ):
            config = config_in(tmp_path, redis)
            secret = (await slotgate("keys", "new", "ann", "--config", config)).splitlines()[0]
            await eventually(lambda: all_answer([one, two], secret, 200), within_s=10)
            assert "ann" in await slotgate("keys", "list", "--config", config)
            await slotgate("keys", "revoke", "ann", "--config", config)
            await eventually(lambda: all_answer([one, two], secret, 401), within_s=10)
            assert await status_of(one, one.keys["own"]) == 200, "the file's own keys still count"
        assert not (tmp_path / "keys.yaml").exists()


@in_loop
async def test_a_revocation_is_obeyed_by_every_gateway_within_a_second(tmp_path: Path) -> None:
    """Measured from when the command has ended until the last request that was let in began."""
    async with redis_server() as redis, FakeEngine(slots=2) as engine:
        sections = {"redis": {"url": redis.url}}
        async with (
            running_gateway(engine, keys=["own"], check=False, **sections) as one,
            running_gateway(engine, keys=["own"], check=False, **sections) as two,
            running_gateway(engine, keys=["own"], check=False, **sections) as three,
        ):
            config, gateways = config_in(tmp_path, redis), (one, two, three)
            for name in ("ann", "bob", "cem"):
                words = ("keys", "new", name, "--config", config)
                secret = (await slotgate(*words)).splitlines()[0]
                await eventually(lambda: all_answer(gateways, secret, 200))  # noqa: B023
                await slotgate("keys", "revoke", name, "--config", config)
                revoked_at = time.monotonic()
                last = await asyncio.gather(*(last_let_in(each, secret) for each in gateways))
                assert max(last) - revoked_at < 1.0 * slack(), last


async def last_let_in(gateway: Running, secret: str) -> float:
    """When the last request began that this key still opened; 0 when there was none."""
    last, refused = 0.0, 0
    while refused < 10:  # once closed, it stays so
        began = time.monotonic()
        if await status_of(gateway, secret) == 200:
            last, refused = began, 0
        else:
            refused += 1
    return last


@in_loop
async def test_keys_outlive_a_redis_that_is_away_or_has_forgotten_them(tmp_path: Path) -> None:
    async with (
        redis_server() as redis,
        FakeEngine(slots=2) as engine,
        running_gateway(engine, keys=["own"], check=False, redis={"url": redis.url}) as one,
    ):
        config = config_in(tmp_path, redis)
        secret = (await slotgate("keys", "new", "ann", "--config", config)).splitlines()[0]
        await slotgate("keys", "new", "bob", "--config", config)
        await slotgate("keys", "revoke", "bob", "--config", config)
        await eventually(lambda: all_answer([one], secret, 200))
        await redis.stop()
        await eventually(lambda: not one.gateway.cluster or not one.gateway.cluster.is_up)
        assert await status_of(one, secret) == 200
        assert await one.metric("redis_up") == 0
        await redis.start()
        await eventually(lambda: one.gateway.cluster and one.gateway.cluster.is_up)
        assert await one.metric("redis_up") == 1
        assert await status_of(one, secret) == 200

        async def is_back() -> bool:
            return "ann" in await slotgate("keys", "list", "--config", config)

        await eventually(is_back)


@in_loop
async def test_max_in_flight_counts_what_runs_in_the_other_gateway(tmp_path: Path) -> None:
    async with redis_server() as redis, FakeEngine(slots=4) as engine:
        engine.always(chat_stream(tokens=2, every_s=3.0))
        sections = {"redis": {"url": redis.url}}
        async with (
            running_gateway(engine, keys=["own"], check=False, **sections) as one,
            running_gateway(engine, keys=["own"], check=False, **sections) as two,
        ):
            config = config_in(tmp_path, redis)
            words = ("keys", "new", "ann", "--max-in-flight", "2", "--config", config)
            secret = (await slotgate(*words)).splitlines()[0]
            await eventually(lambda: two.gateway.cluster and two.gateway.cluster.keys.some)
            await eventually(lambda: one.gateway.cluster and one.gateway.cluster.keys.some)
            running = [asyncio.create_task(status_of(one, secret)) for _ in range(2)]
            await eventually(lambda: engine.running == 2)
            usage = two.gateway.pipeline.quota.limits.usage
            await eventually(lambda: "ann" in usage and usage["ann"].elsewhere == 2)
            assert await status_of(two, secret) == 429
            assert await asyncio.gather(*running) == [200, 200]
            await eventually(lambda: usage["ann"].elsewhere == 0)
            assert await status_of(two, secret) == 200


@in_loop
async def test_requests_a_minute_are_those_of_all_gateways(tmp_path: Path) -> None:
    async with redis_server() as redis, FakeEngine(slots=4) as engine:
        sections = {"redis": {"url": redis.url}}
        async with (
            running_gateway(engine, keys=["own"], check=False, **sections) as one,
            running_gateway(engine, keys=["own"], check=False, **sections) as two,
        ):
            config = config_in(tmp_path, redis)
            words = ("keys", "new", "ann", "--rpm", "4", "--config", config)
            secret = (await slotgate(*words)).splitlines()[0]
            for gateway in (one, two):
                await eventually(
                    lambda gateway=gateway: (
                        gateway.gateway.cluster and gateway.gateway.cluster.keys.some
                    )
                )
            answers = []
            for number in range(8):
                answers.append(await status_of((one, two)[number % 2], secret))
                await asyncio.sleep(0.3)
            assert answers == [200] * 4 + [429] * 4
            async with running_gateway(engine, keys=["own"], check=False, **sections) as new:
                await eventually(
                    lambda: (
                        "ann" in new.gateway.pipeline.quota.limits.usage
                        and new.gateway.cluster
                        and new.gateway.cluster.keys.some
                    )
                )
                assert await status_of(new, secret) == 429, "one that comes later knows it too"


@in_loop
async def test_tokens_a_minute_are_those_of_all_gateways(tmp_path: Path) -> None:
    """Two gateways in turn let in what one alone would."""
    async with redis_server() as redis, FakeEngine(slots=4) as engine:
        engine.always(chat_stream(tokens=20, every_s=0.001))
        sections = {"redis": {"url": redis.url}}
        async with (
            running_gateway(engine, keys=["own"], check=False, **sections) as one,
            running_gateway(engine, keys=["own"], check=False, **sections) as two,
        ):
            config, secrets = config_in(tmp_path, redis), {}
            for name in ("alone", "ann"):
                words = ("keys", "new", name, "--tpm", "120", "--config", config)
                secrets[name] = (await slotgate(*words)).splitlines()[0]
            for gateway in (one, two):
                await eventually(lambda gateway=gateway: knows(gateway, "alone", "ann"))
            alone = await asked_in_turn([one], secrets["alone"])
            assert await asked_in_turn([one, two], secrets["ann"]) == alone
            assert alone == sorted(alone), "some are let in, then none"
            assert set(alone) == {200, 429}
            usages = [each.gateway.pipeline.quota.limits.usage["ann"] for each in (one, two)]
            levels = [usage.tokens.level for usage in usages if usage.tokens is not None]
            assert abs(levels[0] - levels[1]) < 10, "both know what the other spent"


async def asked_in_turn(gateways: Sequence[Running], secret: str) -> list[int]:
    """The statuses of eight requests that say how long their answers may be."""
    statuses = []
    for number in range(8):
        gateway = gateways[number % len(gateways)]
        statuses.append(await status_of(gateway, secret, max_tokens=20))
        await asyncio.sleep(0.3)  # by then the other knows what it really took
    return statuses
