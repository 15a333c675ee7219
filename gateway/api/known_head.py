"""A request head that is known again on its connection, whatever the length of the body that follows it.

Clients say the same of every request but that length: an SDK's 17 headers took a fifth of a request to read.
"""

from __future__ import annotations

from typing import Final

import msgspec

# Of the headers that are special to the reader, all that such a head may have.
COUNTED: Final = frozenset({b"content-length", b"host"})
MOST_DIGITS: Final = 12  # of its content-length, and what a head must stay below the limit
_LENGTH: Final = b"\r\ncontent-length:"


class KnownHead(msgspec.Struct, frozen=True, gc=False):
    """What stands before and after the digits of a head's content-length, and its headers."""

    before: bytes
    after: bytes  # to the end of the head
    headers: list[tuple[bytes, bytes]]
    place: int  # which of them is the content-length


def known_head(
    head: bytes, headers: list[tuple[bytes, bytes]], size_limit: int
) -> KnownHead | None:
    """How to know this head again, if it has a content-length, and would still be within the limit with a longer one.

    `head` was read and accepted: so no header of COUNTED is there twice, and no line is folded.
    """
    start = head.lower().find(_LENGTH) + len(_LENGTH)
    end = head.find(b"\r", start)
    digits = head[start:end].lstrip(b" ")
    if start < len(_LENGTH) or not digits.isdigit() or len(head) + MOST_DIGITS > size_limit:
        return None
    place = next(n for n, (name, _) in enumerate(headers) if name == b"content-length")
    return KnownHead(head[: end - len(digits)], head[end:], headers, place)
