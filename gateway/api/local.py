"""What the gateway answers of itself: health, metrics, status. None of it waits for an engine."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any
from urllib.parse import parse_qs

from gateway.api.front import Local
from gateway.core.errors import Headers
from gateway.runtime.backends import Backends
from gateway.runtime.exchange import Exchange
from gateway.runtime.exposition import Exposition

JSON: Headers = [(b"content-type", b"application/json")]
TEXT: Headers = [(b"content-type", b"text/plain; charset=utf-8")]
METRICS_TYPE = b"text/plain; version=1.0.0; charset=utf-8"


class LocalPages:
    """The handlers. `table` is what `Front` looks paths up in."""

    def __init__(
        self,
        backends: Backends,
        exposition: Exposition,
        status: Callable[[str | None], dict[str, Any]],  # with the id of a request to explain
        is_draining: Callable[[], bool],
        *,
        metrics_open: Callable[[], bool],
    ) -> None:
        self._backends = backends
        self._exposition = exposition
        self._status = status
        self._is_draining = is_draining
        self._metrics_open = metrics_open

    def table(self) -> dict[str, Local]:
        return {
            "/": Local(self.root),
            "/healthz": Local(self.health),
            "/health": Local(self.health),
            "/readyz": Local(self.ready),
            "/metrics": Local(self.metrics, "admin", unless=self._metrics_open),
            "/status": Local(self.status, "admin"),
        }

    async def root(self, exchange: Exchange) -> None:
        await exchange.respond(200, TEXT, b"Slotgate is running. API: /v1\n")

    async def health(self, exchange: Exchange) -> None:
        await exchange.respond(200, JSON, b'{"status":"ok"}')

    async def ready(self, exchange: Exchange) -> None:
        """Busy is ready; draining, or no backend that can take work, is not."""
        if self._is_draining():
            await exchange.respond(503, JSON, b'{"status":"draining"}')
        elif not self._backends.ready:
            await exchange.respond(503, JSON, b'{"status":"no backend"}')
        else:
            await exchange.respond(200, JSON, b'{"status":"ready"}')

    async def metrics(self, exchange: Exchange) -> None:
        text = await self._exposition.render()
        await exchange.respond(200, [(b"content-type", METRICS_TYPE)], text)

    async def status(self, exchange: Exchange) -> None:
        """`?explain=ID`: also why that request went where it went."""
        explain = parse_qs(exchange.query.decode("latin-1")).get("explain", [None])[0]
        document = self._status(explain)
        await exchange.respond(200, JSON, json.dumps(document, default=str).encode())
