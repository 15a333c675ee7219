"""What a client sends before anybody wants it: held back for the next request, or read and dropped.

Law of this file: neither grows without bound. Held bytes stop the reading above `most`; dropped ones end the
connection.
"""

from __future__ import annotations

import asyncio


class Intake:
    """Owner of the bytes behind the request in progress, and of whether the transport reads."""

    __slots__ = ("_dropped", "_paused", "_transport", "backlog")

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._paused = False
        self._dropped = 0  # bytes read for nobody, since the last answer
        self.backlog = b""

    def hold(self, data: bytes, most: int) -> None:
        """Keep bytes for later; with more than `most` of them reading stops."""
        self.backlog += data
        if len(self.backlog) > most:
            self.pause()

    def take(self) -> bytes:
        data, self.backlog = self.backlog, b""
        return data

    def drop(self, count: int, most: int) -> bool:
        """Bytes came for nobody; whether it is too many since `answered`."""
        self._dropped += count
        return self._dropped > most

    def answered(self) -> None:
        """What comes for nobody from now on is counted anew."""
        self._dropped = 0

    def pause(self) -> None:
        if not self._paused:
            self._paused = True
            self._transport.pause_reading()

    def resume(self) -> None:
        if self._paused:
            self._paused = False
            self._transport.resume_reading()
