"""The two edits of a body, and its reading, against the standard library's parser."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import assume, given
from hypothesis import strategies as st

from gateway.core.errors import GatewayError
from gateway.core.json_scan import members
from gateway.core.request import ParsedRequest, drop_top_level, parse, replace_model
from gateway.core.wire import Wire

# Names and texts that look like others, or that need escapes; no lone surrogates, which json cannot write back.
text = st.one_of(
    st.sampled_from(
        ["model", "m\u00f6del", '"model":"x"', "\\", "NaN", "id_slot", "\n\U0001f30d", ""]
    ),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=8),
)
value = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-(10**20), 10**20), st.floats(), text),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(text, inner, max_size=3)),
    max_leaves=8,
)
name = st.one_of(st.sampled_from(["model", "stream", "id_slot", "messages", "prompt", "n"]), text)
blank = st.sampled_from(["", "", " ", "\n", " \t\r\n "])


def spelled(draw: st.DrawFn, key: str) -> str:
    """The key as JSON; at times with every character escaped."""
    if key and key.isascii() and draw(st.integers(0, 9)) == 0:
        return '"' + "".join(f"\\u{ord(letter):04x}" for letter in key) + '"'
    return json.dumps(key, ensure_ascii=draw(st.booleans()))


@st.composite
def bodies(draw: st.DrawFn) -> tuple[bytes, list[tuple[str, Any]]]:
    """A JSON object in some spacing and spelling, and its members."""
    pairs = draw(st.lists(st.tuples(name, value), max_size=6))
    style = draw(st.sampled_from(["compact", "spaced", "free"]))
    parts = []
    for key, inner in pairs:
        if style == "free":
            gaps = [draw(blank) for _ in range(4)]
            parts.append(
                f"{gaps[0]}{spelled(draw, key)}{gaps[1]}:{gaps[2]}"
                f"{json.dumps(inner, indent=draw(st.sampled_from([None, 1])))}{gaps[3]}"
            )
        else:
            colon = ": " if style == "spaced" else ":"
            parts.append(json.dumps(key) + colon + json.dumps(inner, separators=(",", ":")))
    body = "{" + (", " if style == "spaced" else ",").join(parts) + "}"
    around = draw(blank) if style == "free" else ""
    return (around + body + around).encode(), pairs


def read(body: bytes, wire: Wire) -> ParsedRequest | str:
    """What was parsed, or the key of the refusal."""
    try:
        return parse(body, wire)
    except GatewayError as error:
        return error.key


def once(pairs: list[tuple[str, Any]], key: str) -> bool:
    return [each for each, _ in pairs].count(key) <= 1


def same(left: object, right: object) -> bool:
    """Equal, and NaN equal to itself."""
    return repr(left) == repr(right)


@given(given_body=bodies())
def test_each_top_level_member_is_found_where_it_stands(
    given_body: tuple[bytes, list[tuple[str, Any]]],
) -> None:
    body, pairs = given_body
    found = members(body)
    read = [(each.name, json.loads(body[each.value : each.end])) for each in found]
    assert same(read, pairs)
    assert [json.loads(body[each.start : each.value].rstrip(b": \t\r\n")) for each in found] == [
        key for key, _ in pairs
    ]


@given(given_body=bodies(), new=text)
def test_replacing_the_model_changes_its_value_and_no_other_byte(
    given_body: tuple[bytes, list[tuple[str, Any]]], new: str
) -> None:
    body, pairs = given_body
    assume(once(pairs, "model"))
    result = replace_model(body, new)
    if "model" not in dict(pairs):
        assert result == body
        return
    assert same(json.loads(result), dict(pairs) | {"model": new})
    old = next(each for each in members(body) if each.name == "model")
    assert result == body[: old.value] + json.dumps(new).encode() + body[old.end :]


@given(given_body=bodies(), key=name)
def test_dropping_a_member_leaves_every_other_member_as_it_was_written(
    given_body: tuple[bytes, list[tuple[str, Any]]], key: str
) -> None:
    body, pairs = given_body
    result = drop_top_level(body, key)
    kept = [(each, inner) for each, inner in pairs if each != key]
    assert same(json.loads(result, object_pairs_hook=list), as_pairs(kept))
    written = [body[each.start : each.end] for each in members(body) if each.name != key]
    assert [result[each.start : each.end] for each in members(result)] == written
    if len(kept) == len(pairs):
        assert result == body


def as_pairs(pairs: list[tuple[str, Any]]) -> object:
    def inner(node: object) -> object:
        if isinstance(node, dict):
            return [(key, inner(each)) for key, each in node.items()]
        return [inner(each) for each in node] if isinstance(node, list) else node

    return [(key, inner(each)) for key, each in pairs]


@given(given_body=bodies(), wire=st.sampled_from(Wire))
def test_the_reading_of_a_body_agrees_with_full_parsing(
    given_body: tuple[bytes, list[tuple[str, Any]]], wire: Wire
) -> None:
    body, pairs = given_body
    fields = dict(pairs)
    found = read(body, wire)
    assert isinstance(found, str) == (not once(pairs, "model") or not once(pairs, "stream"))
    if isinstance(found, str):
        assert found == "invalid_json"
        return
    model = fields.get("model")
    assert found.model == (model if isinstance(model, str) and model else None)
    assert found.model_present == (model is not None)
    if wire is not Wire.OLLAMA_NDJSON:
        assert found.stream == (fields.get("stream") is True)
    if found.model_span is not None:
        span = replace_model(body, "new", found.model_span)
        assert span == replace_model(body, "new")
    if wire is Wire.CHAT and isinstance(fields.get("messages"), list) and not fields.get("tools"):
        assert same([json.loads(bytes(piece)) for piece in found.pieces], fields["messages"])


@given(body=st.binary(max_size=200), wire=st.sampled_from(Wire))
def test_no_bytes_make_the_parser_raise_anything_but_a_refusal(body: bytes, wire: Wire) -> None:
    for attempt in (body, b"{" + body + b"}", b'{"model":"' + body + b'"}'):
        found = read(attempt, wire)
        assert isinstance(found, ParsedRequest) or found == "invalid_json"
