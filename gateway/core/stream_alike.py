"""Events that differ in a piece of plain text only: once one is read, the next is known by its two ends.

Law of this file: what is known again is, byte by byte, an event that was read in full, but for the text of
one JSON string, which is not empty and holds nothing that could end the string, the line or the event.
"""

from __future__ import annotations

import re
from typing import Final

TEXTS: Final = (b'"content":"', b'"reasoning_content":"', b'"reasoning":"', b'"text":"')
is_plain: Final = re.compile(rb'[^"\\\x00-\x1f]+').fullmatch


class Alike:
    """The shape of one event of a stream: its bytes before and after its text. Owned by its Tap."""

    __slots__ = ("_after", "_before", "shape")

    def __init__(self) -> None:
        self._before: bytes | tuple[()] = ()  # nothing begins with one of no alternatives
        self._after = b""
        self.shape: tuple[bytes, bytes] | None = None

    def knows(self, event: bytes) -> bool:
        """Is it the event that was learned, with another text?"""
        return (
            event.startswith(self._before)
            and event.endswith(self._after)
            and is_plain(event, len(self._before), len(event) - len(self._after)) is not None
        )

    def learn(self, event: bytes) -> None:
        """Take this event as the model, if it has one text, and that a plain one."""
        for key in TEXTS:
            start = event.find(key) + len(key)
            if start >= len(key):
                end = event.find(b'"', start)
                if event.find(key, end) < 0 and b"\\" not in event[start:end]:
                    self.shape = self._before, self._after = event[:start], event[end:]
                return
