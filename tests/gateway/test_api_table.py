"""Every relayed path crossed with every way to be answered or refused: status, body, headers, outcome, and no leaks.

Each path has one gateway, through which all situations go one after the other. A request is followed by its id: the
log says what it ended as.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from gateway.core.errors import SITUATIONS, Family
from gateway.core.routes import ROUTES, Route
from tests.fakes.connection import Connection
from tests.fakes.engine import FakeEngine
from tests.fakes.gateway import Running, running_gateway
from tests.fakes.raw_client import HangupError, RawClient, RawResponse
from tests.fakes.running import eventually, in_loop
from tests.fakes.scripts import HANG, RST, chat_stream, hang, raw, respond
from tests.fakes.wires import WIRES
from tests.gateway.line_talk import body_for

SLOTS = 6
KEYS: list[dict[str, Any]] = [
    {"name": "alice"},
    {"name": "bob", "models": ["other"]},
    {"name": "carl", "max_in_flight": 1},
]
BODY_MIB = 0.0625
LARGE = "x" * 100_000
COUNT = "/v1/messages/count_tokens"


def kind_for(route: Route) -> str:
    """An engine that serves the path."""
    if route.family is Family.OLLAMA:
        return "ollama"
    return "llama-server" if route.native or route.path == COUNT else "openai"


@dataclass(slots=True)
class Table:
    """One path's gateway and engine, and the requests that go through them."""

    route: Route
    slotgate: Running
    engine: FakeEngine
    number: int = 0
    outcomes: dict[str, str] = field(default_factory=dict)

    @property
    def streams(self) -> bool:
        return self.route.path in WIRES

    @property
    def is_scripted(self) -> bool:
        """The engine's answers can be chosen: not where its probes ask the same path."""
        return self.route.method == "POST"

    @contextlib.asynccontextmanager
    async def asking(self, key: str | None = "alice", **fields: Any) -> AsyncIterator[RawClient]:
        """A client that has sent its request, under a fresh id."""
        self.number += 1
        headers = self.slotgate.header(key) if key else {}
        headers["x-request-id"] = self.id
        route, body, query = self.route, None, ""
        if route.method == "POST":
            document = body_for("/v1/messages" if route.path == COUNT else route.path, **fields)
            body = json.dumps(document).encode()
        else:
            query = f"?model={fields.get('model', 'm')}"
        async with await RawClient.connect(self.slotgate.port) as client:
            await client.request(route.method, route.path + query, headers, body)
            yield client

    @property
    def id(self) -> str:
        return f"request-{self.number}"

    async def ask(self, key: str | None = "alice", **fields: Any) -> RawResponse:
        async with self.asking(key, **fields) as client:
            return await client.response()

    def ends_as(self, outcome: str, request_id: str | None = None) -> None:
        """What the log must say of this request in the end: `check_outcomes`."""
        self.outcomes[request_id or self.id] = outcome

    async def check_outcomes(self) -> None:
        """Each request ended as it should, and said so once."""

        def found() -> list[tuple[str, str]]:
            lines = self.slotgate.log.getvalue().splitlines()
            logged = [json.loads(line) for line in lines if '"request_id":"request-' in line]
            ended = [(line["request_id"], line["outcome"]) for line in logged]
            return sorted(one for one in ended if one[0] in self.outcomes)

        wanted = sorted(self.outcomes.items())
        with contextlib.suppress(AssertionError):
            await eventually(lambda: len(found()) >= len(wanted), within_s=2)
        assert found() == wanted

    def check_refusal(self, answer: RawResponse, code: str) -> None:
        """A refusal of ours in the family's form."""
        row, family = SITUATIONS[code], self.route.family
        anthropic = family is Family.ANTHROPIC
        assert answer.status == ((anthropic and row.anthropic_status) or row.status)
        assert answer.ended == "whole"
        assert answer.header("content-type") == "application/json"
        assert answer.header("x-request-id") == self.id
        document = answer.json()
        if family is Family.OLLAMA:
            assert set(document) == {"error"}
            assert document["error"]
            return
        if anthropic:
            assert document["type"] == "error"
            assert document["error"]["type"] == row.anthropic_type
            assert document["request_id"] == answer.header("request-id") == self.id
        else:
            assert set(document["error"]) == {"message", "type", "param", "code"}
            assert document["error"]["type"] == row.type
            assert document["error"]["code"] == row.code
        assert document["error"]["message"]

    def check_retry_after(self, answer: RawResponse) -> None:
        assert 1 <= int(answer.header("retry-after") or 0) <= 60
        assert int(answer.header("retry-after-ms") or 0) > 0


async def answered(table: Table) -> None:
    answer = await table.ask()
    assert (answer.status, answer.ended) == (200, "whole")
    if table.is_scripted:
        assert answer.body == bytes(table.engine.requests[-1].sent)
    assert answer.header("x-slotgate-backend") == "b1"
    assert answer.header("x-slotgate-estimated") is None
    assert answer.header("x-request-id") == table.id
    assert answer.header("server") in {None, "llama.cpp"}
    table.ends_as("served")


async def streamed(table: Table) -> None:
    if not table.streams:
        return
    answer = await table.ask(stream=True)
    assert (answer.status, answer.ended) == (200, "whole")
    assert answer.body == bytes(table.engine.requests[-1].sent)
    assert answer.header("cache-control") == "no-cache, no-transform"
    assert answer.header("x-accel-buffering") == "no"
    table.ends_as("served")


async def without_a_key(table: Table) -> None:
    answer = await table.ask(None)
    table.check_refusal(answer, "invalid_api_key")
    assert answer.header("www-authenticate") == "Bearer"
    table.ends_as("unauthorized")


async def with_a_key_for_other_models(table: Table) -> None:
    answer = await table.ask("bob")
    table.check_refusal(answer, "model_not_allowed")
    table.ends_as("forbidden")


async def for_an_unknown_model(table: Table) -> None:
    answer = await table.ask(model="mm")
    table.check_refusal(answer, "model_not_found")
    assert b"'m'" in answer.body
    table.ends_as("unknown_model")


async def with_a_broken_body(table: Table) -> None:
    if not table.is_scripted:
        return
    table.number += 1
    headers = table.slotgate.header("alice") | {"x-request-id": table.id}
    async with await RawClient.connect(table.slotgate.port) as client:
        await client.request("POST", table.route.path, headers, b'{"model": "m"')
        table.check_refusal(await client.response(), "invalid_json")
    table.ends_as("bad_request")


async def with_too_large_a_body(table: Table) -> None:
    if not table.is_scripted:
        return
    answer = await table.ask(user=LARGE)
    table.check_refusal(answer, "body_too_large")
    assert b"limits.body_mib" in answer.body
    table.ends_as("bad_request")


async def above_a_keys_own_limit(table: Table) -> None:
    """The second of carl's at once. What makes no tokens is not counted."""
    if not table.route.generates:
        return
    release = asyncio.Event()
    table.engine.script(_held(release))
    async with table.asking("carl") as first:
        first_id = table.id
        await table.engine.until(lambda: table.engine.inside == 1)
        answer = await table.ask("carl")
        table.check_refusal(answer, "key_concurrency")
        table.check_retry_after(answer)
        table.ends_as("key_limit")
        release.set()
        assert (await first.response()).status == 200
    table.ends_as("served", first_id)


async def with_all_slots_taken(table: Table) -> None:
    """Refused where a permit is needed; answered where none is."""
    release = asyncio.Event()
    generating = "/api/chat" if table.engine.kind == "ollama" else "/v1/chat/completions"
    busy = Table(ROUTES[generating], table.slotgate, table.engine, 1000 + table.number)
    async with contextlib.AsyncExitStack() as stack:
        clients = []
        for _ in range(SLOTS):
            table.engine.script(_held(release), path=generating)
            clients.append(await stack.enter_async_context(busy.asking()))
        await table.engine.until(lambda: table.engine.inside == SLOTS)
        answer = await table.ask()
        if table.route.generates:
            table.check_refusal(answer, "gateway_queue_full")
            table.check_retry_after(answer)
            assert b"overloaded" in answer.body
            table.ends_as("queue_full")
        else:
            assert answer.status == 200
            table.ends_as("served")
        release.set()
        for client in clients:
            await client.response()
    await eventually(lambda: _is_idle(table))


async def refused_by_the_engine(table: Table) -> None:
    if not table.is_scripted:
        return
    for status in (400, 422, 500):
        table.engine.script(respond(status, {"error": {"message": f"no {status}"}}))
        answer = await table.ask()
        assert (answer.status, answer.json()) == (status, {"error": {"message": f"no {status}"}})
        assert answer.header("x-slotgate-backend") == "b1"
        table.ends_as("upstream_refused")


async def with_an_engine_that_is_busy(table: Table) -> None:
    if not table.is_scripted:
        return
    for status in (429, 503):
        table.engine.script(respond(status, {"error": "busy"}))
        answer = await table.ask()
        assert (answer.status, answer.json()) == (status, {"error": "busy"})
        assert 1 <= int(answer.header("retry-after") or 0) <= 60
        table.ends_as("upstream_refused")


async def with_an_engine_that_refuses_our_key(table: Table) -> None:
    if not table.is_scripted:
        return
    table.engine.script(respond(401, {"error": "the engine's secret words"}))
    answer = await table.ask()
    table.check_refusal(answer, "upstream_auth")
    assert b"secret" not in answer.body
    table.ends_as("upstream_failed")


async def with_an_engine_that_breaks_before_its_first_byte(table: Table) -> None:
    if not table.is_scripted:
        return
    table.engine.script(raw(b"HTTP/1.1 20", 0.02, RST))  # heard, so that it was no stale connection
    answer = await table.ask()
    if table.route.estimated:
        assert (answer.status, answer.header("x-slotgate-estimated")) == (200, "true")
        table.ends_as("served")
        return
    table.check_refusal(answer, "upstream_failed_ran")
    assert answer.header("x-should-retry") == "false"
    table.ends_as("upstream_failed")


async def with_an_engine_that_breaks_after_its_first_byte(table: Table) -> None:
    if not table.is_scripted:
        return
    head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 99\r\n\r\n"
    table.engine.script(raw(head + b'{"half', 0.05, RST))
    answer = await table.ask()
    assert (answer.status, answer.body) == (200, b'{"half')
    assert answer.ended != "whole"
    table.ends_as("upstream_broke")
    if table.streams:
        path = table.route.path
        table.engine.script(chat_stream(2, path=path, whole=False, then=RST))
        answer = await table.ask(stream=True)
        assert answer.ended == "whole"
        assert b"error" in answer.body.rstrip().rsplit(b"\n", 1)[-1]
        table.ends_as("upstream_broke")


async def with_a_client_that_leaves_before_the_first_byte(table: Table) -> None:
    if not table.is_scripted:
        return
    asked = len(table.engine.requests)
    table.engine.script(hang())
    async with table.asking() as client:
        seen = await table.engine.until_requests(asked + 1)
        client.rst()
    table.ends_as("client_gone")
    await table.engine.until(lambda: seen.gone_at is not None)


async def with_a_client_that_leaves_after_the_first_byte(table: Table) -> None:
    if not table.is_scripted:
        return
    asked = len(table.engine.requests)
    head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 99\r\n\r\n"
    table.engine.script(raw(head + b'{"half', HANG))
    async with table.asking() as client:
        await client.until(b'{"half')
        client.fin()
        await client.ending()
    table.ends_as("client_gone")
    seen = await table.engine.until_requests(asked + 1)
    await table.engine.until(lambda: seen.gone_at is not None)


async def while_draining(table: Table) -> None:
    table.slotgate.gateway.pipeline.draining = True
    try:
        answer = await table.ask()
    finally:
        table.slotgate.gateway.pipeline.draining = False
    table.check_refusal(answer, "draining")
    table.check_retry_after(answer)
    assert answer.header("connection") == "close"
    table.ends_as("draining")


async def with_no_backend_up(table: Table) -> None:
    await table.engine.go_down()
    table.slotgate.gateway.backends.poller.poke("b1")
    await eventually(lambda: not table.slotgate.gateway.backends.ready, within_s=20)
    answer = await table.ask()
    if table.route.estimated:
        assert (answer.status, answer.header("x-slotgate-estimated")) == (200, "true")
        assert answer.json()["input_tokens"] > 0
        table.ends_as("served")
        return
    table.check_refusal(answer, "no_backend")
    assert answer.header("retry-after") == "5"
    table.ends_as("no_backend")


SITUATION_ORDER: list[Callable[[Table], Awaitable[None]]] = [
    answered,
    streamed,
    without_a_key,
    with_a_key_for_other_models,
    for_an_unknown_model,
    with_a_broken_body,
    with_too_large_a_body,
    above_a_keys_own_limit,
    with_all_slots_taken,
    refused_by_the_engine,
    with_an_engine_that_is_busy,
    with_an_engine_that_refuses_our_key,
    with_an_engine_that_breaks_before_its_first_byte,
    with_an_engine_that_breaks_after_its_first_byte,
    with_a_client_that_leaves_before_the_first_byte,
    with_a_client_that_leaves_after_the_first_byte,
    while_draining,
    with_no_backend_up,  # last: what broke before may have opened the breaker
]


@pytest.mark.parametrize("path", sorted(ROUTES))
@in_loop
async def test_every_path_in_every_situation(path: str) -> None:
    route = ROUTES[path]
    async with (
        FakeEngine(kind_for(route), slots=SLOTS) as engine,
        running_gateway(
            {"name": "b1", "url": engine.url, "slots": SLOTS},
            keys=KEYS,
            admission={"queue": 0},
            limits={"body_mib": BODY_MIB},
            canaries=["the engine's secret words"],
        ) as slotgate,
    ):
        slotgate.models |= {"m", "m:latest", "other"}
        table = Table(route, slotgate, engine)
        for situation in SITUATION_ORDER:
            with _named(f"{path}, {situation.__name__}"):
                await situation(table)
        await table.check_outcomes()
        await eventually(lambda: _is_idle(table))
        upstream = slotgate.gateway.backends.known["b1"].upstream
        await eventually(lambda: upstream.open_connections == upstream.idle)


async def _is_idle(table: Table) -> bool:
    held = [await table.slotgate.metric(name) for name in ("in_flight", "queue_depth")]
    return not any(held) and not table.engine.inside


def _held(release: asyncio.Event) -> Any:
    async def script(connection: Connection) -> None:
        await release.wait()
        await connection.respond(200, {"ok": True})

    return script


@contextlib.contextmanager
def _named(situation: str) -> Any:
    """Says in which situation an assertion failed."""
    try:
        yield
    except (AssertionError, HangupError, TimeoutError) as error:
        error.add_note(situation)
        raise
