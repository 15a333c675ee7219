"""What the gateway answers from memory: health, models, metrics, status. None of it waits for an engine."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest

from gateway.api.front import Local
from gateway.core.catalog import Catalog
from gateway.core.errors import GatewayError, Headers
from gateway.core.routes import MODELS
from gateway.runtime.backends import Backends
from gateway.runtime.exchange import Exchange

JSON: Headers = [(b"content-type", b"application/json")]
TEXT: Headers = [(b"content-type", b"text/plain; charset=utf-8")]
METRICS_TYPE = b"text/plain; version=1.0.0; charset=utf-8"


class LocalPages:
    """The handlers. `table` is what `Front` looks paths up in."""

    def __init__(
        self,
        backends: Backends,
        registry: CollectorRegistry,
        status: Callable[[], dict[str, Any]],
        is_draining: Callable[[], bool],
        *,
        metrics_open: Callable[[], bool],
    ) -> None:
        self._backends = backends
        self._registry = registry
        self._status = status
        self._is_draining = is_draining
        self._metrics_open = metrics_open

    def table(self) -> dict[str, Local]:
        return {
            "/": Local(self.root),
            "/healthz": Local(self.health),
            "/health": Local(self.health),
            "/readyz": Local(self.ready),
            "/v1/models": Local(self.models, "key"),
            MODELS: Local(self.model, "key"),
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

    async def models(self, exchange: Exchange) -> None:
        """The union over backends plus aliases: what this key may use."""
        catalog = self._backends.catalog
        if not any(listing.models for listing in catalog.listings.values()):
            raise GatewayError(
                "no_backend",
                "Server overloaded: no backend has told its models yet. Please try again in 5s.",
                retry_after_s=5.0,
            )
        allowed = exchange.key.models if exchange.key else None
        data = [_document(catalog, name) for name in catalog.names(allowed)]
        await exchange.respond(200, JSON, json.dumps({"object": "list", "data": data}).encode())

    async def model(self, exchange: Exchange) -> None:
        name = exchange.path.removeprefix(MODELS)
        catalog = self._backends.catalog
        allowed = exchange.key.models if exchange.key else None
        pool = catalog.resolve(name, allowed, lambda _pool: True)
        await exchange.respond(200, JSON, json.dumps(_document(catalog, pool.name)).encode())

    async def metrics(self, exchange: Exchange) -> None:
        """Rendered in a thread, so that a scrape never holds the loop."""
        text = await asyncio.to_thread(generate_latest, self._registry)
        await exchange.respond(200, [(b"content-type", METRICS_TYPE)], text)

    async def status(self, exchange: Exchange) -> None:
        await exchange.respond(200, JSON, json.dumps(self._status(), default=str).encode())


def _document(catalog: Catalog, name: str) -> dict[str, Any]:
    """One model as an engine describes it, under the name that clients use; its extras kept."""
    pool = catalog.pools[name]
    for backend in sorted(pool.backends):
        own = catalog.listings[backend].models.get(pool.ids[backend])
        if own:
            return {"object": "model", "created": 0, "owned_by": "slotgate", **own, "id": name}
    return {"id": name, "object": "model", "created": 0, "owned_by": "slotgate"}
