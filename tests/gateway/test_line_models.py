"""The list of models: the union, from memory, however the engines are. B093, B094."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import AsyncIterator
from typing import Any

from tests.fakes.connection import Connection, Script
from tests.fakes.engine import FakeEngine
from tests.fakes.gateway import Running, running_gateway
from tests.fakes.running import eventually, in_loop, slack
from tests.fakes.scripts import hang, respond


def lists(*models: str, **extra: Any) -> Script:
    """An engine's answer to GET /v1/models."""
    data = [{"id": name, "object": "model", **extra} for name in models]
    return respond(200, {"object": "list", "data": data})


async def ids(slotgate: Running, key: str | None = None) -> list[str]:
    answer = await slotgate.client.get("/v1/models", headers=slotgate.header(key))
    assert answer.status_code == 200
    return [model["id"] for model in answer.json()["data"]]


@contextlib.asynccontextmanager
async def engines(*served: Script) -> AsyncIterator[list[FakeEngine]]:
    async with contextlib.AsyncExitStack() as stack:
        found = []
        for script in served:
            engine = await stack.enter_async_context(FakeEngine("vllm"))
            engine.always(script, path="/v1/models")
            found.append(engine)
        yield found


@in_loop
async def test_the_list_is_the_union_without_doubles_in_a_stable_order_with_the_extras() -> None:
    async with (
        engines(lists("a", "b"), lists("b", "c", max_model_len=4096), lists("c", "d")) as found,
        running_gateway(*found, models={"z": {"ids": ["a"]}}) as slotgate,
    ):
        slotgate.models |= set("abcdz")
        await eventually(lambda: _all_there(slotgate, 5))
        first = await ids(slotgate)
        assert sorted(first) == ["a", "b", "c", "d", "z"]
        assert len(first) == len(set(first))
        for _ in range(5):
            assert await ids(slotgate) == first
        answer = await slotgate.client.get("/v1/models/c")
        assert answer.json()["id"] == "c"
        assert answer.json()["max_model_len"] == 4096
        missing = await slotgate.client.get("/v1/models/e")
        assert missing.status_code == 404
        assert missing.json()["error"]["code"] == "model_not_found"


@in_loop
async def test_the_models_of_an_engine_that_fails_for_a_moment_stay_listed() -> None:
    async with (
        engines(lists("a"), lists("b")) as found,
        running_gateway(*found) as slotgate,
    ):
        slotgate.models |= {"a", "b"}
        await eventually(lambda: _all_there(slotgate, 2))
        await found[1].go_down()
        await slotgate.chat(model="b")
        assert sorted(await ids(slotgate)) == ["a", "b"]
        answer = await slotgate.chat(model="b")
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "no_backend"


@in_loop
async def test_garbage_from_one_engine_hides_nothing_of_another() -> None:
    garbage = respond(200, b"<html>", content_type="text/html")
    odd = respond(200, {"models": [{"name": "q"}]})
    async with (
        engines(lists("a"), garbage, odd) as found,
        running_gateway(*found) as slotgate,
    ):
        slotgate.models |= {"a", "q"}
        await eventually(lambda: _all_there(slotgate, 1))
        assert "a" in await ids(slotgate)


@in_loop
async def test_while_nothing_is_known_the_list_is_a_503_and_not_empty() -> None:
    with _black_hole() as url:
        async with running_gateway(url, wait=False) as slotgate:
            answer = await slotgate.client.get("/v1/models")
            assert answer.status_code == 503
            assert answer.headers["retry-after"] == "5"
            chat = await slotgate.client.post(
                "/v1/chat/completions", json={"model": "m", "messages": []}
            )
            assert chat.status_code == 503
            assert chat.json()["error"]["code"] == "no_backend"


@in_loop
async def test_a_key_sees_the_models_it_may_use() -> None:
    keys: list[Any] = ["alice", {"name": "bob", "models": ["b"]}]
    async with engines(lists("a", "b")) as found, running_gateway(*found, keys=keys) as slotgate:
        slotgate.models |= {"a", "b"}
        await eventually(lambda: _all_there(slotgate, 2))
        assert await ids(slotgate, "bob") == ["b"]
        headers = slotgate.header("bob")
        refused = await slotgate.client.post(
            "/v1/chat/completions", json={"model": "a", "messages": []}, headers=headers
        )
        assert refused.status_code == 403
        assert refused.json()["error"]["code"] == "model_not_allowed"
        unknown = await slotgate.client.post(
            "/v1/chat/completions", json={"model": "aa", "messages": []}, headers=headers
        )
        assert unknown.status_code == 404
        assert "'b'" in unknown.json()["error"]["message"]
        assert "'a'" not in unknown.json()["error"]["message"]


@in_loop
async def test_the_list_waits_for_no_engine() -> None:
    """One swallows connections, one answers nothing: a hundred lists come from memory."""

    async def slow(connection: Connection) -> None:
        await connection.pause(10)

    with _black_hole() as url:
        async with (
            FakeEngine() as engine,
            FakeEngine("openai") as mute,
            running_gateway(engine, mute, url, wait=False) as slotgate,
        ):
            mute.always(slow, path="*")
            mute.always(hang(), path="/v1/models")
            await eventually(lambda: slotgate.gateway.backends.ready)
            took = []
            for _ in range(100):
                since = time.monotonic()
                assert await ids(slotgate)
                took.append(time.monotonic() - since)
            assert sorted(took)[98] < 0.5 * slack()


async def _all_there(slotgate: Running, count: int) -> bool:
    answer = await slotgate.client.get("/v1/models")
    return answer.status_code == 200 and len(answer.json()["data"]) >= count


@contextlib.contextmanager
def _black_hole() -> Any:
    """A listener whose queue is full: connecting to it never ends."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket())
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        for _ in range(4):
            filler = stack.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(listener.getsockname())
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
