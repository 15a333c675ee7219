"""Where the prompt stands in a body, piece by piece, and how long it is."""

from __future__ import annotations

import json

import pytest

from gateway.core.json_scan import MANY_COMMAS
from gateway.core.prompt import IMAGE_BYTES, MOST_PIECES
from gateway.core.request import ParsedRequest, parse
from gateway.core.wire import Wire


def chat(**fields: object) -> ParsedRequest:
    return parse(json.dumps({"model": "m", "messages": []} | fields).encode(), Wire.CHAT)


def pieces(body: bytes, wire: Wire) -> list[object]:
    return [json.loads(bytes(piece)) for piece in parse(body, wire).pieces]


def test_the_pieces_of_a_chat_are_its_tools_and_then_each_message() -> None:
    body = b'{"messages":[{"a":1} , {"b":[2,"]"]}],"tools":[{"t":1}],"model":"m"}'
    assert [bytes(piece) for piece in parse(body, Wire.CHAT).pieces] == [
        b'[{"t":1}]',
        b'{"a":1}',
        b'{"b":[2,"]"]}',
    ]


@pytest.mark.parametrize(
    ("wire", "body", "expected"),
    [
        (Wire.MESSAGES, {"messages": ["u"], "system": "s", "tools": ["t"]}, [["t"], "s", "u"]),
        (Wire.RESPONSES, {"input": ["i", "j"], "tools": ["t"], "instructions": "s"}, ["s", ["t"], "i", "j"]),
        (Wire.RESPONSES, {"input": "text", "instructions": None, "tools": []}, ["text"]),
        (Wire.COMPLETIONS, {"prompt": "p", "suffix": "s"}, ["p", "s"]),
        (Wire.COMPLETIONS, {"prompt": ["p", "q"]}, [["p", "q"]]),
        (Wire.OLLAMA_NDJSON, {"messages": ["u", "v"]}, ["u", "v"]),
        (Wire.OLLAMA_NDJSON, {"prompt": "p", "system": "s"}, ["s", "p"]),
        (Wire.NATIVE, {"input_suffix": "z", "input_prefix": "a", "prompt": ""}, ["a", "z"]),
        (Wire.JSON, {"query": "q", "documents": ["d"]}, ["q", ["d"]]),
        (Wire.CHAT, {"messages": "odd"}, ["odd"]),
        (Wire.CHAT, {"messages": None}, []),
        (Wire.CHAT, {"messages": []}, []),
    ],
)  # fmt: skip
def test_each_wire_has_its_prompt_in_the_order_of_the_conversation(
    wire: Wire, body: object, expected: list[object]
) -> None:
    assert pieces(json.dumps(body).encode(), wire) == expected


def test_one_more_turn_leaves_all_earlier_pieces_as_they_were() -> None:
    turns = [{"role": "user", "content": f"turn {number} é"} for number in range(20)]
    first = chat(messages=turns[:-1], tools=[{"t": 1}]).pieces
    second = chat(messages=turns, tools=[{"t": 1}], temperature=0).pieces
    assert [bytes(piece) for piece in second[:-1]] == [bytes(piece) for piece in first]


def test_the_prompt_is_counted_in_bytes() -> None:
    assert chat(messages=["ab", "c"]).prompt_bytes == len('"ab"') + len('"c"')
    assert chat().prompt_bytes == 0


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,@"}},
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "@"}},
        {"type": "input_audio", "input_audio": {"data": "@", "format": "wav"}},
        {"images": ["@"]},
    ],
)
def test_an_inline_image_counts_as_a_thousand_tokens_not_as_its_bytes(part: object) -> None:
    content = json.dumps([{"type": "text", "text": "what " * 4000}, part])
    message = json.dumps({"content": json.loads(content.replace("@", "iVBORw0K" * 100_000))})
    found = parse(b'{"messages":[%b]}' % message.encode(), Wire.CHAT)
    assert 20_000 <= found.prompt_bytes <= 20_000 + 3 * IMAGE_BYTES


def test_long_text_counts_in_full() -> None:
    text = "The quick brown fox_jumps/over 0123456789abcdef the lazy dog.\n" * 5000
    assert chat(messages=[text]).prompt_bytes == len(json.dumps(text))


def test_a_list_of_very_many_elements_stays_one_piece() -> None:
    assert len(chat(messages=[0] * MOST_PIECES).pieces) == MOST_PIECES
    assert len(chat(messages=[0] * (MOST_PIECES + 1)).pieces) == 1
    assert len(chat(messages=[0] * (MANY_COMMAS + 2)).pieces) == 1
