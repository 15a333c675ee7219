"""Many requests of one connection, whose heads are alike or nearly: each is the one that was sent, and whose it is."""

from __future__ import annotations

import json
from pathlib import Path

from tests.fakes.engine import FakeEngine
from tests.fakes.gateway import running_gateway
from tests.fakes.raw_client import RawClient
from tests.fakes.running import in_loop
from tests.gateway.line_talk import CHAT, body_for
from tests.gateway.reloading import Reloading, key_record, write


@in_loop
async def test_requests_with_alike_heads_keep_their_own_bodies() -> None:
    async with (
        FakeEngine() as engine,
        running_gateway(engine, keys=["alice"]) as slotgate,
        await RawClient.connect(slotgate.port) as client,
    ):
        for number in range(12):
            body = json.dumps(body_for(CHAT, user="x" * number)).encode()
            await client.request("POST", CHAT, slotgate.header(), body)
            assert (await client.response()).status == 200
            assert engine.requests[-1].body == body
            assert engine.requests[-1].headers["content-length"] == str(len(body))


@in_loop
async def test_requests_in_one_write_with_alike_heads_are_told_apart() -> None:
    async with FakeEngine() as engine, running_gateway(engine, keys=["alice"]) as slotgate:
        bodies = [json.dumps(body_for(CHAT, user="x" * n)).encode() for n in range(5)]
        head = "POST {} HTTP/1.1\r\nHost: a\r\nAuthorization: {}\r\nContent-Length: {}\r\n\r\n"
        key = slotgate.header()["Authorization"]
        wire = b"".join(head.format(CHAT, key, len(one)).encode() + one for one in bodies)
        async with await RawClient.connect(slotgate.port) as client:
            await client.send(wire)
            for _ in bodies:
                assert (await client.response()).status == 200
        assert [one.body for one in engine.requests] == bodies


@in_loop
async def test_another_key_in_an_otherwise_alike_head_is_another_key() -> None:
    async with FakeEngine() as engine, running_gateway(engine, keys=["alice", "bob"]) as slotgate:
        body = json.dumps(body_for(CHAT)).encode()
        async with await RawClient.connect(slotgate.port) as client:
            for name in ("alice", "alice", "bob", "alice", "bob", "bob"):
                await client.request("POST", CHAT, slotgate.header(name), body)
                assert (await client.response()).status == 200
            wrong = {"Authorization": slotgate.header("bob")["Authorization"][:-1] + "-"}
            await client.request("POST", CHAT, wrong, body)
            assert (await client.response()).status == 401
        counted = [await slotgate.metric("key_requests_total", key=k) for k in ("alice", "bob")]
        assert counted == [3, 3]


@in_loop
async def test_a_revoked_key_is_refused_on_a_connection_whose_head_is_known(tmp_path: Path) -> None:
    file, keys = tmp_path / "slotgate.yaml", tmp_path / "keys.yaml"
    keys.write_text(json.dumps([key_record("ann", "sk-sg-ann")]))
    body = json.dumps(body_for(CHAT)).encode()
    async with FakeEngine(models=["m"]) as engine:
        write(file, engine.url)
        async with (
            Reloading(file) as slotgate,
            await RawClient.connect(slotgate.gateway.server.port) as client,
        ):
            for _ in range(3):
                await client.request("POST", CHAT, {"x-api-key": "sk-sg-ann"}, body)
                assert (await client.response()).status == 200
            keys.write_text(json.dumps([key_record("bob", "sk-sg-bob")]))
            await slotgate.gateway.reload()
            await client.request("POST", CHAT, {"x-api-key": "sk-sg-ann"}, body)
            assert (await client.response()).status == 401


@in_loop
async def test_a_conversations_name_in_the_head_goes_where_its_head_goes() -> None:
    """What is noted of a head is not kept for one that differs."""
    async with FakeEngine() as engine, running_gateway(engine, keys=["alice"]) as slotgate:
        body = json.dumps(body_for(CHAT)).encode()
        async with await RawClient.connect(slotgate.port) as client:
            for number in (1, 1, 2, 1):
                headers = slotgate.header() | {
                    "X-Session-Id": f"s{number}",
                    "X-Request-Id": f"r{number}",
                }
                await client.request("POST", CHAT, headers, body)
                answer = await client.response()
                assert answer.header("x-request-id") == f"r{number}"
                assert engine.requests[-1].headers["x-session-id"] == f"s{number}"


@in_loop
async def test_a_body_above_the_limit_is_refused_behind_a_known_head_and_the_connection_lives() -> (
    None
):
    async with (
        FakeEngine() as engine,
        running_gateway(engine, keys=["alice"], limits={"body_mib": 1}) as slotgate,
        await RawClient.connect(slotgate.port) as client,
    ):
        small = json.dumps(body_for(CHAT)).encode()
        large = json.dumps(body_for(CHAT, user="x" * (2 << 20))).encode()
        for body, status in ((small, 200), (large, 413), (small, 200), (large, 413), (small, 200)):
            await client.request("POST", CHAT, slotgate.header(), body)
            assert (await client.response()).status == status
        assert [one.body for one in engine.requests] == [small] * 3


@in_loop
async def test_a_key_in_the_path_wins_over_another_valid_one_in_the_head() -> None:
    """Two valid keys in one head are refused; of these, the head's is not looked at."""
    async with (
        FakeEngine() as engine,
        running_gateway(engine, keys=["alice", "bob"], auth={"key_in_path": True}) as slotgate,
        await RawClient.connect(slotgate.port) as client,
    ):
        body = json.dumps(body_for(CHAT)).encode()
        for _ in range(2):
            path = f"/k/{slotgate.keys['alice']}{CHAT}"
            await client.request("POST", path, slotgate.header("bob"), body)
            assert (await client.response()).status == 200
        assert await slotgate.metric("key_requests_total", key="alice") == 2
