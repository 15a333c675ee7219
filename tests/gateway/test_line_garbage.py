"""A request that is over is gone: what it held goes with it, without the collector."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator

import pytest

from gateway.runtime.exchange import Exchange
from tests.fakes.engine import FakeEngine
from tests.fakes.gateway import running_gateway
from tests.fakes.running import eventually, in_loop
from tests.fakes.scripts import respond
from tests.gateway.line_talk import CHAT, body_for


@pytest.fixture
def left() -> Iterator[Callable[[], int]]:
    """How many exchanges of this test are still there; the collector does not run meanwhile."""
    gc.collect()
    gc.disable()
    gc.freeze()  # what other tests hold is not looked at: late in a long run that would hold the loop
    yield _exchanges
    gc.enable()


def _exchanges() -> int:
    return sum(isinstance(one, Exchange) for one in gc.get_objects())


@pytest.mark.parametrize("fields", [{}, {"stream": True}, {"model": "none"}])
@in_loop
async def test_nothing_of_an_answered_request_waits_for_the_collector(
    fields: dict[str, object], left: Callable[[], int]
) -> None:
    async with FakeEngine() as engine, running_gateway(engine) as slotgate:
        for _ in range(3):
            answer = await slotgate.client.post(CHAT, json=body_for(CHAT, **fields))
            assert answer.status_code == (404 if "model" in fields else 200)
        await eventually(lambda: not left(), within_s=1)


@in_loop
async def test_nothing_of_a_refused_request_waits_for_the_collector(
    left: Callable[[], int],
) -> None:
    async with FakeEngine() as engine, running_gateway(engine) as slotgate:
        engine.script(*[respond(400, {"error": "no"})] * 3)
        for _ in range(3):
            assert (await slotgate.client.post(CHAT, json=body_for(CHAT))).status_code == 400
        await eventually(lambda: not left(), within_s=1)
