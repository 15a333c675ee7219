"""Refusals are decided in the order of the contract: what is wrong in two ways is told the earlier one."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from tests.fakes.engine import FakeEngine
from tests.fakes.gateway import Running, running_gateway
from tests.fakes.raw_client import RawClient, RawResponse
from tests.fakes.running import eventually, in_loop
from tests.fakes.scripts import hang
from tests.gateway.line_talk import body_for

CHAT = "/v1/chat/completions"
KEYS: list[dict[str, Any]] = [
    {"name": "alice"},
    {"name": "busy", "max_in_flight": 1},
    {"name": "spent", "rpm": 1},
    {"name": "other", "models": ["other"]},
]
LARGE = 100_000


@dataclass(slots=True)
class Wrong:
    """A request, as the faults make it."""

    method: str = "POST"
    path: str = CHAT
    key: str | None = "alice"
    encoding: str | None = None
    size: int = 0
    body: bytes = b""
    model: str = "m"
    upgrade: bool = False


def _set(**fields: Any) -> Callable[[Wrong], None]:
    def change(request: Wrong) -> None:
        for name, value in fields.items():
            setattr(request, name, value)

    return change


# In the order of the contract. `spent` and `busy` are states of keys, `full` and `draining` of the gateway.
FAULTS: dict[str, tuple[Callable[[Wrong], None], int]] = {
    "OPTIONS": (_set(method="OPTIONS"), 204),
    "websocket": (_set(method="GET", path="/v1/responses", upgrade=True), 426),
    "unknown path": (_set(path="/nope"), 404),
    "wrong method": (_set(method="PUT"), 405),
    "no key": (_set(key=None), 401),
    "told to be large": (_set(size=LARGE), 413),
    "odd coding": (_set(encoding="snappy"), 415),
    "key is busy": (_set(key="busy"), 429),
    "draining": (_set(), 503),
    "all full": (_set(), 503),
    "broken body": (_set(body=b"{"), 400),
    "unknown model": (_set(model="mm"), 404),
    "other model": (_set(key="other"), 403),
    "key is spent": (_set(key="spent"), 429),
}
CODES = {
    "draining": "draining",
    "all full": "gateway_queue_full",
    "key is busy": "key_concurrency",
    "key is spent": "key_rate_limit",
    "unknown model": "model_not_found",
}
# Two faults that no request can have at once.
APART = (
    {"OPTIONS", "websocket"},
    {"OPTIONS", "wrong method"},
    {"websocket", "unknown path"},
    {"websocket", "wrong method"},
    {"no key", "key is busy"},
    {"no key", "other model"},
    {"no key", "key is spent"},
    {"key is busy", "other model"},
    {"key is busy", "key is spent"},
    {"other model", "key is spent"},
    {"unknown model", "other model"},
    {"broken body", "unknown model"},
    {"broken body", "other model"},
    {"all full", "key is busy"},  # its one request would hold the slot of another key
    {"all full", "other model"},  # its own pool is not full
    {"told to be large", "broken body"},
    {"told to be large", "unknown model"},
)
PAIRS = [
    (one, other)
    for number, one in enumerate(FAULTS)
    for other in list(FAULTS)[number + 1 :]
    if {one, other} not in APART
]


async def _ask(slotgate: Running, wrong: Wrong) -> RawResponse:
    headers = {"Content-Type": "application/json"}
    if wrong.key is not None:
        headers |= slotgate.header(wrong.key)
    if wrong.encoding is not None:
        headers["Content-Encoding"] = wrong.encoding
    if wrong.upgrade:
        headers |= {"Connection": "Upgrade", "Upgrade": "websocket"}
    fields = {"user": "x" * wrong.size} if wrong.size else {}
    body = wrong.body or json.dumps(body_for(CHAT, model=wrong.model, **fields)).encode()
    if wrong.method == "GET":
        body = b""
    async with await RawClient.connect(slotgate.port) as client:
        await client.request(wrong.method, wrong.path, headers, body)
        return await client.response()


@in_loop
async def test_of_two_faults_the_earlier_one_is_told() -> None:
    async with (
        FakeEngine("sglang", slots=1, models=["m"]) as engine,
        FakeEngine("sglang", slots=1, models=["other"]) as spare,
        running_gateway(
            engine, spare, keys=KEYS, admission={"queue": 0}, limits={"body_mib": 0.0625}
        ) as slotgate,
    ):
        slotgate.models |= {"m", "other"}
        await slotgate.client.post(CHAT, json=body_for(CHAT), headers=slotgate.header("spent"))
        for one, other in PAIRS:
            await _check(slotgate, [engine, spare], one, other)


async def _check(slotgate: Running, engines: list[FakeEngine], one: str, other: str) -> None:
    wrong = Wrong()
    for fault in (other, one):
        FAULTS[fault][0](wrong)
    held: list[asyncio.Task[Any]] = []
    if "all full" in (one, other):
        held = [asyncio.create_task(_hold(slotgate, "alice", model)) for model in ("m", "other")]
    elif "key is busy" in (one, other):
        held = [asyncio.create_task(_hold(slotgate, "busy", "other"))]
    for engine in engines:
        engine.always(hang())
    slotgate.gateway.pipeline.draining = False
    if held:
        await eventually(lambda: sum(engine.inside for engine in engines) == len(held))
    slotgate.gateway.pipeline.draining = "draining" in (one, other)
    try:
        answer = await asyncio.wait_for(_ask(slotgate, wrong), 10)
    finally:
        slotgate.gateway.pipeline.draining = False
        for task in held:
            task.cancel()
        await asyncio.gather(*held, return_exceptions=True)
        await eventually(lambda: _is_idle(slotgate, engines))
        for engine in engines:
            engine.normal()
    assert answer.status == FAULTS[one][1], f"{one}, then {other}: {answer.body!r}"
    if one in CODES:
        assert answer.json()["error"]["code"] == CODES[one], f"{one}, then {other}"


async def _hold(slotgate: Running, key: str, model: str) -> None:
    body = body_for(CHAT, model=model)
    await slotgate.client.post(CHAT, json=body, headers=slotgate.header(key))


async def _is_idle(slotgate: Running, engines: list[FakeEngine]) -> bool:
    held = [await slotgate.metric(name) for name in ("in_flight", "queue_depth")]
    return not any(held) and not any(engine.inside for engine in engines)


@pytest.mark.parametrize("path", ["/status", "/metrics"])
@in_loop
async def test_a_page_for_admins_is_a_401_without_a_key_and_a_403_with_another(path: str) -> None:
    async with FakeEngine() as engine, running_gateway(engine, keys=["alice"]) as slotgate:
        client = slotgate.client
        client.headers.pop("Authorization")
        assert (await client.get(path)).status_code == 401
        refused = await client.get(path, headers=slotgate.header("alice"))
        assert refused.json()["error"]["code"] == "admin_required"
        assert (await client.get(path, headers=slotgate.header("admin"))).status_code == 200
