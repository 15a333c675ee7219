"""Which backend has said that it does not serve a path.

What a kind of engine can do is known beforehand (`engines/paths.py`); what this build of it can, it tells by its 404
or 501. Law of this file: only words that engines have for an unknown path count (engines.md 1.10, 2.9, 3.9 and 5), for
a 404 may be about a model and a 4xx never counts against a backend; and what was learned is tried again after a while,
for an engine may have been replaced.
"""

from __future__ import annotations

from typing import Final

AGAIN_AFTER_S: Final = 300.0
_NO_SUCH_PATH: Final = (
    b'"detail":"not found"',
    b'"detail":"method not allowed"',
    b"file not found",
    b"404 page not found",
    b"405 method not allowed",
    b"unexpected endpoint",
)


class Lacking:
    """Owner of what was learned: at most one entry for each backend and path."""

    def __init__(self) -> None:
        self._until: dict[tuple[str, str], float] = {}

    def hear(self, now: float, backend: str, path: str, status: int, body: bytes) -> None:
        """An engine's answer to a request for this path. `now` in monotonic seconds."""
        told = body[:4096].lower().replace(b": ", b":")
        if status == 501 or (status in (404, 405) and any(text in told for text in _NO_SUCH_PATH)):
            self._until[backend, path] = now + AGAIN_AFTER_S

    def backends(self, now: float, path: str) -> frozenset[str]:
        """Those that have lately said that they lack it."""
        if not self._until:
            return frozenset()
        for known, until in list(self._until.items()):
            if until <= now:
                del self._until[known]
        return frozenset(backend for backend, lacked in self._until if lacked == path)
