"""Which paths there are: spelling, methods, preflights, keys in the path. Cases B078, B082, B083, B095."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.core.routes import ROUTES
from tests.fakes.engine import FakeEngine
from tests.fakes.gateway import Running, running_gateway
from tests.fakes.raw_client import RawClient, RawResponse
from tests.fakes.running import eventually, in_loop
from tests.gateway.line_talk import body_for

CHAT = "/v1/chat/completions"
UI = "https://ui.example"


async def ask(
    slotgate: Running,
    method: str,
    path: str,
    headers: dict[str, str] | None = None,
    body: Any = None,
) -> RawResponse:
    """One request as it is written: httpx would tidy the path."""
    data = None if body is None else json.dumps(body).encode()
    async with await RawClient.connect(slotgate.port) as client:
        await client.request(method, path, headers, data)
        return await client.response(head_only=method == "HEAD")


@pytest.mark.parametrize("prefix", ["", "/", "/v1", "/v1/", "/prefix/v1"])
@in_loop
async def test_every_usual_spelling_of_a_path_is_one_right_path_at_the_engine(prefix: str) -> None:
    async with (
        FakeEngine() as engine,
        running_gateway(
            {"name": "b1", "url": engine.url + prefix, "models": ["m"], "engine": "openai"},
            wait=False,
            check=False,
        ) as slotgate,
    ):
        engine.always(_list, path="/prefix/v1/models")
        await eventually(lambda: slotgate.gateway.backends.ready)
        spellings = [CHAT, "/chat/completions", CHAT + "/", "/" + CHAT, "/v1" + CHAT]
        for path in spellings:
            await ask(slotgate, "POST", path + "?beta=true", body=body_for(CHAT))
        right = prefix.rstrip("/").removesuffix("/v1") + CHAT
        assert [(one.path, one.query) for one in engine.requests] == [(right, "beta=true")] * 5


async def _list(connection: Any) -> None:
    await connection.respond(200, {"object": "list", "data": [{"id": "m", "object": "model"}]})


@pytest.mark.parametrize(
    "path",
    [
        *("/nope", "/v1", "/v1/nope", "/slots", "/lora-adapters", "/models/load", "/sleep"),
        *("/api/pull", "/api/delete", "/api/blobs/x", "/v1/load_lora_adapter", "/v2/rerank"),
        *("/v1/chat%2fcompletions", "/v1/%2e%2e/slots", "/v1/../slots", "/v1\\chat\\completions"),
        *("/v1//chat/completions", "/k/x/v1/chat/completions", "/metrics/../slots"),
    ],
)
@in_loop
async def test_an_unknown_path_is_a_404_in_json_and_never_reaches_an_engine(path: str) -> None:
    async with FakeEngine() as engine, running_gateway(engine, keys=["alice"]) as slotgate:
        for method in ("GET", "POST", "DELETE"):
            answer = await ask(slotgate, method, path)
            assert answer.status == 404
            assert answer.header("location") is None
            error = answer.json()["error"]
            if path.startswith("/api/"):
                assert isinstance(error, str)
            else:
                assert error["code"] == "not_found"
        assert engine.requests == []


@pytest.mark.parametrize("path", sorted(ROUTES))
@in_loop
async def test_the_wrong_method_on_a_relayed_path_is_a_405_that_names_the_right_one(
    path: str,
) -> None:
    async with FakeEngine() as engine, running_gateway(engine, keys=["alice"]) as slotgate:
        right = ROUTES[path].method
        for method in ("DELETE", "PUT", "GET" if right == "POST" else "POST"):
            answer = await ask(slotgate, method, path)
            assert answer.status == 405
            assert answer.header("allow") == ("POST" if right == "POST" else "GET, HEAD")
        assert engine.requests == []


@pytest.mark.parametrize(
    "path", ["/", "/healthz", "/v1/models", "/v1/models/m", "/api/tags", "/metrics", "/status"]
)
@in_loop
async def test_the_wrong_method_on_a_page_is_a_405_that_names_the_right_ones(path: str) -> None:
    async with FakeEngine() as engine, running_gateway(engine) as slotgate:
        answer = await ask(slotgate, "POST", path)
        assert (answer.status, answer.header("allow")) == (405, "GET, HEAD")


@pytest.mark.parametrize(
    "path", ["/", "/healthz", "/readyz", "/v1/models", "/v1/models/m", "/status", "/props"]
)
@in_loop
async def test_head_follows_its_get_key_included_without_the_body(path: str) -> None:
    async with FakeEngine() as engine, running_gateway(engine, keys=["alice"]) as slotgate:
        key = slotgate.header("admin")
        get = await ask(slotgate, "GET", path, key)
        head = await ask(slotgate, "HEAD", path, key)
        assert (head.status, head.body) == (get.status, b"") == (200, b"")
        assert head.header("content-type") == get.header("content-type")
        without = await ask(slotgate, "HEAD", path)
        assert without.status == (200 if path in ("/", "/healthz", "/readyz") else 401)


@in_loop
async def test_a_websocket_is_refused_at_once_in_a_way_that_its_client_understands() -> None:
    upgrade = {
        "Connection": "Upgrade",
        "Upgrade": "websocket",
        "Sec-WebSocket-Version": "13",
        "Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ==",
    }
    async with FakeEngine() as engine, running_gateway(engine, keys=["alice"]) as slotgate:
        for path in ("/v1/responses", "/responses"):
            answer = await ask(slotgate, "GET", path, upgrade)
            assert answer.status == 426
            assert answer.json()["error"]["code"] == "upgrade_required"
        plain = await ask(slotgate, "GET", "/v1/responses")
        assert (plain.status, plain.header("allow")) == (405, "POST")
        body = body_for("/v1/responses")
        good = await ask(slotgate, "POST", "/v1/responses", slotgate.header(), body)
        assert good.status == 200


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/models", "/nope", "/api/pull", "*"])
@in_loop
async def test_options_is_answered_without_a_key_and_without_an_engine(path: str) -> None:
    async with FakeEngine() as engine, running_gateway(engine, keys=["alice"]) as slotgate:
        answer = await ask(slotgate, "OPTIONS", path, {"Origin": UI})
        assert answer.status == 204
        assert answer.header("access-control-allow-origin") is None
        assert engine.requests == []


@in_loop
async def test_a_named_page_may_ask_and_read_answers_refusals_and_streams() -> None:
    origin = {"Origin": UI}
    asks = {
        **origin,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type,x-api-key,anthropic-version",
    }
    async with (
        FakeEngine(slots=1) as engine,
        running_gateway(
            engine, keys=["alice"], cors={"origins": [UI]}, admission={"queue": 0}
        ) as slotgate,
    ):
        allowed = await ask(slotgate, "OPTIONS", CHAT, asks)
        assert allowed.status == 204
        assert allowed.header("access-control-allow-origin") == UI
        assert (
            allowed.header("access-control-allow-headers") == asks["Access-Control-Request-Headers"]
        )
        assert allowed.header("access-control-max-age") == "600"
        assert engine.requests == []

        key = slotgate.header()
        missing = await ask(slotgate, "POST", CHAT, origin, body_for(CHAT))
        streamed = await ask(slotgate, "POST", CHAT, origin | key, body_for(CHAT, stream=True))
        listed = await ask(slotgate, "GET", "/v1/models", origin | key)
        unknown = await ask(slotgate, "GET", "/nope", origin)
        engine.behaviour.ttft_s = 30
        async with await RawClient.connect(slotgate.port) as client:
            await client.request("POST", CHAT, key, json.dumps(body_for(CHAT)).encode())
            await engine.until(lambda: engine.inside)
            full = await ask(slotgate, "POST", CHAT, origin | key, body_for(CHAT))
        statuses = [one.status for one in (missing, streamed, listed, unknown, full)]
        assert statuses == [401, 200, 200, 404, 503]
        for answer in (missing, streamed, listed, unknown, full):
            assert answer.header("access-control-allow-origin") == UI
            exposed = answer.header("access-control-expose-headers") or ""
            assert {"x-request-id", "request-id", "retry-after"} <= set(exposed.split(", "))
        many = origin | {f"X-{n}": "" for n in range(300)}
        at_the_edge = await ask(slotgate, "POST", CHAT, many, body_for(CHAT))
        assert at_the_edge.status == 431
        assert at_the_edge.header("access-control-allow-origin") == UI
        other = await ask(slotgate, "GET", "/v1/models", {"Origin": "https://evil.example"} | key)
        assert other.status == 200
        assert other.header("access-control-allow-origin") is None


@pytest.mark.parametrize(
    "headers",
    [{"Origin": "https://evil.example"}, {"Origin": "null"}, {"Host": "evil.example"}],
    ids=["a page", "a file", "a name of the page's own"],
)
@pytest.mark.parametrize("path", [CHAT, "/v1/models", "/api/tags", "/status", "/tokenize"])
@in_loop
async def test_web_pages_do_not_reach_a_keyless_gateway(path: str, headers: dict[str, str]) -> None:
    async with FakeEngine() as engine, running_gateway(engine) as slotgate:
        post = path in ROUTES
        body = body_for(CHAT, content="a") if post else None
        answer = await ask(slotgate, "POST" if post else "GET", path, headers, body)
        assert answer.status == 403
        if not path.startswith("/api/"):
            assert answer.json()["error"]["code"] == "origin_not_allowed"
        assert engine.requests == []


@in_loop
async def test_the_metrics_of_a_keyless_gateway_are_no_page_of_the_web_either() -> None:
    async with FakeEngine() as engine, running_gateway(engine) as slotgate:
        assert (await ask(slotgate, "GET", "/metrics")).status == 200
        assert (await ask(slotgate, "GET", "/metrics", {"Host": "evil.example"})).status == 403


@in_loop
async def test_a_page_named_in_the_configuration_may_use_a_keyless_gateway() -> None:
    async with (
        FakeEngine() as engine,
        running_gateway(engine, cors={"origins": [UI]}) as slotgate,
    ):
        headers = {"Origin": UI, "Host": f"localhost:{slotgate.port}"}
        assert (await ask(slotgate, "POST", CHAT, headers, body_for(CHAT))).status == 200


@in_loop
async def test_where_there_are_keys_a_page_with_one_is_served_and_its_browser_decides() -> None:
    async with FakeEngine() as engine, running_gateway(engine, keys=["alice"]) as slotgate:
        headers = slotgate.header() | {"Origin": "https://evil.example", "Host": "llm.example"}
        answer = await ask(slotgate, "POST", CHAT, headers, body_for(CHAT))
        assert answer.status == 200
        assert answer.header("access-control-allow-origin") is None
        seen = engine.requests[0].headers
        assert "origin" not in seen
        assert seen["host"] == f"127.0.0.1:{engine.port}"


@in_loop
async def test_a_key_in_the_path_is_a_key_and_is_told_to_nobody() -> None:
    async with (
        FakeEngine("ollama") as engine,
        running_gateway(engine, keys=["alice"], auth={"key_in_path": True}) as slotgate,
    ):
        way = f"/k/{slotgate.keys['alice']}"
        assert (await ask(slotgate, "GET", way + "/api/version")).status == 200
        assert (await ask(slotgate, "GET", way + "/v1/models/m")).status == 200
        chat = await ask(slotgate, "POST", way + CHAT + "?a=b", None, body_for(CHAT))
        assert chat.status == 200
        assert (engine.requests[0].path, engine.requests[0].query) == (CHAT, "a=b")
        dummy = {"Authorization": "Bearer dummy"}
        assert (await ask(slotgate, "GET", way + "/api/tags", dummy)).status == 200
        wrong = await ask(slotgate, "GET", "/k/sk-sg-wrong/api/tags", slotgate.header())
        assert wrong.status == 401
        unknown = await ask(slotgate, "GET", way + "/nope")
        assert unknown.status == 404
        assert slotgate.keys["alice"].encode() not in unknown.body


@in_loop
async def test_a_key_in_the_path_where_none_may_be_is_not_told_either() -> None:
    async with FakeEngine() as engine, running_gateway(engine, keys=["alice"]) as slotgate:
        answer = await ask(slotgate, "GET", f"/k/{slotgate.keys['alice']}/v1/models")
        assert answer.status == 404
        await eventually(lambda: '"not_found"' in slotgate.log.getvalue())


@in_loop
async def test_the_query_and_the_headers_of_the_family_reach_the_engine_but_no_key_does() -> None:
    async with FakeEngine() as engine, running_gateway(engine, keys=["alice"]) as slotgate:
        key = slotgate.keys["alice"]
        headers = [
            ("x-api-key", key),
            ("anthropic-version", "2023-06-01"),
            ("anthropic-beta", "a"),
            ("anthropic-beta", "b"),
        ]
        for path in ("/v1/messages", "/v1/messages/count_tokens"):
            async with await RawClient.connect(slotgate.port) as client:
                body = json.dumps(body_for("/v1/messages")).encode()
                query = f"?beta=true&api_key={key}"
                await client.request("POST", path + query, headers, body)
                answer = await client.response()
            assert answer.status == 200
            assert answer.header("request-id") == answer.header("x-request-id")
            seen = engine.requests[-1]
            assert (seen.path, seen.query) == (path, "beta=true")
            assert "x-api-key" not in seen.headers
            assert seen.headers["anthropic-version"] == "2023-06-01"
            betas = [value for name, value in seen.head.headers if name.lower() == "anthropic-beta"]
            assert betas == ["a", "b"]
