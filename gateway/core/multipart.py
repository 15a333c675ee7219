"""The `model` field of a multipart form (audio, images), found and replaced in the bytes.

Law of this file: the form is never rebuilt; file parts are stepped over at C speed; at most MOST_PARTS parts are
looked at. Grammar: RFC 2046 section 5.1.1 and RFC 7578.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

MOST_PARTS: Final = 64
MOST_HEADER: Final = 8 * 1024  # bytes of one part's header
LONGEST_MODEL: Final = 1024  # bytes; a longer value names no model

_BOUNDARY = re.compile(r';\s*boundary\s*=\s*(?:"([^"]{1,200})"|([^\s;"]{1,200}))', re.IGNORECASE)
_NAME = re.compile(
    rb'^content-disposition\s*:\s*form-data\s*;[^\r\n]*?\bname\s*=\s*"?model"?\s*(?:;|\r?$)',
    re.IGNORECASE | re.MULTILINE,
)


def is_multipart(content_type: str) -> bool:
    """True if a body of this content type is a form in parts."""
    return content_type.strip().lower().startswith("multipart/form-data")


def multipart_model(body: bytes, content_type: str) -> str | None:
    """The value of the form's `model` field; None if there is none, or it is no UTF-8 or absurdly long."""
    span = _model_span(body, content_type)
    if span is None or span[1] - span[0] > LONGEST_MODEL:
        return None
    try:
        return body[span[0] : span[1]].decode().strip() or None
    except UnicodeDecodeError:
        return None


def replace_multipart_model(body: bytes, content_type: str, new_model: str) -> bytes:
    """The form with another value in its `model` field; every other byte stays."""
    span = _model_span(body, content_type)
    if span is None:
        return body
    return b"".join((body[: span[0]], new_model.encode(), body[span[1] :]))


def _model_span(body: bytes, content_type: str) -> tuple[int, int] | None:
    """Where the value of the first part named `model` stands."""
    for start, end in _parts(body, content_type):
        header_end = body.find(b"\r\n\r\n", start, min(end, start + MOST_HEADER))
        if header_end >= 0 and _NAME.search(body[start:header_end]):
            return header_end + 4, end
    return None


def _parts(body: bytes, content_type: str) -> Iterator[tuple[int, int]]:
    """Begin (of the header) and end of each whole part."""
    found = _BOUNDARY.search(content_type)
    if found is None:
        return
    delimiter = b"--" + (found.group(1) or found.group(2)).encode("latin-1", "replace")
    at = 0 if body.startswith(delimiter) else body.find(b"\r\n" + delimiter) + 2
    if not body.startswith(delimiter, at):
        return
    delimiter = b"\r\n" + delimiter
    start = at + len(delimiter) - 2
    for _ in range(MOST_PARTS):
        end = body.find(delimiter, start)
        if end < 0:
            return
        yield body.find(b"\r\n", start) + 2, end
        start = end + len(delimiter)
