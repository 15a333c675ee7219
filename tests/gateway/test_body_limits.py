"""Bodies up to the limit and above it, and odd ones. Cases B072, B080, B084, B085, B088, B089, B091."""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import Any

import pytest

from tests.fakes.engine import FakeEngine
from tests.fakes.gateway import Running, running_gateway
from tests.fakes.raw_client import HeaderList, RawClient, RawResponse, encode
from tests.fakes.running import in_loop
from tests.fakes.scripts import chat_stream, respond
from tests.gateway.line_talk import CHAT, GENERATING, body_for

MIB = 1 << 20


def _sized(size: int) -> bytes:
    empty = json.dumps({"model": "m", "messages": [], "user": ""}).encode()
    return empty[:-2] + b"x" * (size - len(empty)) + b'"}'


async def _ask(slotgate: Running, request: bytes) -> RawResponse:
    """One that sends all it has, and reads only then."""
    async with await RawClient.connect(slotgate.port) as client:
        await client.send(request)
        return await client.response()


@pytest.mark.parametrize("size", [900_000, 1_100_000, MIB, int(8.1 * MIB), 12 * MIB])
@pytest.mark.parametrize("framing", ["length", "chunked"])
@in_loop
async def test_a_body_up_to_the_limit_reaches_the_engine(size: int, framing: str) -> None:
    body = _sized(size)
    chunks = [body[at : at + 65_521] for at in range(0, size, 65_521)]
    async with (
        FakeEngine() as engine,
        running_gateway(engine, limits={"body_mib": 12}) as slotgate,
    ):
        engine.always(chat_stream(1))
        how: Any = {"chunks": chunks} if framing == "chunked" else {"body": body}
        answer = await _ask(slotgate, encode("POST", CHAT, **how))
        assert answer.status == 200
        assert engine.requests[0].body == body
        assert engine.requests[0].head.get("content-length") == str(size)
        assert engine.requests[0].head.get("transfer-encoding") is None


@pytest.mark.parametrize("framing", ["length", "chunked"])
@pytest.mark.parametrize("path", GENERATING)
def test_a_byte_above_the_limit_is_a_413_that_the_client_receives(path: str, framing: str) -> None:
    body = _sized(MIB + 1)

    @in_loop
    async def check() -> None:
        async with (
            FakeEngine() as engine,
            running_gateway(engine, limits={"body_mib": 1}) as slotgate,
        ):
            how: Any = {"chunks": [body]} if framing == "chunked" else {"body": body}
            async with await RawClient.connect(slotgate.port) as client:
                for _ in range(2):  # and the connection lives on
                    await client.send(encode("POST", path, **how))
                    answer = await client.response()
                    assert answer.status == 413
                    assert b"1 MiB" in answer.body
                    assert b"limits.body_mib" in answer.body
            assert not engine.requests
            assert await slotgate.outcomes() == {"bad_request": 2}

    check()


@in_loop
async def test_a_body_far_above_the_limit_is_refused_before_it_has_come() -> None:
    async with FakeEngine() as engine, running_gateway(engine, limits={"body_mib": 1}) as slotgate:
        async with await RawClient.connect(slotgate.port) as client:
            head = encode("POST", CHAT, {"Content-Length": str(1 << 40)})
            await client.send(head)
            answer = await client.response()
            assert answer.status == 413
        async with await RawClient.connect(slotgate.port) as client:
            await client.send(encode("POST", CHAT, {"Transfer-Encoding": "chunked"}))

            async def pour() -> None:
                with contextlib.suppress(ConnectionError):
                    for _ in range(500):
                        await client.send(b"10000\r\n" + bytes(65_536) + b"\r\n")

            pouring = asyncio.create_task(pour())
            answer = await client.response()
            pouring.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await pouring
            assert answer.status == 413
            assert answer.json()["error"]["code"] == "body_too_large"


@in_loop
async def test_chunks_extensions_trailers_and_hop_headers_stay_on_their_hop() -> None:
    """B072: any chunking gives the same request, with exactly one framing."""
    body = json.dumps(body_for(CHAT)).encode()
    hop: HeaderList = [
        ("Connection", "X-Drop, keep-alive"),
        ("X-Drop", "1"),
        ("Keep-Alive", "5"),
        ("TE", "trailers"),
        ("Proxy-Authorization", "z"),
        ("Upgrade", "h2c"),
        ("X-Kept", "yes"),
        ("Transfer-Encoding", "chunked"),
    ]
    async with FakeEngine() as engine, running_gateway(engine) as slotgate:
        for size in (1, 7, 4096):
            parts = [body[at : at + size] for at in range(0, len(body), size)]
            coded = b"".join(b"%x;a=b\r\n%b\r\n" % (len(part), part) for part in parts)
            request = encode("POST", CHAT, hop) + coded + b"0\r\nX-Trailer: 1\r\n\r\n"
            assert (await _ask(slotgate, request)).status == 200
            got = engine.requests[-1]
            assert got.body == body
            names = [name.lower() for name, _ in got.head.headers]
            assert names.count("content-length") == 1
            assert got.headers["x-kept"] == "yes"
            dropped = {
                *("transfer-encoding", "x-drop", "keep-alive", "te", "proxy-authorization"),
                *("upgrade", "x-trailer", "connection"),
            }
            assert not dropped & set(names)


ODD = (
    b'{ "messages" :[ ],"zz":null,"chat_template_kwargs":{"a":{}},\t"cache_prompt":true,'
    b'"cache_salt":"s","priority":-1,"guided_json":{"type":"object"},"extra_body":{},'
    b'"model":%b,"seed":9223372036854775807,"temperature":1.0,"top_p":1e-7,'
    b'"x":165598928036513123123,"e":"\\ud83d\\ude00 \xe2\x82\xac" }\n'
)


@in_loop
async def test_unknown_fields_odd_spaces_and_literals_reach_the_engine_unchanged() -> None:
    async with FakeEngine() as engine, running_gateway(engine) as slotgate:
        body = ODD % b'"m"'
        assert (await _ask(slotgate, encode("POST", CHAT, body=body))).status == 200
        assert engine.requests[0].body == body


@in_loop
async def test_an_alias_changes_the_value_of_model_and_no_other_byte() -> None:
    models = {"alias": {"ids": ["m"]}}
    async with FakeEngine() as engine, running_gateway(engine, models=models) as slotgate:
        for spelled in (b'"alias"', b'"\\u0061lias"'):
            request = encode("POST", CHAT, body=ODD % spelled)
            assert (await _ask(slotgate, request)).status == 200
            assert engine.requests[-1].body == ODD % b'"m"'


@in_loop
async def test_a_pinned_slot_is_cut_out_and_no_other_byte() -> None:
    async with FakeEngine() as engine, running_gateway(engine) as slotgate:
        body = b'{"id_slot": 0, "model":"m","messages":[{"id_slot":1}]}'
        assert (await _ask(slotgate, encode("POST", CHAT, body=body))).status == 200
        assert engine.requests[0].body == b'{"model":"m","messages":[{"id_slot":1}]}'


NO_OBJECT = [
    *(b"", b"null", b"[]", b'"x"', b"{", b"\xff\xfe", b"7", b"[" * 100_000),
    *(b'{"model":"m","model":"m"}', b'{"stream":true,"str\\u0065am":false,"model":"m"}'),
]


@pytest.mark.parametrize("path", [CHAT, "/v1/messages", "/v1/responses"])
@in_loop
async def test_a_body_that_is_no_json_object_is_a_400_of_its_family(path: str) -> None:
    async with FakeEngine() as engine, running_gateway(engine) as slotgate:
        for body in NO_OBJECT:
            answer = await _ask(slotgate, encode("POST", path, body=body))
            assert answer.status == 400, body[:50]
            document = answer.json()
            assert ("type" in document) == (path == "/v1/messages")
            assert document["error"]["type"] == "invalid_request_error"
        assert not engine.requests
        assert await slotgate.outcomes() == {"bad_request": len(NO_OBJECT)}


@pytest.mark.parametrize(
    "fields", ['"temperature":NaN', '"stream":"true"', '"stream":null', '"stream":1']
)
@in_loop
async def test_what_an_engine_may_accept_is_for_the_engine_to_judge(fields: str) -> None:
    body = f'{{"model":"m","messages":[],{fields}}}'.encode()
    async with FakeEngine() as engine, running_gateway(engine) as slotgate:
        engine.always(respond(200, {"choices": []}))
        request = encode("POST", CHAT, {"Content-Type": "text/plain"}, body)
        assert (await _ask(slotgate, request)).status == 200
        assert engine.requests[0].body == body
        assert engine.requests[0].headers["content-type"] == "text/plain"


@in_loop
async def test_an_odd_model_is_refused_at_once_and_never_becomes_a_path_or_a_label() -> None:
    odd: list[Any] = [5, "", "m ", "../../etc", "\N{PILE OF POO}", "x" * MIB, "m:latest", ["m"], {}]
    async with FakeEngine() as engine, running_gateway(engine) as slotgate:
        for model in odd:
            body = json.dumps({"model": model, "messages": []}).encode()
            answer = await _ask(slotgate, encode("POST", CHAT, body=body))
            error = answer.json()["error"]
            assert answer.status == 404, model
            assert (error["code"], error["param"]) == ("model_not_found", "model")
            assert len(answer.body) < 2000
        assert not engine.requests
        assert await slotgate.outcomes() == {"unknown_model": len(odd)}
        for body in (b'{"messages":[]}', b'{"model":null,"messages":[]}'):
            assert (await _ask(slotgate, encode("POST", CHAT, body=body))).status == 200


@pytest.mark.parametrize("model", ["/my/llms/Qwen3", "hf.co/x/y:Q4_K_M", "qwen3:latest"])
@in_loop
async def test_a_model_id_with_slashes_or_colons_is_an_id_like_any_other(model: str) -> None:
    kind = "ollama" if model.endswith("latest") else "vllm"
    async with FakeEngine(kind, models=[model]) as engine, running_gateway(engine) as slotgate:
        names = [model, "qwen3"] if kind == "ollama" else [model]
        slotgate.models |= set(names)
        for name in names:
            body = json.dumps({"model": name, "messages": []}).encode()
            engine.script(respond(200, {"choices": []}))
            assert (await _ask(slotgate, encode("POST", CHAT, body=body))).status == 200


INPUTS = {
    "as the SDK asks": b'{"model":"m","input":"hi","encoding_format":"base64"}',
    "floats": b'{"model":"m","input":["a","b"],"encoding_format":"float"}',
    "token ids": b'{"model":"m","input":[1,2,3]}',
    "lists of token ids": b'{"model":"m","input":[[1],[2,3]],"dimensions":8}',
}


@pytest.mark.parametrize("name", INPUTS)
@in_loop
async def test_embeddings_pass_in_both_directions_as_they_are(name: str) -> None:
    answer = b'{"object":"list","data":[{"embedding":"AACAPwAAAEA=","index":0}],"model":"m"}'
    async with FakeEngine() as engine, running_gateway(engine) as slotgate:
        engine.script(respond(200, answer))
        got = await _ask(slotgate, encode("POST", "/v1/embeddings", body=INPUTS[name]))
        assert got.body == answer
        assert engine.requests[0].body == INPUTS[name]
