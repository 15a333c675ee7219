"""What is read from a request body (cases B084 to B091), and what is refused."""

from __future__ import annotations

import json
import os

import pytest

from gateway.core.errors import GatewayError, Outcome
from gateway.core.json_scan import MANY_COMMAS, MOST_MEMBERS
from gateway.core.request import ParsedRequest, parse
from gateway.core.wire import Wire

SLACK = float(os.environ.get("SLOTGATE_TEST_SLACK", "1"))
MIB = 1 << 20


def chat(**fields: object) -> ParsedRequest:
    return parse(json.dumps({"model": "m", "messages": []} | fields).encode(), Wire.CHAT)


def refusal(body: bytes, wire: Wire = Wire.CHAT) -> GatewayError:
    with pytest.raises(GatewayError) as caught:
        parse(body, wire)
    assert (caught.value.key, caught.value.situation.outcome) == (
        "invalid_json",
        Outcome.BAD_REQUEST,
    )
    return caught.value


def pieces(body: bytes, wire: Wire) -> list[object]:
    return [json.loads(bytes(piece)) for piece in parse(body, wire).pieces]


# Refused


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b" ",
        b"null",
        b"[]",
        b"5",
        b'"x"',
        b"{",
        b"{}{}",
        b"{} x",
        b'{"a":1,}',
        b"{'a':1}",
        b'{"a":01}',
        b'{"a":"\x01"}',
        b'{"a":tru}',
        b"\xff\xfe",
        b'\xef\xbb\xbf{"model":"m"}',
        '{"model":"m"}'.encode("utf-16"),
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'{"a":' + b"[" * 100_000,
        b'{"a":xNaN}',
    ],
)
def test_a_body_that_is_not_a_json_object_is_refused(body: bytes) -> None:
    assert "request body" in refusal(body).message


@pytest.mark.parametrize(
    "body",
    [
        b'{"model":"a","model":"b"}',
        b'{"model":"a","model":"a"}',
        b'{"model":1,"model":12}',
        b'{"model":12,"model":1}',
        b'{"model":"a", "x":{"model":"c"}, "model":"b"}',
        b'{"model":"a","m\\u006fdel":"b"}',
        b'{"\\u006d\\u006F\\u0064\\u0065\\u006c":"a","model":"b"}',
        b'{"a":NaN,"model":"a","model":"b"}',
        b'{"stream":true,"model":"a","stream":false}',
        b'{"stream":true,"\\u0073tream":true}',
        b'{ "model" : "a" ,\n "model" : "b" }',
        b'{"x":[' + b"0," * (MANY_COMMAS + 1) + b'0],"model":"a","model":"b"}',
    ],
)
def test_a_model_or_stream_said_twice_is_refused_however_spelled(body: bytes) -> None:
    error = refusal(body)
    assert error.param in ("model", "stream")
    assert "twice" in error.message


@pytest.mark.parametrize(
    "body",
    [
        b'{"model":"m","x":{"model":"a","stream":1},"messages":["model","stream"]}',
        b'{"model":"m","seed":1,"seed":2}',
        b'{"model":"m","seed":1,"seed":12}',
        b'{"model":"m","seed":12,"seed":1}',
        b'{"model":"m","x":"\\"model\\":\\"a\\",\\"model\\":","x":[{}]}',
        b'{"model":"m","modelx":"a","Model":"b"," model":"c"}',
    ],
)
def test_other_repetitions_and_nested_models_are_none_of_our_business(body: bytes) -> None:
    assert parse(body, Wire.CHAT).model == "m"


def test_a_body_of_more_members_than_any_api_has_is_refused() -> None:
    # Only where they must be stepped through one by one: here, because one is repeated.
    many = ",".join(f'"k{number}":0' for number in range(MOST_MEMBERS))
    assert "members" in refusal(f'{{{many},"k0":1}}'.encode()).message


def test_a_refusal_never_quotes_the_body() -> None:
    assert "secret" not in refusal(b'{"prompt":"secret" secret}').message


# Forwarded: the engine's to judge


@pytest.mark.parametrize("odd", ["NaN", "Infinity", "-Infinity", "-NaN", "[NaN,1,{}]"])
def test_numbers_that_only_python_accepts_are_let_through(odd: str) -> None:
    body = f'{{"temperature": {odd}, "model": "is NaN, or Infinity", "stream": true}}'
    found = parse(body.encode(), Wire.CHAT)
    assert (found.model, found.stream) == ("is NaN, or Infinity", True)


@pytest.mark.parametrize(
    "text",
    [b"\\ud83d", b"\\uD83D tail", b"\\ude00\\ud83d", b"\xff\xfe", b"\xed\xa0\x80", b"\\u0000"],
)
def test_text_cut_in_the_middle_of_a_character_is_let_through(text: bytes) -> None:
    body = b'{"messages":[{"content":"a"},{"content":"%b"}],"model":"m"}' % text
    found = parse(body, Wire.CHAT)
    assert found.model == "m"
    assert [bytes(piece) for piece in found.pieces] == [
        b'{"content":"a"}',
        b'{"content":"%b"}' % text,
    ]


def test_a_cut_character_leaves_the_other_messages_as_they_were() -> None:
    smile = b'{"content":"\\ud83d\\ude00 NaN"}'
    first = parse(b'{"messages":[%b]}' % smile, Wire.CHAT)
    second = parse(b'{"messages":[%b , {"content":"\\ud83d"}]}' % smile, Wire.CHAT)
    assert bytes(first.pieces[0]) == bytes(second.pieces[0]) == smile


def test_nesting_is_accepted_up_to_a_depth_and_never_crashes() -> None:
    deep = b"[" * 200 + b"]" * 200
    assert parse(b'{"model":"m","x":%b}' % deep, Wire.CHAT).model == "m"


# Fields


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ('"m"', "m"),
        ('"/my/llms/Qwen3"', "/my/llms/Qwen3"),
        ('"hf.co/x/y:Q4_K_M"', "hf.co/x/y:Q4_K_M"),
        ('"trailing "', "trailing "),
        ('"\\u00e9\\ud83c\\udf0d"', "é🌍"),
        ('"🌍"', "🌍"),
        ('"\\ud83d"', "\ufffd"),
        ('"' + "x" * MIB + '"', "x" * MIB),
        ('""', None),
        ("5", None),
        ("true", None),
        ("[]", None),
        ('{"id":"m"}', None),
    ],
)
def test_a_model_is_a_text_or_none_and_is_known_to_be_there(
    model: str, expected: str | None
) -> None:
    found = parse(f'{{"model": {model}}}'.encode(), Wire.CHAT)
    assert (found.model, found.model_present) == (expected, True)


@pytest.mark.parametrize("body", [b"{}", b' {"model" : null}\n', b'{"x":{"model":"m"}}'])
def test_no_model_is_told_apart_from_an_odd_one(body: bytes) -> None:
    found = parse(body, Wire.CHAT)
    assert (found.model, found.model_present) == (None, False)


@pytest.mark.parametrize(
    ("stream", "openai", "ollama"),
    [
        ("true", True, True),
        ("false", False, False),
        ("null", False, True),
        ('"true"', False, False),
        ("1", False, False),
        (None, False, True),
    ],
)
def test_only_true_streams_and_ollama_streams_unless_told_not_to(
    stream: str | None, openai: bool, ollama: bool
) -> None:
    body = b"{}" if stream is None else f'{{"stream":{stream}}}'.encode()
    assert parse(body, Wire.CHAT).stream == openai
    assert parse(body, Wire.OLLAMA_NDJSON).stream == ollama


@pytest.mark.parametrize(
    ("n", "permits"),
    [(1, 1), (4, 4), (0, 1), (-3, 1), ("4", 1), (2.0, 1), (None, 1), (True, 1), (10**30, 10**9)],
)
def test_a_chat_takes_a_permit_for_each_choice(n: object, permits: int) -> None:
    assert chat(n=n).permits == permits


@pytest.mark.parametrize(
    ("prompt", "permits"),
    [
        ('"a"', 1),
        ('["a"]', 1),
        ('["a", "b", "c"]', 3),
        ("[1, 2, 3]", 1),
        ("[[1, 2], [3]]", 2),
        ("[ [1] ,\n[2], [3] ]", 3),
        ('["a", 1, 2]', 1),
        ('[{"prompt_string":"a"},{"prompt_string":"b"}]', 2),
        ("[]", 1),
        ("null", 1),
        ("{}", 1),
    ],
)
@pytest.mark.parametrize("wire", [Wire.COMPLETIONS, Wire.NATIVE])
def test_a_list_of_prompts_takes_a_permit_for_each(prompt: str, permits: int, wire: Wire) -> None:
    assert parse(f'{{"prompt":{prompt}}}'.encode(), wire).permits == permits
    assert parse(f'{{"prompt":{prompt},"n":2}}'.encode(), wire).permits == 2 * permits


@pytest.mark.parametrize("wire", [Wire.JSON, Wire.RESPONSES, Wire.MESSAGES, Wire.OLLAMA_NDJSON])
def test_elsewhere_a_request_takes_one_permit(wire: Wire) -> None:
    assert parse(b'{"n":4,"input":["a","b"],"prompt":["a","b"]}', wire).permits == 1


@pytest.mark.parametrize(
    ("fields", "limit"),
    [
        ({"max_tokens": 5}, 5),
        ({"max_completion_tokens": 6, "max_tokens": 5}, 6),
        ({"max_completion_tokens": None, "max_tokens": 5}, 5),
        ({"max_output_tokens": 7}, 7),
        ({"n_predict": 8}, 8),
        ({"options": {"num_predict": 9, "num_ctx": 1}}, 9),
        ({"max_tokens": 0}, 0),
        ({"max_tokens": -1}, None),
        ({"options": {"num_predict": -2}}, None),
        ({"max_tokens": "5"}, None),
        ({"options": [1]}, None),
        ({}, None),
    ],
)
def test_the_token_limit_is_found_under_each_of_its_names(
    fields: dict[str, object], limit: int | None
) -> None:
    assert chat(**fields).max_tokens == limit


def test_a_cache_key_is_a_text_of_bearable_length() -> None:
    assert chat(prompt_cache_key="abc").prompt_cache_key == "abc"
    assert chat(prompt_cache_key=5).prompt_cache_key is None
    assert chat(prompt_cache_key="a" * 5000).prompt_cache_key is None


@pytest.mark.parametrize(
    ("body", "pins"),
    [
        (rb'{"model":"m","id_slot":0}', True),
        (rb'{"model":"m","id\u005fslot":0}', True),
        (rb'{"model":"m","prompt":"id_slot"}', False),
        (rb'{"model":"m","options":{"id_slot":0}}', False),
    ],
)
def test_a_request_pins_a_slot_by_a_member_of_its_own_however_that_is_spelled(
    body: bytes, pins: bool
) -> None:
    assert parse(body, Wire.CHAT).pins_slot is pins
