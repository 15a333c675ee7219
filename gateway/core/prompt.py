"""Where the prompt stands in a request body, in the order in which the engine will see it.

Law of this file: one more turn of a conversation leaves all earlier pieces as they were, so that the prefix
index can hash piece by piece. Pieces are views of the body; nothing is copied.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Final

import msgspec

from gateway.core.json_scan import equals, few_elements
from gateway.core.wire import Wire

IMAGE_BYTES: Final = 4096  # what an inline image or file counts: about a thousand tokens
LARGE_PIECE: Final = 16 * 1024  # bytes: smaller pieces are not searched for inline data
MOST_IMAGES: Final = 256  # searched for in one request

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
_INLINE: Final = (b";base64,", b'"data":"', b'"data": "', b'"images":["', b'"images": ["')
_FIRST_ELEMENT = re.compile(rb"\[[ \t\r\n]*+(.)", re.DOTALL)
_elements = msgspec.json.Decoder(list[msgspec.Raw]).decode


def pieces_of(fields: Mapping[str, memoryview], wire: Wire) -> tuple[Piece, ...]:
    """The prompt, as the raw JSON values it consists of. Empty and null members are left out."""
    before, sequence, after = _ORDER[wire]
    pieces = list(_present(fields, before))
    listed = fields.get(sequence)
    if listed is not None:
        pieces += _listed(listed)
    pieces += _present(fields, after)
    return tuple(pieces)


def prompt_bytes_of(pieces: tuple[Piece, ...]) -> int:
    """The size of the prompt in bytes, with each inline image or file counted as IMAGE_BYTES."""
    total = 0
    left = MOST_IMAGES
    for piece in pieces:
        total += len(piece)
        if len(piece) >= LARGE_PIECE and left:
            inline, images = _inline(bytes(piece), left)
            total += images * IMAGE_BYTES - inline
            left -= images
    return total


def permits_of_prompt(prompt: memoryview | None) -> int:
    """How many sequences a completions `prompt` starts: one for a text or a list of tokens, else one an element.

    llama-server reads a list that mixes texts and tokens as one prompt.
    """
    first = _FIRST_ELEMENT.match(prompt) if prompt is not None else None
    if prompt is None or first is None or first.group(1) not in (b'"', b"[", b"{"):
        return 1
    raw = bytes(prompt)
    if not few_elements(raw):
        return raw.count(b",") + 1  # an upper bound, and far more than any backend has slots
    elements = _split(raw)
    if any(bytes(memoryview(element)[:1]) in _DIGITS for element in elements):
        return 1
    return max(len(elements), 1)


_DIGITS: Final = frozenset(b"%d" % digit for digit in range(10)) | {b"-"}


def _present(fields: Mapping[str, memoryview], names: Iterable[str]) -> Iterable[Piece]:
    return (fields[name] for name in names if name in fields and not _is_empty(fields[name]))


def _is_empty(value: memoryview) -> bool:
    return equals(value, b"null") or equals(value, b"[]") or equals(value, b'""')


def _listed(listed: memoryview) -> Iterable[Piece]:
    """The elements of a list; a text (or a list of very many elements) is one piece."""
    if bytes(listed[:1]) != b"[" or (len(listed) > 1 << 18 and not few_elements(bytes(listed))):
        return _present({"": listed}, ("",))
    return [memoryview(element) for element in _split(listed)]


def _split(listed: bytes | memoryview) -> list[msgspec.Raw]:
    try:
        return _elements(listed)
    except (msgspec.MsgspecError, RecursionError):
        return [msgspec.Raw(bytes(listed))]  # holds NaN or a lone surrogate: one piece


def _inline(piece: bytes, most: int) -> tuple[int, int]:
    """Bytes of base64 data in a piece, and in how many images or files."""
    size = images = 0
    for mark in _INLINE:
        at = piece.find(mark)
        while at >= 0 and images < most:
            start = at + len(mark)
            end = piece.find(b'"', start)
            if end - start > IMAGE_BYTES:
                size += end - start
                images += 1
            at = piece.find(mark, max(end, start))
    return size, images
