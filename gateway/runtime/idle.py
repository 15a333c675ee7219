"""The idle connections of one backend, kept for the next request.

Law of this file: a connection is handed out only while it is younger in its idleness than the backend's patience
(llama-server and uvicorn close after 5 s), and only if nothing has come on it. The latest is handed out first, so
that those not needed grow old and go.
"""

from __future__ import annotations

import asyncio
from typing import Final

from gateway.runtime.connection import Connection

MAX_IDLE: Final = 256  # more than the slots of any engine; what is above is closed


class IdleConnections:
    """Owns the connections while nobody uses them, and the timer that ends the old ones."""

    def __init__(self, *, expiry_s: float, max_requests: int) -> None:
        self._expiry_s = expiry_s
        self._max_requests = max_requests
        self._since: dict[Connection, float] = {}  # in the order of becoming idle
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False

    def __len__(self) -> int:
        return len(self._since)

    def take(self) -> Connection | None:
        """The connection that became idle last and can still be used, if there is one."""
        while self._since:
            connection, since = self._since.popitem()
            age_s = connection.loop.time() - since
            if age_s < self._expiry_s and connection.is_quiet():
                return connection
            connection.abort()
        return None

    def put(self, connection: Connection) -> None:
        """Take back a connection whose exchange has ended well; close it if it is not worth keeping."""
        used_up = connection.served >= self._max_requests or self._expiry_s <= 0
        if used_up or self._closed or len(self._since) >= MAX_IDLE:
            connection.abort()
            return
        loop = connection.loop
        self._since[connection] = loop.time()
        if self._timer is None:
            self._timer = loop.call_later(self._expiry_s, self._sweep)

    def forget(self, connection: Connection) -> None:
        """The connection was lost."""
        self._since.pop(connection, None)

    def close(self) -> None:
        """Close all, and keep none from now on."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._since:
            self._since.popitem()[0].abort()

    def _sweep(self) -> None:
        self._timer = None
        loop = asyncio.get_running_loop()
        oldest = loop.time() - self._expiry_s
        for connection, since in list(self._since.items()):
            if since > oldest:
                self._timer = loop.call_at(since + self._expiry_s, self._sweep)
                return
            del self._since[connection]
            connection.abort()
