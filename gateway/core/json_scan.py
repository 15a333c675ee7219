"""Finds the members of a JSON object in its bytes, without building the tree.

Law of this file: whatever bytes come, the work is done at C speed (msgspec, bytes methods, possessive regular
expressions), and the number of Python steps is bounded by MOST_MEMBERS. Offsets are those of the body as given.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Final

import msgspec

from gateway.core.errors import GatewayError

MOST_MEMBERS: Final = 1024  # at the top level; no API has a tenth of it
MANY_COMMAS: Final = (
    50_000  # more may mean millions of tiny elements: then nothing is listed one by one
)
SMALL: Final = 256 * 1024  # bytes: too few for the elements in it to matter

_UNREADABLE = (msgspec.MsgspecError, ValueError, RecursionError)
_KEY = re.compile(
    rb'[ \t\r\n]*+[{,][ \t\r\n]*+("[^"\\]*+(?:\\.[^"\\]*+)*+")[ \t\r\n]*+:[ \t\r\n]*+'
)
_AFTER: Final = (b",", b"}", b" ", b"\n", b"\r", b"\t")
_TRAILING = re.compile(r"trailing characters \(byte (\d+)\)")


@dataclass(frozen=True, slots=True)
class Member:
    """One top-level member: where its `"key"` begins, and where its value begins and ends."""

    name: str
    start: int
    value: int
    end: int


class _Anything(msgspec.Struct):
    """Checks that a body is a JSON object and keeps nothing of it."""


_any_object = msgspec.json.Decoder(_Anything).decode
_some_members = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_strict_text = msgspec.json.Decoder(str).decode
_one_value = msgspec.json.Decoder(msgspec.Raw).decode


def members(body: bytes) -> list[Member]:
    """The top-level members in order, repeated names included.

    Raises GatewayError("invalid_json") if the body is not one JSON object, is nested too deeply, or has more
    than MOST_MEMBERS members. Lone surrogates and NaN are let through: they are the engine's to judge.
    """
    try:
        return _walk(body)
    except _UNREADABLE as strict:
        patched = tolerable(body)
        if patched == body:
            raise invalid(strict) from None
    try:
        return _walk(patched)
    except _UNREADABLE as error:
        raise invalid(error) from None


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
        data = data.replace(odd, even)
    return data


def few_elements(data: bytes) -> bool:
    """True if listing the elements of this document one by one cannot hold the event loop."""
    return len(data) <= SMALL or data.count(b",") <= MANY_COMMAS


def equals(value: memoryview | None, literal: bytes) -> bool:
    """True if the value is written just so."""
    return value is not None and len(value) == len(literal) and bytes(value) == literal


def invalid(error: Exception) -> GatewayError:
    """The 400 for a body that is not a JSON object, with the parser's reason and never a byte of the body."""
    if isinstance(error, RecursionError):
        return GatewayError("invalid_json", "The request body is nested too deeply.")
    if isinstance(error, msgspec.ValidationError):
        return GatewayError("invalid_json", "The request body must be a JSON object.")
    reason = str(error) if isinstance(error, msgspec.DecodeError) else "not valid UTF-8"
    return GatewayError("invalid_json", f"The request body is not valid JSON: {reason}.")


def text_of(value: bytes) -> str | None:
    """The string that these JSON bytes are, lone surrogates replaced; None if they are something else."""
    try:
        return _strict_text(value)
    except msgspec.MsgspecError:
        pass
    if value[:1] != b'"':
        return None
    try:
        text = str(json.loads(value))
    except ValueError:
        return None
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _walk(body: bytes) -> list[Member]:
    """Steps from key to key. The values' lengths come from one pass of msgspec over the whole body.

    Where a name is repeated, msgspec keeps only its last value: the other one is measured by itself.
    """
    if few_elements(body):
        lengths = _some_members(body)
    else:
        _any_object(body)
        lengths = {}
    found: list[Member] = []
    at = 0
    while match := _KEY.match(body, at):
        if len(found) == MOST_MEMBERS:
            raise GatewayError(
                "invalid_json", f"The request body has more than {MOST_MEMBERS} members."
            )
        key = match.group(1)
        name = key[1:-1].decode() if b"\\" not in key else str(json.loads(key))
        value = match.end()
        at = _end_of_known(body, value, lengths.get(name)) or _end_of_value(body, value)
        found.append(Member(name, match.start(1), value, at))
    return found


def _end_of_known(body: bytes, start: int, raw: msgspec.Raw | None) -> int | None:
    """Where the value ends, if it is this one. `1` also begins `12`, so what follows is looked at too."""
    if raw is None or not body.startswith(raw, start):
        return None
    end = start + len(raw)
    return end if body[end : end + 1] in _AFTER else None


def _end_of_value(body: bytes, start: int) -> int:
    """Where the value that begins at `start` ends. The body is known to be valid JSON.

    msgspec reads one value and names the offset of what follows it: the only way to skip a value of any
    depth and size at C speed. A test holds it to that message.
    """
    try:
        _one_value(memoryview(body)[start:])
    except msgspec.DecodeError as error:
        found = _TRAILING.search(str(error))
        if found is None:
            raise
        end = start + int(found.group(1)) - 1
        while body[end - 1] in b" \t\r\n":
            end -= 1
        return end
    return len(body)
