"""What is seen of one stream while it passes, and the short way of an event that comes as one whole chunk.

Laws of this file:
- A read is passed on as it came only if it is one whole chunk, framed as it would be framed here.
- An event goes past the tap only if it is one that the tap has read, but for a plain text (`core.stream_alike`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from gateway.core.figures import Usage
from gateway.core.sse import Tap
from gateway.core.stream_alike import is_plain
from gateway.runtime.http1 import TakeChunk

MOST_LENGTHS = 1024  # of chunks that are known by their length


class Meter(Protocol):
    """Who is told what passes. Called once per read that carries content."""

    def content(self, now: float, events: int) -> None: ...
    def told(self, usage: Usage | None, prefill_s: float | None = None) -> None: ...
    def left_with_all(self) -> None: ...


class Watch:
    """Looks at one stream. Owned by the relay of it."""

    __slots__ = ("_end", "_starts", "_usual", "meter", "tap", "told")

    def __init__(self, tap: Tap, meter: Meter) -> None:
        self.tap = tap
        self.meter = meter
        self.told = b""  # the read in which the engine reported an error
        self._usual: tuple[bytes, bytes] | None = None  # `tap.usual` after the last look
        self._starts: dict[int, bytes] = {}  # how a chunk with such an event begins, by its length
        self._end = b""  # and how it ends

    def look(self, data: bytes, now: float) -> None:
        """The next bytes of the body."""
        if events := self.tap.feed(data):
            self.meter.content(now, events)
        elif self.tap.saw_error:
            self.told = self.told or data
        usual = self.tap.usual
        if usual is not self._usual:
            self._usual = usual
            self._starts.clear()
            self._end = usual[1] + b"\r\n" if usual is not None else b""

    def chunk_taker(
        self, put_chunk: Callable[[bytes], bool], on_behind: Callable[[], None]
    ) -> TakeChunk:
        """For `Response.pass_on`: looks at a read that is one whole chunk, and has it put as it came.

        What is known by its length goes a short way: a search, a comparison and a call for each step of the long one
        were half of what an event cost us. `on_behind`: it was put, and no more should come.
        """
        starts, content = self._starts, self.meter.content

        def take_chunk(data: bytes, now: float) -> bool:
            length = len(data)
            start = starts.get(length)
            end = self._end
            if (
                start is not None
                and data[: len(start)] == start
                and data[-len(end) :] == end
                and is_plain(data, len(start), length - len(end)) is not None
            ):
                content(now, 1)
            elif at := _data_of_chunk(data):
                self.look(data[at:-2], now)
                if self._usual is not None and len(starts) < MOST_LENGTHS:
                    starts[length] = data[:at] + self._usual[0]
            else:
                return False
            if not put_chunk(data):
                on_behind()
            return True

        return take_chunk


def _data_of_chunk(data: bytes) -> int:
    """Where the data of a read that is one whole chunk begins (it ends before the last CRLF); 0 if it is none.

    Told by its size alone: what the chunk's first line says must be what came.
    """
    end = data.find(b"\r\n", 1, 9)
    size = len(data) - end - 4
    if end > 0 and size > 0 and data[:end] == b"%x" % size and data.endswith(b"\r\n"):
        return end + 2
    return 0
