"""Where the prompt stands in a request body, in the order in which the engine will see it.

Law of this file: one more turn of a conversation leaves all earlier pieces as they were, so that the prefix
index can hash piece by piece. Pieces are views of the body; nothing is copied.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import msgspec

from gateway.core.json_scan import UNREADABLE, Value, equals, tolerable
from gateway.core.wire import Wire

IMAGE_BYTES: Final = 4096  # what an inline image or file counts: about a thousand tokens
LARGE_PIECE: Final = 16 * 1024  # bytes: smaller pieces are not probed for inline data
PROBE_EVERY: Final = 4096  # bytes
MOST_PIECES: Final = 4096  # a longer list stays one piece

Piece = memoryview

# (single values, then the list whose elements follow one by one, then what comes after it)
_ORDER: Final[Mapping[Wire, tuple[tuple[str, ...], str, tuple[str, ...]]]] = {
    Wire.CHAT: (("tools", "functions"), "messages", ()),
    Wire.COMPLETIONS: (("prompt", "suffix"), "", ()),
    Wire.RESPONSES: (("instructions", "tools"), "input", ()),
    Wire.MESSAGES: (("tools", "system"), "messages", ()),
    Wire.OLLAMA_NDJSON: (
        ("tools", "system"),
        "messages",
        ("context", "prompt", "suffix", "images"),
    ),
    Wire.NATIVE: (("input_extra", "input_prefix", "prompt", "input_suffix"), "", ()),
    Wire.JSON: (
        ("tools", "system"),
        "messages",
        ("input", "query", "documents", "prompt", "content", "text_1", "text_2"),
    ),
}
_BASE64 = re.compile(rb"[A-Za-z0-9+/=]{256}")  # 256 in a row: no prose, no hash, no minified code
_FIRST_ELEMENT = re.compile(rb"\[[ \t\r\n]*+(.)", re.DOTALL)
_GAP = re.compile(rb"[ \t\r\n]*+[\[,][ \t\r\n]*+")
_elements = msgspec.json.Decoder(list[msgspec.Raw]).decode


def pieces_of(fields: Mapping[str, Value], wire: Wire, *, few: bool) -> tuple[Piece, ...]:
    """The prompt, as the raw JSON values it consists of. Empty and null members are left out.

    `few`: what `few_elements` says of the body; without it, no list is taken apart.
    """
    before, sequence, after = _ORDER[wire]
    pieces = _present(fields, before)
    listed = fields.get(sequence)
    if listed is not None:
        pieces += _listed(listed, few=few)
    if after:
        pieces += _present(fields, after)
    return tuple(pieces)


def prompt_bytes_of(pieces: tuple[Piece, ...]) -> int:
    """The size of the prompt in bytes, with each inline image or file counted as about IMAGE_BYTES."""
    total = sum(map(len, pieces))
    if total >= LARGE_PIECE:  # one of them may be
        total -= sum(_inline(piece) for piece in pieces if len(piece) >= LARGE_PIECE)
    return total


def permits_of_prompt(prompt: Value | None, *, few: bool) -> int:
    """How many sequences a completions `prompt` starts: one for a text or a list of tokens, else one an element.

    llama-server reads a list that mixes texts and tokens as one prompt.
    """
    first = _FIRST_ELEMENT.match(prompt) if prompt is not None else None
    if prompt is None or first is None or first.group(1) not in (b'"', b"[", b"{"):
        return 1
    if not few:
        return len(prompt)  # an upper bound, and far more than any backend has slots
    elements = _split(prompt)
    if any(element[0] in b"-0123456789" for element in elements):
        return 1
    return max(len(elements), 1)


def _present(fields: Mapping[str, Value], names: Iterable[str]) -> list[Piece]:
    pieces: list[Piece] = []
    for name in names:
        value = fields.get(name)
        if value is not None and not _is_empty(value):
            pieces.append(memoryview(value))
    return pieces


def _is_empty(value: Value) -> bool:
    return equals(value, b"null") or equals(value, b"[]") or equals(value, b'""')


def _listed(listed: Value, *, few: bool) -> Sequence[Piece]:
    """The elements of a list; a text (or a list of very many elements) is one piece."""
    if few and memoryview(listed)[0] == ord("["):
        elements = _split(listed)
        if len(elements) <= MOST_PIECES:
            return elements
    return () if _is_empty(listed) else (memoryview(listed),)


def _split(listed: Value) -> list[Piece]:
    """The elements of a list. One that only lenient parsers accept lends its lengths from a strict copy."""
    try:
        return [memoryview(element) for element in _elements(listed)]
    except UNREADABLE:
        view = memoryview(listed)
    try:
        elements = _elements(tolerable(bytes(listed)))
    except UNREADABLE:
        return [view]
    pieces: list[Piece] = []
    at = 0
    for element in elements:
        gap = _GAP.match(view, at)
        at = gap.end() if gap else at
        pieces.append(view[at : at + len(element)])
        at += len(element)
    return pieces


def _inline(piece: Piece) -> int:
    """How many bytes too much base64 data makes this piece, as found by a probe every PROBE_EVERY bytes.

    Wherever it stands (data URI, `source.data`, `input_audio`, Ollama's `images`), it needs no name.
    """
    excess = 0
    inside = False
    for at in range(0, len(piece), PROBE_EVERY):
        was_inside, inside = inside, _BASE64.match(piece, at) is not None
        if inside:
            excess += PROBE_EVERY if was_inside else PROBE_EVERY - IMAGE_BYTES
    return excess
