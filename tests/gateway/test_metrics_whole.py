"""/metrics and /status of a running gateway: bounded by no client, gone with what is gone, and never in the way."""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
import re
import time
from pathlib import Path

import httpx2

from gateway.app import Gateway, Source
from gateway.runtime.configfile import load
from tests.fakes.behaviour import Behaviour
from tests.fakes.engine import FakeEngine
from tests.fakes.gateway import ADMIN, Running, running_gateway
from tests.fakes.invariants import MOST_SERIES, series_of
from tests.fakes.raw_client import RawClient
from tests.fakes.running import eventually, in_loop, slack
from tests.gateway.line_talk import CHAT, STREAMING, body_for

MADE_UP = 10_000
CLIENTS = 8


@in_loop
async def test_ten_thousand_made_up_models_paths_keys_and_users_add_no_series() -> None:
    async with (
        FakeEngine() as engine,
        running_gateway(engine, keys=["alice"], check=False) as slotgate,
    ):
        rng = random.Random(5)
        await _make_up(slotgate, rng, 40)  # one of each kind at least
        before = set(await slotgate.metrics())
        await asyncio.gather(*(_make_up(slotgate, rng, MADE_UP // CLIENTS) for _ in range(CLIENTS)))
        after = set(await slotgate.metrics())
        assert after == before
        assert len(after) < 200
        assert len(json.dumps(await slotgate.status())) < 10_000
        assert await slotgate.metric("key_requests_total") >= MADE_UP
        assert engine.executions == 0


async def _make_up(slotgate: Running, rng: random.Random, number: int) -> None:
    """Refused requests, each with something that nobody ever sent before."""
    async with await RawClient.connect(slotgate.port) as client:
        for at in range(number):
            odd = f"{rng.randrange(10**12)}"
            key = slotgate.keys["alice"] if at % 2 else f"sk-sg-{odd}"
            path = (*STREAMING, f"/v1/{odd}")[at % (len(STREAMING) + 1)]
            body = body_for(path, model=f"model-{odd}", user=f"user-{odd}")
            headers = {"Authorization": f"Bearer {key}", "x-request-id": odd, "session-id": odd}
            await client.request("POST", path, headers=headers, body=json.dumps(body).encode())
            assert (await client.response()).status in (401, 404)


@in_loop
async def test_series_of_what_was_removed_disappear_at_the_reload(tmp_path: Path) -> None:
    file = tmp_path / "slotgate.yaml"
    keys = tmp_path / "keys.yaml"
    async with FakeEngine(models=["old"]) as first, FakeEngine(models=["new"]) as second:
        secrets = {"alice": "sk-sg-" + "a" * 32, "bob": "sk-sg-" + "b" * 32}
        _write_keys(keys, secrets)
        _write(file, {"b1": first.url, "b2": second.url})
        gateway = Gateway(load(file), Source(lambda: load(file), str(file)))
        await gateway.start()
        async with httpx2.AsyncClient(base_url=gateway.base_url, trust_env=False) as client:
            try:
                for secret in secrets.values():
                    for model in ("old", "new"):
                        answer = await client.post(
                            CHAT,
                            json=body_for(CHAT, model=model, stream=True),
                            headers={"api-key": secret},
                        )
                        assert answer.status_code == 200
                assert {"old", "b1", "bob"} <= _values(gateway)
                _write_keys(keys, {"alice": secrets["alice"]})
                _write(file, {"b2": second.url})
                await eventually(
                    lambda: not {"old", "b1", "bob"} & _values(gateway),
                    why="series of what was removed are still told",
                )
                assert {"new", "b2", "alice"} <= _values(gateway)
                assert "old" not in gateway.status()["p95"]
            finally:
                await gateway.stop()


def _values(gateway: Gateway) -> set[str]:
    """Every label value that is told."""
    return {value for _, labels in series_of(gateway.metrics_text()) for _, value in labels}


def _write(file: Path, backends: dict[str, str]) -> None:
    sections = {
        "listen": {"port": 0},
        "auth": {"keys_file": "keys.yaml"},
        "backends": [{"name": name, "url": url} for name, url in backends.items()],
        "log": {"format": "json"},
    }
    file.write_text(json.dumps(sections))


def _write_keys(file: Path, secrets: dict[str, str]) -> None:
    records = [
        {"name": name, "hash": "sha256:" + hashlib.sha256(secret.encode()).hexdigest()}
        for name, secret in secrets.items()
    ]
    file.write_text(json.dumps(records))
    file.chmod(0o600)


@in_loop
async def test_scraping_a_full_gateway_does_not_hold_up_a_stream() -> None:
    """The bound of law 10, ten times over, measured at the client: between two events of a stream."""
    behaviour = Behaviour(itl_s=0.01, tokens=150)
    async with (
        FakeEngine(behaviour=behaviour) as engine,
        running_gateway(engine, check=False) as slotgate,
    ):
        metrics = slotgate.gateway.metrics
        for model in range(60):
            for backend in range(8):
                metrics.series(f"m{model}", f"x{backend}").first_token(0.0, 0.1)
        gaps = asyncio.create_task(_gaps(slotgate))
        await engine.until_requests(1)
        for _ in range(10):
            answer = await slotgate.client.get("/metrics")
            assert answer.status_code == 200
            assert len(series_of(answer.text)) <= MOST_SERIES
            assert len(series_of(answer.text)) > MOST_SERIES / 2
            assert not gaps.done()
        assert max(await gaps) < 0.5 * slack()


async def _gaps(slotgate: Running) -> list[float]:
    loop = asyncio.get_running_loop()
    gaps, last = [], None
    async with slotgate.client.stream("POST", CHAT, json=body_for(CHAT, stream=True)) as answer:
        async for _ in answer.aiter_bytes():
            now = loop.time()
            if last is not None:
                gaps.append(now - last)
            last = now
    return gaps


@in_loop
async def test_states_versions_lag_and_what_engines_count_are_told() -> None:
    async with (
        FakeEngine("vllm") as up,
        FakeEngine() as down,
        running_gateway(up, down, check=False) as slotgate,
    ):
        await slotgate.chat()
        await down.go_down()
        await eventually(lambda: slotgate.metric("backend_state", backend="b2", state="down"))
        assert await slotgate.metric("backend_state", backend="b2") == 1
        assert await slotgate.metric("backend_state", backend="b1", state="up") == 1
        assert await slotgate.metric("build_info") == 1
        assert await slotgate.metric("config_reload_success") == 1
        assert 0 <= await slotgate.metric("event_loop_lag_seconds") < 5 * slack()
        told = "slotgate_backend_preemptions_total"

        async def counted() -> bool:
            return any(name == told for name, _ in await slotgate.metrics())

        await eventually(counted, why="the preemptions of vLLM are not told")
        texts = [one["text"] for one in (await slotgate.status())["findings"]]
        assert any(text.startswith("b2 is down") for text in texts)


@in_loop
async def test_the_loop_being_held_is_seen() -> None:
    async with FakeEngine() as engine, running_gateway(engine, check=False) as slotgate:
        await asyncio.sleep(0.3)
        time.sleep(0.4)  # noqa: ASYNC251  (the very thing that is to be seen)
        await eventually(
            lambda: _at_least(slotgate, "event_loop_lag_seconds", 0.1), why="0.4 s went unseen"
        )


async def _at_least(slotgate: Running, name: str, value: float) -> bool:
    return await slotgate.metric(name) >= value


@in_loop
async def test_metrics_and_status_are_for_admins_or_open_by_the_configuration() -> None:
    async with FakeEngine() as engine:
        async with running_gateway(engine, keys=["alice"]) as slotgate:
            for path in ("/metrics", "/status"):
                nobody = await slotgate.client.get(path, headers={"Authorization": ""})
                user = await slotgate.client.get(path)
                admin = await slotgate.client.get(path, headers=slotgate.header(ADMIN))
                statuses = (nobody.status_code, user.status_code, admin.status_code)
                assert statuses == (401, 403, 200)
        async with running_gateway(
            engine, keys=["alice"], auth={"metrics": "open"}, check=False
        ) as slotgate:
            answer = await slotgate.client.get("/metrics", headers={"Authorization": ""})
            assert answer.status_code == 200
            assert answer.headers["content-type"].startswith("text/plain; version=")
            nobody = await slotgate.client.get("/status", headers={"Authorization": ""})
            assert nobody.status_code == 401


@in_loop
async def test_a_recent_request_is_explained_with_what_each_backend_would_have_cost() -> None:
    async with (
        FakeEngine() as one,
        FakeEngine() as other,
        running_gateway(one, other) as slotgate,
    ):
        answer = await slotgate.client.post(
            CHAT, json=body_for(CHAT), headers={"x-request-id": "find-me"}
        )
        went_to = answer.headers["x-slotgate-backend"]
        found = await slotgate.client.get("/status", params={"explain": "find-me"})
        decision = found.json()["decision"]
        assert decision["outcome"] == "served"
        (attempt,) = decision["attempts"]
        assert attempt["backend"] == went_to
        (rival,) = attempt["others"]
        assert {went_to, rival["backend"]} == {"b1", "b2"}
        parts = ("wait_s", "load_s", "backlog_s", "own_s")
        assert abs(attempt["cost_s"] - sum(attempt[part] for part in parts)) < 0.001
        unknown = await slotgate.client.get("/status", params={"explain": "nobody"})
        assert unknown.json()["decision"] is None


@in_loop
async def test_only_the_last_thousand_are_remembered() -> None:
    async with FakeEngine(slots=8) as engine, running_gateway(engine) as slotgate:
        decisions = slotgate.gateway.metrics.decisions
        await asyncio.gather(*(_many(slotgate, 130, worker) for worker in range(8)))
        assert len(decisions) == 1_000
        assert decisions.find("0-0") is None
        assert decisions.find("0-129") is not None


async def _many(slotgate: Running, number: int, worker: int) -> None:
    for at in range(number):
        headers = {"x-request-id": f"{worker}-{at}"}
        answer = await slotgate.client.post(
            CHAT, json=body_for(CHAT, max_tokens=1), headers=headers
        )
        assert answer.status_code == 200


@in_loop
async def test_every_field_of_every_line_of_the_log_is_documented() -> None:
    page = (Path(__file__).parents[2] / "docs" / "logs.md").read_text(encoding="utf-8")
    documented = set(re.findall(r"`(\w+)(?:: \w+)?`", page))
    async with (
        FakeEngine() as engine,
        FakeEngine() as other,
        running_gateway(engine, other, check=False) as slotgate,
    ):
        await slotgate.chat(stream=True)
        await slotgate.chat(model="unknown")
        await slotgate.client.get("/" + "x" * 5_000)
        await other.go_down()
        await eventually(lambda: '"state":"down"' in slotgate.log.getvalue())
        lines = [json.loads(line) for line in slotgate.log.getvalue().splitlines()]
        assert {"request", "backend"} <= {line["event"] for line in lines}
        for line in lines:
            assert set(line) <= documented, set(line) - documented
            assert len(json.dumps(line)) < 1_000
