"""What a refusal is counted under: the key that was presented, and the model that was asked for."""

from __future__ import annotations

import pytest

from tests.fakes.engine import FakeEngine
from tests.fakes.gateway import running_gateway
from tests.fakes.running import in_loop
from tests.gateway.line_talk import CHAT, body_for


@in_loop
async def test_a_known_model_is_counted_under_its_name_also_for_a_key_that_may_not_use_it() -> None:
    async with (
        FakeEngine(models=["m", "n"]) as engine,
        running_gateway(engine, keys=["alice", {"name": "bob", "models": ["n"]}]) as slotgate,
    ):
        header = slotgate.header("bob")
        for model in ("m", "made-up"):
            await slotgate.client.post(CHAT, json=body_for(CHAT, model=model), headers=header)
        refused = await slotgate.metric("requests_total", model="m", outcome="forbidden")
        unknown = await slotgate.metric("requests_total", model="other", outcome="unknown_model")
        assert (refused, unknown) == (1, 1)


@pytest.mark.parametrize(
    ("path", "outcome"),
    [("/metrics", "forbidden"), ("/v1/models/m", "forbidden"), ("/v1/models/x", "unknown_model")],
)
@in_loop
async def test_what_is_refused_from_memory_is_counted_under_its_key(
    path: str, outcome: str
) -> None:
    async with (
        FakeEngine(models=["m", "n"]) as engine,
        running_gateway(engine, keys=["alice", {"name": "bob", "models": ["n"]}]) as slotgate,
    ):
        await slotgate.client.get(path, headers=slotgate.header("bob"))
        assert await slotgate.metric("key_requests_total", key="bob", outcome=outcome) == 1
        assert await slotgate.metric("key_requests_total", key="none") == 0
