"""Cuts a stream of bytes into blocks: SSE events at their blank line, NDJSON records at their newline.

Law of this file: the blocks do not depend on how the bytes were split into reads, and at most `WHOLE` bytes
plus one read are kept, however long a block is.
"""

from __future__ import annotations

from typing import NamedTuple

from gateway.core.figures import END, WHOLE

CR = 13


class Cut(NamedTuple):
    """A block too long to keep: its two ends."""

    head: bytes
    tail: bytes


class Blocks:
    """State of one stream; owned by its Tap.

    `events`: SSE. Lines end with LF, CRLF or CR, also mixed (the WHATWG event stream grammar), and a CRLF may
    come in two reads; a block ends at a blank line. Otherwise: records that end with LF.
    """

    __slots__ = ("_after_cr", "_events", "_head", "_held", "fresh", "separator")

    def __init__(self, *, events: bool) -> None:
        self._events = events
        self.separator = b"\n\n" if events else b"\n"
        self._held = bytearray()  # the block that has not ended yet, with LF line ends
        self._head = b""  # its beginning, once the block is too long to keep
        self._after_cr = False  # the last byte was a CR: a LF that follows belongs to it
        self.fresh = True  # nothing is held: the next byte begins a block

    @property
    def at_boundary(self) -> bool:
        """Something may be inserted here: no block is open, or only whole comment lines are."""
        if self._head:
            return False
        if not self._held:
            return True
        return self._held.endswith(b"\n") and all(
            line[:1] in (b"", b":") for line in bytes(self._held).split(b"\n")
        )

    @property
    def rest(self) -> bytes | Cut:
        """What a stream that ended without a separator left behind."""
        return Cut(self._head, bytes(self._held[-END:])) if self._head else bytes(self._held)

    def feed(self, data: bytes) -> list[bytes | Cut]:
        """The blocks that this read completes, without their separators."""
        if self._events and (self._after_cr or CR in data):
            data = self._with_lf(data)
        if not self._held and not self._head and data.endswith(self.separator):
            blocks = self._whole(data[: -len(self.separator)])
        else:
            blocks = self._join(data)
        self.fresh = not (self._held or self._head or self._after_cr)
        return blocks

    def _with_lf(self, data: bytes) -> bytes:
        if self._after_cr and data[:1] == b"\n":
            data = data[1:]
            self._after_cr = False
        if data:
            self._after_cr = data.endswith(b"\r")
        return data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")

    def _whole(self, data: bytes) -> list[bytes | Cut]:
        return [_bounded(block) for block in data.split(self.separator)]

    def _join(self, data: bytes) -> list[bytes | Cut]:
        held = self._held
        seen = max(0, len(held) - len(self.separator) + 1)
        held += data
        end = held.rfind(self.separator, seen)
        if end < 0:
            self._trim()
            return []
        first = held.find(self.separator, seen)
        blocks = [self._finish(bytes(held[:first]))]
        if first < end:
            blocks += self._whole(bytes(held[first + len(self.separator) : end]))
        del held[: end + len(self.separator)]
        self._trim()
        return blocks

    def _finish(self, block: bytes) -> bytes | Cut:
        if not self._head:
            return _bounded(block)
        cut = Cut(self._head, block[-END:])
        self._head = b""
        return cut

    def _trim(self) -> None:
        if len(self._held) > WHOLE:
            self._head = self._head or bytes(self._held[:END])
            del self._held[:-END]


def _bounded(block: bytes) -> bytes | Cut:
    return block if len(block) <= WHOLE else Cut(block[:END], block[-END:])
