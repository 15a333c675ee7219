"""Law 1: every permit comes back, on every route, whatever way the request ends. Cases B007, B008."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import pytest

from tests.fakes.connection import Script
from tests.fakes.engine import FakeEngine
from tests.fakes.gateway import Running, running_gateway
from tests.fakes.raw_client import HangupError, RawClient
from tests.fakes.running import eventually, in_loop
from tests.fakes.scripts import HANG, RST, chat_stream, drop, events_of, hang, respond
from tests.gateway.line_talk import GENERATING, STREAMING, asking

ROUNDS = 5  # of each cell; with two permits, one that is lost twice refuses the third


async def _to_its_end(client: RawClient, _: FakeEngine) -> None:
    with contextlib.suppress(HangupError):
        await client.response()


async def _leave_in_silence(client: RawClient, engine: FakeEngine) -> None:
    await engine.until(lambda: engine.inside)
    client.rst()


async def _leave_with_all(client: RawClient, engine: FakeEngine) -> None:
    """As Codex does: it closes at the last event, and does not wait for the end of the body."""
    await client.head()
    await client.until(events_of(engine.requests[-1].path, 2)[-1].rstrip())
    client.fin()


async def _leave_in_the_stream(client: RawClient, _: FakeEngine) -> None:
    await client.head()
    await client.chunk()
    client.fin()


@dataclass(frozen=True, slots=True)
class Ending:
    """One way for a request to end: what the engine does, what the client does, and what it is called."""

    outcome: str
    script: Callable[[str], Script] | None = None
    client: Callable[[RawClient, FakeEngine], Awaitable[None]] = _to_its_end
    stream: bool = False


ENDINGS = {
    "a JSON answer": Ending("served"),
    "a whole stream": Ending("served", stream=True),
    "an engine's 400": Ending("upstream_refused", lambda _: respond(400, {"error": "no"})),
    "an engine's 500": Ending("upstream_refused", lambda _: respond(500, {"error": "oh"})),
    "a reset before headers": Ending("upstream_failed", lambda _: drop(RST)),
    "a reset in the stream": Ending(
        "upstream_broke",
        lambda path: chat_stream(2, 0.01, path=path, whole=False, then=RST),
        stream=True,
    ),
    "a client that leaves before headers": Ending(
        "client_gone", lambda _: hang(), _leave_in_silence
    ),
    "a client that leaves in the stream": Ending(
        "client_gone",
        lambda path: chat_stream(2, path=path, whole=False, then=HANG),
        _leave_in_the_stream,
        stream=True,
    ),
}
ENDINGS["a client that leaves with the last event"] = Ending(
    "served", lambda path: chat_stream(2, path=path, then=HANG), _leave_with_all, stream=True
)
CELLS = [
    (path, name)
    for path in GENERATING
    for name, ending in ENDINGS.items()
    if path in STREAMING or not ending.stream
]


@pytest.mark.parametrize(("path", "name"), CELLS, ids=lambda part: part.replace(" ", "-"))
@in_loop
async def test_a_permit_comes_back_after(path: str, name: str) -> None:
    ending = ENDINGS[name]
    keys = [{"name": "alice", "max_in_flight": 2}]

    async with (
        FakeEngine("openai") as engine,
        running_gateway(
            _with_two_slots(engine), keys=keys, admission={"queue": 0}, check=False
        ) as slotgate,
    ):
        for number in range(1, ROUNDS + 1):
            if ending.script is not None:
                engine.script(ending.script(path))
            fields = {"stream": True} if ending.stream else {}
            async with await asking(slotgate, path, **fields) as client:
                await ending.client(client, engine)
            await _ends_as(slotgate, ending.outcome, number)
        engine.normal()
        async with await asking(slotgate, path) as client:
            assert (await client.response()).status == 200


def _with_two_slots(engine: FakeEngine) -> dict[str, object]:
    return {"url": engine.url, "slots": 2, "models": ["m"]}


async def _ends_as(slotgate: Running, outcome: str, count: int) -> None:
    """It is called so, and every gauge is zero within a second of the client's seeing the end."""

    async def is_counted() -> bool:
        return sum((await slotgate.outcomes()).values()) >= count

    await eventually(is_counted, within_s=1)
    await eventually(lambda: _at_rest(slotgate), within_s=1, why="a gauge stays above zero")
    assert await slotgate.outcomes() == {outcome: count}


async def _at_rest(slotgate: Running) -> bool:
    held = [await slotgate.metric(name) for name in ("in_flight", "queue_depth", "settling")]
    usage = slotgate.gateway.pipeline.quota.limits.usage["alice"]
    upstream = slotgate.gateway.backends.known["b1"].upstream
    return not any(held) and usage.in_flight == 0 and upstream.open_connections == upstream.idle


@in_loop
async def test_timeouts_of_the_engine_never_lock_a_key() -> None:
    keys = [{"name": "alice", "max_in_flight": 5}]
    timeouts = {"first_byte_s": 0.05}
    async with (
        FakeEngine(slots=5) as engine,
        running_gateway(engine, keys=keys, timeouts=timeouts) as slotgate,
    ):
        engine.script(*[hang()] * 10)
        answers = await asyncio.gather(*(slotgate.chat() for _ in range(5)))
        answers += await asyncio.gather(*(slotgate.chat() for _ in range(5)))
        for answer in answers:
            assert answer.status_code == 504
            assert answer.json()["error"]["code"] == "upstream_timeout"
            assert answer.headers["x-should-retry"] == "false"
        assert (await slotgate.chat()).status_code == 200
        assert await slotgate.outcomes() == {"upstream_timeout": 10, "served": 1}


@in_loop
async def test_what_was_served_teaches_how_long_a_permit_is_held() -> None:
    """Else a Retry-After and an expected wait would be those of the prior, ten seconds each."""
    async with FakeEngine(slots=2) as engine, running_gateway(engine) as slotgate:
        for stream in (True, False):
            await slotgate.chat(stream=stream)
        backend = (await slotgate.status())["backends"][0]
        assert 0 < backend["service_s"] < 2
