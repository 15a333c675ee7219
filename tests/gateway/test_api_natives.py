"""What is one engine's own, token counts, forms and lists: to whom it goes, and what is answered from memory."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from typing import Any

import httpx2
import pytest

from tests.fakes.connection import Connection
from tests.fakes.engine import FakeEngine
from tests.fakes.gateway import Running, running_gateway
from tests.fakes.running import eventually, in_loop, slack
from tests.fakes.scripts import hang, respond
from tests.gateway.line_talk import body_for

COUNT = "/v1/messages/count_tokens"
LLAMA_POSTS = ("/infill", "/completion", "/tokenize", "/detokenize", "/apply-template")
HELLO = [{"role": "user", "content": "hello " * 100}]
BOUNDARY = "xx"


async def post(
    slotgate: Running, path: str, body: Any, headers: Mapping[str, str] | None = None
) -> httpx2.Response:
    return await slotgate.client.post(path, json=body, headers=dict(headers or {}))


def paths_of(engine: FakeEngine) -> list[str]:
    return [request.path for request in engine.requests]


# llama-server's own paths


@pytest.mark.parametrize("path", LLAMA_POSTS)
@in_loop
async def test_a_llama_servers_own_path_goes_to_llama_servers_only(path: str) -> None:
    async with (
        FakeEngine("vllm") as vllm,
        FakeEngine("llama-server") as llama,
        FakeEngine("ollama") as ollama,
        running_gateway(vllm, llama, ollama) as slotgate,
    ):
        for _ in range(4):
            answer = await post(slotgate, path, body_for(path, model="m", id_slot=0))
            assert answer.status_code == 200
            assert answer.content == bytes(llama.requests[-1].sent)
            assert answer.headers["x-slotgate-backend"] == "b2"
            assert "id_slot" not in json.loads(llama.requests[-1].body)
        assert paths_of(llama) == [path] * 4
        assert vllm.requests == ollama.requests == []


@pytest.mark.parametrize("path", LLAMA_POSTS)
@in_loop
async def test_an_editor_that_names_no_model_gets_the_default_of_the_llama_servers(
    path: str,
) -> None:
    """Two models there are; one of them is on a llama-server."""
    async with (
        FakeEngine("vllm", models=["big"]) as vllm,
        FakeEngine("llama-server", models=["small"]) as llama,
        running_gateway(vllm, llama, default_model="big") as slotgate,
    ):
        body = body_for(path)
        del body["model"]
        assert (await post(slotgate, path, body)).status_code == 200
        assert json.loads(llama.requests[0].body) == body
        chat = {"messages": HELLO}
        assert (await post(slotgate, "/v1/chat/completions", chat)).status_code == 200
        assert len(vllm.requests) == 1


@in_loop
async def test_a_model_that_no_llama_server_has_is_unknown_there_and_the_nearest_is_named() -> None:
    async with (
        FakeEngine("vllm", models=["qwen-big"]) as vllm,
        FakeEngine("llama-server", models=["qwen-small"]) as llama,
        running_gateway(vllm, llama) as slotgate,
    ):
        answer = await post(slotgate, "/infill", body_for("/infill", model="qwen-big"))
        assert answer.status_code == 404
        assert answer.json()["error"]["code"] == "model_not_found"
        assert "'qwen-small'" in answer.json()["error"]["message"]
        assert vllm.requests == llama.requests == []


@in_loop
async def test_without_a_llama_server_its_paths_are_not_there() -> None:
    async with FakeEngine("vllm") as engine, running_gateway(engine) as slotgate:
        answer = await post(slotgate, "/tokenize", {"content": "a"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")
        shown = await post(slotgate, "/api/show", {"model": "m"})
        assert shown.status_code == 404
        assert isinstance(shown.json()["error"], str)
        assert engine.requests == []


@in_loop
async def test_props_are_those_of_the_model_that_the_query_names() -> None:
    async with (
        FakeEngine("llama-server", models=["a"]) as one,
        FakeEngine("llama-server", models=["b"]) as two,
        running_gateway(one, two, models={"coder": {"ids": ["b"]}}) as slotgate,
    ):
        for query in ("model=b&autoload=false", "model=coder&autoload=false"):
            answer = await slotgate.client.get(f"/props?{query}")
            assert answer.status_code == 200, answer.text
            assert answer.json()["model_alias"] == "b"
            assert answer.headers["x-slotgate-backend"] == "b2"
            assert [r.query for r in two.received if r.query] == ["model=b&autoload=false"] * (
                1 if "model=b" in query else 2
            )


@in_loop
async def test_what_makes_no_tokens_never_waits_for_a_slot() -> None:
    """Case B016, with a queue that is full too."""
    async with (
        FakeEngine("llama-server", slots=1) as engine,
        running_gateway(engine, admission={"queue": 1}) as slotgate,
    ):
        engine.always(hang(), path="/v1/chat/completions")
        chats = [asyncio.create_task(slotgate.chat()) for _ in range(2)]
        await eventually(lambda: slotgate.metric("queue_depth"))
        since = time.monotonic()
        answers = await asyncio.gather(
            *(post(slotgate, "/tokenize", {"content": "a b"}) for _ in range(20)),
            *(post(slotgate, COUNT, {"model": "m", "messages": HELLO}) for _ in range(22)),
            slotgate.client.get("/props"),
            slotgate.client.get("/v1/models"),
        )
        assert time.monotonic() - since < 5 * slack()
        assert {answer.status_code for answer in answers} == {200}
        assert await slotgate.metric("in_flight") == 1
        for chat in chats:
            chat.cancel()
        await asyncio.gather(*chats, return_exceptions=True)


@in_loop
async def test_what_makes_no_tokens_is_asked_elsewhere_when_an_engine_breaks() -> None:
    async with (
        FakeEngine("llama-server") as one,
        FakeEngine("llama-server") as two,
        running_gateway(one, two) as slotgate,
    ):
        await one.stop_listening()
        for connection in one.connections:
            connection.rst()
        answers = [await post(slotgate, "/tokenize", {"content": "a"}) for _ in range(4)]
        assert [answer.status_code for answer in answers] == [200] * 4


# Counts


@in_loop
async def test_a_count_comes_from_the_engine_that_can_count() -> None:
    async with (
        FakeEngine("ollama") as ollama,
        FakeEngine("vllm") as vllm,
        running_gateway(
            {"name": "b1", "url": ollama.url, "models": ["m"]}, vllm, check=False
        ) as slotgate,
    ):
        for _ in range(4):
            answer = await post(slotgate, COUNT, {"model": "m", "messages": HELLO})
            assert answer.json() == {"input_tokens": 32}
            assert answer.headers["x-slotgate-backend"] == "b2"
            assert "x-slotgate-estimated" not in answer.headers
        assert ollama.requests == []


@pytest.mark.parametrize("model", ["m", "m:latest"])
@in_loop
async def test_a_count_for_what_only_ollama_serves_is_an_estimate_that_says_so(model: str) -> None:
    async with (
        FakeEngine("ollama", models=["m:latest"]) as engine,
        running_gateway(engine) as slotgate,
    ):
        slotgate.models |= {"m", "m:latest"}
        answer = await post(slotgate, COUNT, {"model": model, "messages": HELLO})
        assert answer.status_code == 200
        assert answer.headers["x-slotgate-estimated"] == "true"
        assert answer.headers["request-id"]
        assert 100 <= answer.json()["input_tokens"] <= 250
        assert engine.requests == []
        missing = await post(slotgate, COUNT, {"model": "zz", "messages": HELLO})
        assert missing.status_code == 404
        assert missing.json()["error"]["type"] == "not_found_error"


@in_loop
async def test_a_count_that_takes_longer_than_a_second_is_estimated() -> None:
    async with FakeEngine("llama-server") as engine, running_gateway(engine) as slotgate:
        engine.script(hang(), path=COUNT)
        since = time.monotonic()
        answer = await post(slotgate, COUNT, {"model": "m", "messages": HELLO})
        assert 0.9 <= time.monotonic() - since < 10 * slack()
        assert answer.headers["x-slotgate-estimated"] == "true"
        await engine.until(lambda: engine.requests[0].gone_at is not None)


@in_loop
async def test_an_engine_without_a_count_says_so_once_and_is_then_spared() -> None:
    """Case B095: its 404 is passed on."""
    async with FakeEngine("vllm") as engine, running_gateway(engine) as slotgate:
        engine.script(respond(404, {"detail": "Not Found"}), path=COUNT)
        first = await post(slotgate, COUNT, {"model": "m", "messages": HELLO})
        assert (first.status_code, first.json()) == (404, {"detail": "Not Found"})
        second = await post(slotgate, COUNT, {"model": "m", "messages": HELLO})
        assert second.headers["x-slotgate-estimated"] == "true"
        assert len(engine.requests) == 1


@in_loop
async def test_a_path_that_one_build_lacks_goes_to_another_from_then_on() -> None:
    async with (
        FakeEngine("vllm") as one,
        FakeEngine("vllm") as two,
        running_gateway(one, two) as slotgate,
    ):
        for engine in (one, two):
            engine.always(_rerank_if(engine is two), path="/v1/rerank")
        statuses = [
            (await post(slotgate, "/v1/rerank", body_for("/v1/rerank"))).status_code
            for _ in range(8)
        ]
        assert statuses.count(404) <= 1
        assert statuses[2:] == [200] * 6
        assert (await slotgate.chat()).status_code == 200


def _rerank_if(able: bool) -> Any:
    return respond(200, {"results": []}) if able else respond(404, {"detail": "Not Found"})


# Forms


@pytest.mark.parametrize("path", ["/v1/audio/transcriptions", "/v1/images/generations"])
@in_loop
async def test_a_form_goes_where_its_model_field_says_and_arrives_byte_for_byte(path: str) -> None:
    async with (
        FakeEngine("openai", models=["chat"]) as one,
        FakeEngine("openai", models=["whisper"]) as two,
        running_gateway(one, two, models={"ear": {"ids": ["whisper"]}}) as slotgate,
    ):
        for name in ("whisper", "ear"):
            answer = await slotgate.client.post(path, content=_form(name), headers=_form_type())
            assert answer.status_code == 200
            assert answer.headers["x-slotgate-backend"] == "b2"
            assert two.requests[-1].body == _form("whisper")
            assert two.requests[-1].headers["content-type"] == _form_type()["content-type"]
        unknown = await slotgate.client.post(path, content=_form("nose"), headers=_form_type())
        assert unknown.status_code == 404
        assert one.requests == []


def _form(model: str) -> bytes:
    parts = [
        (
            b'Content-Disposition: form-data; name="file"; filename="a.wav"\r\n'
            b'Content-Type: audio/wav\r\n\r\nRIFF\x00"id_slot":0\r\n--x'
        ),
        b'Content-Disposition: form-data; name="model"\r\n\r\n' + model.encode(),
    ]
    edge = b"--" + BOUNDARY.encode()
    return b"".join(edge + b"\r\n" + part + b"\r\n" for part in parts) + edge + b"--\r\n"


def _form_type() -> dict[str, str]:
    return {"content-type": f"multipart/form-data; boundary={BOUNDARY}"}


@in_loop
async def test_a_transcription_that_is_streamed_passes_without_a_mark_at_its_end() -> None:
    async def script(connection: Connection) -> None:
        await connection.begin(200, content_type="text/event-stream")
        await connection.body(b'data: {"type":"transcript.text.delta","delta":"a"}\n\n')
        await connection.body(b'data: {"type":"transcript.text.done","text":"a"}\n\n')
        await connection.end()

    async with FakeEngine("openai") as engine, running_gateway(engine) as slotgate:
        engine.script(script)
        answer = await slotgate.client.post(
            "/v1/audio/transcriptions", content=_form("m"), headers=_form_type()
        )
        assert answer.status_code == 200
        assert answer.content == bytes(engine.requests[0].sent)
        assert await slotgate.outcomes() == {"served": 1}


@in_loop
async def test_speech_passes_as_the_bytes_it_is() -> None:
    sound = bytes(range(256)) * 500
    async with FakeEngine("openai") as engine, running_gateway(engine) as slotgate:
        engine.script(respond(200, sound, content_type="audio/mpeg", framing="chunked"))
        answer = await post(slotgate, "/v1/audio/speech", body_for("/v1/audio/speech"))
        assert answer.content == sound
        assert answer.headers["content-type"] == "audio/mpeg"


# A prompt that is too long


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages"])
@in_loop
async def test_a_prompt_that_is_too_long_gets_the_code_that_agents_compact_on(
    path: str, stream: bool
) -> None:
    told = {
        "code": 400,
        "message": "request (4031 tokens) exceeds the available context size (2048 tokens), try increasing it",
        "type": "exceed_context_size_error",
        "n_prompt_tokens": 4031,
    }
    async with FakeEngine() as engine, running_gateway(engine) as slotgate:
        engine.script(respond(400, {"error": told}, [("Connection", "close")]))
        answer = await post(slotgate, path, body_for(path, stream=stream))
        assert answer.status_code == 400
        assert answer.json() == {"error": {**told, "code": "context_length_exceeded"}}
        assert int(answer.headers["content-length"]) == len(answer.content)
        assert await slotgate.outcomes() == {"upstream_refused": 1}


# Lists


@in_loop
async def test_a_list_for_an_anthropic_caller_holds_the_fields_of_both_families() -> None:
    async with FakeEngine("vllm", models=["b", "a"]) as engine, running_gateway(engine) as slotgate:
        plain = (await slotgate.client.get("/v1/models")).json()
        assert set(plain) == {"object", "data"}
        headers = {"anthropic-version": "2023-06-01"}
        both = (await slotgate.client.get("/v1/models?limit=1000", headers=headers)).json()
        assert both["object"] == "list"
        assert (both["has_more"], both["first_id"], both["last_id"]) == (False, "a", "b")
        for was, now in zip(plain["data"], both["data"], strict=True):
            assert now == was | {
                "type": "model",
                "display_name": was["id"],
                "created_at": "1970-01-01T00:00:01Z",
            }
        one = (await slotgate.client.get("/v1/models/a", headers=headers)).json()
        assert (one["id"], one["type"], one["object"]) == ("a", "model", "model")
        assert one["max_model_len"] == 4096


@pytest.mark.parametrize(
    ("model", "path"),
    [("org/m", "org/m"), ("org/m", "org%2Fm"), ("m:30b", "m:30b"), ("/models/x", "/models/x")],
)
@in_loop
async def test_a_model_is_found_by_its_id_however_it_is_written(model: str, path: str) -> None:
    async with FakeEngine("vllm", models=[model]) as engine, running_gateway(engine) as slotgate:
        answer = await slotgate.client.get(f"{slotgate.base_url}/v1/models/{path}")
        assert (answer.status_code, answer.json()["id"]) == (200, model)


@in_loop
async def test_one_model_is_told_only_to_who_may_use_it() -> None:
    keys: list[Any] = ["alice", {"name": "bob", "models": ["b"]}]
    async with (
        FakeEngine("ollama", models=["a", "b"]) as engine,
        running_gateway(engine, keys=keys) as slotgate,
    ):
        headers = slotgate.header("bob")
        refused = await slotgate.client.get("/v1/models/a", headers=headers)
        assert refused.json()["error"]["code"] == "model_not_allowed"
        for path in ("/api/tags", "/api/ps"):
            listed = (await slotgate.client.get(path, headers=headers)).json()["models"]
            assert [entry["name"] for entry in listed] == ["b"]
            everything = (await slotgate.client.get(path)).json()["models"]
            assert [entry["name"] for entry in everything] == ["a", "b"]


@in_loop
async def test_several_ollamas_make_one_list_with_their_own_entries_and_the_aliases() -> None:
    async with (
        FakeEngine("ollama", models=["a:latest", "b"]) as one,
        FakeEngine("ollama", models=["b", "c"]) as two,
        FakeEngine("llama-server", models=["d"]) as three,
        running_gateway(one, two, three, models={"coder": {"ids": ["c"]}}) as slotgate,
    ):
        slotgate.models |= {"a"}
        tags = (await slotgate.client.get("/api/tags")).json()["models"]
        assert sorted(entry["name"] for entry in tags) == ["a:latest", "b", "c", "coder"]
        for entry in tags:
            assert entry["model"] == entry["name"]
            assert entry["size"]
            assert entry["details"]["family"] == "llama"
        for path, name in (("/api/chat", "coder"), ("/api/show", "coder")):
            answer = await post(slotgate, path, body_for(path, model=name))
            assert answer.status_code == 200
            assert json.loads(two.requests[-1].body)["model"] == "c"
        listed = (await slotgate.client.get("/v1/models")).json()["data"]
        assert [model["id"] for model in listed].count("a:latest") == 1
        assert "a" not in [model["id"] for model in listed]


@in_loop
async def test_the_oldest_of_several_ollamas_is_the_version() -> None:
    async with (
        FakeEngine("ollama") as one,
        FakeEngine("ollama") as two,
        running_gateway(one, two) as slotgate,
    ):
        one.behaviour.version, two.behaviour.version = "0.12.3", "0.9.10"
        for name in ("b1", "b2"):
            slotgate.gateway.backends.poller.poke(name)

        async def is_oldest() -> bool:
            answer = await slotgate.client.get("/api/version")
            return answer.status_code == 200 and answer.json() == {"version": "0.9.10"}

        await eventually(is_oldest, within_s=20)


@in_loop
async def test_ollamas_lists_are_answered_while_it_is_dead() -> None:
    async with FakeEngine("ollama") as engine, running_gateway(engine, check=False) as slotgate:
        await engine.go_down()
        slotgate.gateway.backends.poller.poke("b1")
        await eventually(lambda: not slotgate.gateway.backends.ready, within_s=20)
        since = time.monotonic()
        tags = await slotgate.client.get("/api/tags")
        version = await slotgate.client.get("/api/version")
        loaded = await slotgate.client.get("/api/ps")
        assert time.monotonic() - since < slack()
        assert [entry["name"] for entry in tags.json()["models"]] == ["m"]
        assert version.json() == {"version": "1.0"}
        assert loaded.json() == {"models": []}
        assert (await slotgate.client.get("/v1/models")).json()["data"][0]["id"] == "m"


@in_loop
async def test_without_an_ollama_there_is_no_version_and_nothing_is_installed() -> None:
    async with FakeEngine("vllm") as engine, running_gateway(engine) as slotgate:
        version = await slotgate.client.get("/api/version")
        assert version.status_code == 404
        assert isinstance(version.json()["error"], str)
        assert (await slotgate.client.get("/api/tags")).json() == {"models": []}


@in_loop
async def test_before_an_ollama_has_said_anything_its_lists_are_a_503() -> None:
    async with running_gateway("http://127.0.0.1:9", wait=False, check=False) as slotgate:
        for path in ("/api/tags", "/api/ps", "/api/version", "/v1/models"):
            answer = await slotgate.client.get(path)
            assert answer.status_code == 503
            assert answer.headers["retry-after"] == "5"
