"""Finds the members of a JSON object in its bytes, without building the tree.

Law of this file: whatever bytes come, the work is done at C speed (msgspec, bytes methods, possessive regular
expressions), and the number of Python steps is bounded by MOST_MEMBERS. Offsets are those of the body as given.
"""

from __future__ import annotations

import json
import re
from typing import Final, NamedTuple, TypeAlias

import msgspec

from gateway.core.errors import GatewayError

MOST_MEMBERS: Final = 1024  # at the top level; no API has a tenth of it
MANY_COMMAS: Final = 50_000  # more may mean millions of tiny elements: none is listed one by one
SMALL: Final = 64 * 1024  # bytes: too few for the elements in it to matter
MOST_PATCHES: Final = 100_000  # of a kind; a body with more oddities than that is refused

# What a decoder raises for bytes that are not JSON, or nested too deeply.
UNREADABLE: Final = (msgspec.MsgspecError, ValueError, RecursionError)

Span: TypeAlias = tuple[int, int]
Value: TypeAlias = msgspec.Raw | memoryview  # the bytes of one JSON value, not copied

_WS: Final = rb"[ \t\r\n]*+"
_KEY = re.compile(
    _WS + rb"[{,]" + _WS + rb'("[^"\\]*+(?:\\.[^"\\]*+)*+")' + _WS + rb":" + _WS, re.DOTALL
)
_AFTER: Final = (b",", b"}", b" ", b"\n", b"\r", b"\t")
_TRAILING = re.compile(r"trailing characters \(byte (\d+)\)")


class Member(NamedTuple):
    """One top-level member: where its `"key"` begins, and where its value begins and ends."""

    name: str
    start: int
    value: int
    end: int


# The values of a body by name, what `few_elements` says of it, and where the value of `model` stands.
TopLevel: TypeAlias = tuple[dict[str, Value], bool, Span | None]

# The members that are large: measured in the one pass that checks a body, where it has too many to list.
_Large = msgspec.defstruct(
    "_Large",
    [
        (name, msgspec.Raw, msgspec.Raw())
        for name in ("messages", "input", "prompt", "tools", "system", "context", "documents")
    ],
)
_large_members = msgspec.json.Decoder(_Large).decode
_all_members = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_strict_text = msgspec.json.Decoder(str).decode
_one_value = msgspec.json.Decoder(msgspec.Raw).decode


def top_level(body: bytes, *, once: tuple[str, ...]) -> TopLevel:
    """The top-level values by name. A repeated name has its last value, as every engine's parser sees it.

    Raises GatewayError("invalid_json") as `members` does, and if a name of `once` is repeated.
    """
    few = len(body) <= SMALL or few_elements(body)
    sound, lengths = _measured(body, few=few)
    if few and sound is body and (space := _usual_space(body, lengths)) is not None:
        return lengths, few, _model_span(lengths, space)  # type: ignore[return-value]
    found = _walk(body, sound, lengths)
    spans = {member.name: (member.value, member.end) for member in found}
    if len(spans) < len(found):
        names = [member.name for member in found]
        for name in once:
            if names.count(name) > 1:
                message = f"The request body holds {name!r} twice."
                raise GatewayError("invalid_json", message, param=name)
    view = memoryview(body)  # not of the sound copy: what is read must be the client's own
    values: dict[str, Value] = {name: view[start:end] for name, (start, end) in spans.items()}
    return values, few, spans.get("model")


def members(body: bytes) -> list[Member]:
    """The top-level members in order, repeated names included.

    Raises GatewayError("invalid_json") if the body is not one JSON object, is nested too deeply, or has more
    than MOST_MEMBERS members. Lone surrogates and NaN are let through: they are the engine's to judge.
    """
    return _walk(body, *_measured(body, few=few_elements(body)))


def tolerable(data: bytes) -> bytes:
    """A copy of the same length and structure that a strict parser accepts, to take offsets from.

    Python engines accept NaN, Infinity and lone surrogates, and clients that cut text in the middle of an
    emoji send the last. Inside strings the copy differs from the original: never forward it.
    """
    for odd, even in (
        (b"NaN", b"0e0"),
        (b"Infinity", b"0e000000"),
        (b"\\ud", b"\\u0"),
        (b"\\uD", b"\\u0"),
    ):
        data = data.replace(odd, even, MOST_PATCHES)
    return data


def few_elements(data: bytes) -> bool:
    """True if listing the elements of this document one by one cannot hold the event loop."""
    if len(data) <= SMALL:
        return True
    # The first MiB decides about most of what is dense, and spares the look at the rest.
    dense = data.count(b",", 0, 1 << 20)
    return dense <= MANY_COMMAS and dense + data.count(b",", 1 << 20) <= MANY_COMMAS


def equals(value: Value | None, literal: bytes) -> bool:
    """True if the value is written just so."""
    return value is not None and len(value) == len(literal) and bytes(value) == literal


def text_of(value: Value) -> str | None:
    """The string that these JSON bytes are, lone surrogates replaced; None if they are something else."""
    try:
        return _strict_text(value)
    except UNREADABLE:
        pass
    try:
        text = json.loads(bytes(value))
    except ValueError:
        return None
    if not isinstance(text, str):
        return None
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _measured(body: bytes, *, few: bool) -> tuple[bytes, dict[str, msgspec.Raw]]:
    """The body (or the copy of it that is strict JSON), and its values by name, in one pass.

    Not `few`: only the values that are large. A repeated name has its last value.
    """
    decode = _all_members if few else _large_of
    try:
        return body, decode(body)
    except UNREADABLE as strict:
        patched = tolerable(body)
        if patched == body:
            raise _invalid(strict) from None
    try:
        return patched, decode(patched)
    except UNREADABLE as error:
        raise _invalid(error) from None


def _large_of(body: bytes) -> dict[str, msgspec.Raw]:
    return msgspec.structs.asdict(_large_members(body))


def _usual_space(body: bytes, values: dict[str, msgspec.Raw]) -> int | None:
    """How many spaces follow each colon and comma, 0 or 1, if that is all there is and no name is repeated.

    A repeated name is one that msgspec reports once: its bytes are missing from the sum of the members. So
    without whitespace the right length proves that nothing is repeated; with it, the bytes must be compared.
    """
    least = sum(map(len, values)) + sum(map(len, values.values())) + 4 * len(values) + 1
    if len(body) == least:
        return 0
    if len(body) != least + 2 * len(values) - 1 or len(body) > SMALL:
        return None
    spaced = b", ".join([b'"%b": %b' % (name.encode(), raw) for name, raw in values.items()])
    return 1 if body.startswith(spaced, 1) else None  # as long as all but its braces


def _model_span(values: dict[str, msgspec.Raw], space: int) -> Span | None:
    at = 1
    for name, raw in values.items():
        at += len(name) + 3 + space
        if name == "model":
            return at, at + len(raw)
        at += len(raw) + 1 + space
    return None


def _walk(body: bytes, sound: bytes, lengths: dict[str, msgspec.Raw]) -> list[Member]:
    """Steps from key to key of the sound copy, past the values that `_measured` found. Names are the body's.

    The values it did not keep (repeated names, small ones in a body of very many) are measured one by one.
    """
    found: list[Member] = []
    at = 0
    while match := _KEY.match(sound, at):
        if len(found) == MOST_MEMBERS:
            message = f"The request body has more than {MOST_MEMBERS} members."
            raise GatewayError("invalid_json", message)
        name = known = _name(match.group(1))
        if sound is not body:
            name = _name(body[match.start(1) : match.end(1)])
        value = match.end()
        at = _end_of_known(sound, value, lengths.get(known)) or _end_of_value(sound, value)
        found.append(Member(name, match.start(1), value, at))
    return found


def _name(key: bytes) -> str:
    text = key.decode("utf-8", "replace")
    return text[1:-1] if "\\" not in text else str(json.loads(text))


def _end_of_known(body: bytes, start: int, raw: msgspec.Raw | None) -> int | None:
    """Where the value ends, if it is this one. `1` also begins `12`, so what follows is looked at too."""
    if not raw or not body.startswith(raw, start):
        return None
    end = start + len(raw)
    return end if body[end : end + 1] in _AFTER else None


def _end_of_value(body: bytes, start: int) -> int:
    """Where the value that begins at `start` ends. The body is known to be valid JSON.

    msgspec reads one value and names the offset of what follows it: the only way to skip a value of any
    depth and size at C speed. A test holds it to that message.
    """
    found = None
    try:
        _one_value(memoryview(body)[start:])
    except msgspec.DecodeError as error:
        found = _TRAILING.search(str(error))
    if found is None:
        raise GatewayError(
            "invalid_json", "The request body repeats a member in an unreadable way."
        )
    end = start + int(found.group(1)) - 1
    return start + len(body[start:end].rstrip(b" \t\r\n"))


def _invalid(error: Exception) -> GatewayError:
    """The 400 for a body that is not a JSON object, with the parser's reason and never a byte of the body."""
    if isinstance(error, RecursionError):
        return GatewayError("invalid_json", "The request body is nested too deeply.")
    if isinstance(error, msgspec.ValidationError):
        return GatewayError("invalid_json", "The request body must be a JSON object.")
    reason = str(error) if isinstance(error, msgspec.DecodeError) else "not valid UTF-8"
    return GatewayError("invalid_json", f"The request body is not valid JSON: {reason}.")
