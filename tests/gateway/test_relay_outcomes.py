"""Every way a request can end, reached through the whole gateway: the same word in the metric, for the key, in the log."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from gateway.core.errors import Outcome
from tests.fakes.engine import FakeEngine
from tests.fakes.gateway import Running, running_gateway
from tests.fakes.raw_client import RawClient, RawResponse, encode
from tests.fakes.running import eventually, in_loop
from tests.fakes.scripts import FIN, RST, chat_stream, drop, hang, respond
from tests.gateway.line_talk import CHAT, asking

Play = Callable[[Running, FakeEngine], Awaitable[RawResponse | None]]


@dataclass(frozen=True, slots=True)
class Way:
    """One way to an outcome: the status that the client sees, and how to get there."""

    status: int | None
    play: Play
    config: dict[str, Any] = field(default_factory=dict)
    key: str = "alice"  # whose request it is


async def _ask(slotgate: Running, key: str | None = "alice", **fields: Any) -> RawResponse:
    async with await asking(slotgate, key=key, **fields) as client:
        return await client.response()


def _after(script: Any, **fields: Any) -> Play:
    """One request, answered by this script."""

    async def play(slotgate: Running, engine: FakeEngine) -> RawResponse:
        engine.script(script)
        return await _ask(slotgate, **fields)

    return play


async def _leave(slotgate: Running, engine: FakeEngine) -> None:
    engine.script(hang())
    async with await asking(slotgate, key="alice") as client:
        await engine.until_requests(1)
        client.rst()


async def _with_a_wrong_key(slotgate: Running, _: FakeEngine) -> RawResponse:
    header = {"Authorization": "Bearer sk-sg-wrong"}
    return await _with(slotgate, header, b"{}")


async def _with(slotgate: Running, headers: dict[str, str], body: bytes) -> RawResponse:
    async with await RawClient.connect(slotgate.port) as client:
        await client.send(encode("POST", CHAT, headers, body))
        return await client.response()


async def _held(slotgate: Running, engine: FakeEngine) -> RawResponse:
    """Behind a request of the same key that holds the only slot."""
    engine.script(hang())
    async with await asking(slotgate, key="alice"):
        await engine.until(lambda: engine.inside)
        return await _ask(slotgate)


async def _when_down(slotgate: Running, engine: FakeEngine) -> RawResponse:
    await engine.go_down()
    await eventually(lambda: _is_down(slotgate))
    return await _ask(slotgate)


async def _is_down(slotgate: Running) -> bool:
    return await slotgate.metric("backend_up") == 0


async def _when_draining(slotgate: Running, _: FakeEngine) -> RawResponse:
    slotgate.gateway.pipeline.draining = True
    return await _ask(slotgate)


ONE = {"admission": {"queue": 0}}
WAYS = {
    Outcome.SERVED: Way(200, _after(chat_stream(2), stream=True)),
    Outcome.CLIENT_GONE: Way(None, _leave),
    Outcome.UNAUTHORIZED: Way(401, _with_a_wrong_key, key="none"),
    Outcome.FORBIDDEN: Way(403, lambda s, _: _ask(s, "bob"), key="bob"),
    Outcome.BAD_REQUEST: Way(400, lambda s, _: _with(s, s.header("alice"), b"[]")),
    Outcome.UNKNOWN_MODEL: Way(404, lambda s, _: _ask(s, model="zz")),
    Outcome.KEY_LIMIT: Way(429, _held, {"key": {"max_in_flight": 1}}),
    Outcome.QUEUE_FULL: Way(503, _held, ONE),
    Outcome.QUEUE_TIMEOUT: Way(503, _held, {"admission": {"queue": 1, "max_wait_s": 0.2}}),
    Outcome.NO_BACKEND: Way(503, _when_down),
    Outcome.DRAINING: Way(503, _when_draining),
    Outcome.UPSTREAM_REFUSED: Way(422, _after(respond(422, {"error": "no"}))),
    Outcome.UPSTREAM_FAILED: Way(502, _after(drop(RST))),
    Outcome.UPSTREAM_TIMEOUT: Way(504, _after(hang()), {"timeouts": {"first_byte_s": 0.2}}),
    Outcome.UPSTREAM_BROKE: Way(200, _after(chat_stream(2, whole=False, then=FIN), stream=True)),
}


def test_there_is_a_way_to_every_outcome() -> None:
    assert set(WAYS) == set(Outcome)


@pytest.mark.parametrize("outcome", Outcome)
def test_a_request_ends_in_one_outcome_that_metric_key_and_log_agree_on(outcome: Outcome) -> None:
    way = WAYS[outcome]
    config = dict(way.config)
    keys = [{"name": "alice", **config.pop("key", {})}, {"name": "bob", "models": ["n"]}]

    @in_loop
    async def check() -> None:
        async with (
            FakeEngine("openai", slots=1, models=["m", "n"]) as engine,
            running_gateway(
                {"url": engine.url, "slots": 1, "models": ["m", "n"]},
                keys=keys,
                **config,
            ) as slotgate,
        ):
            slotgate.models |= {"m", "n"}
            answer = await way.play(slotgate, engine)
            assert (answer and answer.status) == way.status
            await eventually(lambda: slotgate.metric("requests_total", outcome=outcome.value))
            assert await slotgate.metric("requests_total", outcome=outcome.value) == 1
            by_key = await slotgate.metric("key_requests_total", outcome=outcome.value, key=way.key)
            assert by_key == 1
            await eventually(lambda: _logged(slotgate).count(outcome.value) == 1)

    check()


def _logged(slotgate: Running) -> list[str]:
    outcomes = []
    for line in slotgate.log.getvalue().splitlines():
        with contextlib.suppress(ValueError):
            outcomes.append(json.loads(line).get("outcome"))
    return outcomes


@in_loop
async def test_requests_that_end_together_are_counted_each_for_itself() -> None:
    async with FakeEngine(slots=4) as engine, running_gateway(engine, **ONE) as slotgate:
        engine.script(
            *(chat_stream(2), respond(422, {"error": "no"}), drop(RST)),
            chat_stream(2, whole=False, then=FIN),
        )
        await asyncio.gather(*(_ask(slotgate, None, stream=True) for _ in range(4)))
        ended = {"served": 1, "upstream_refused": 1, "upstream_failed": 1, "upstream_broke": 1}
        assert await slotgate.outcomes() == ended
        slotgate.sent = 4
