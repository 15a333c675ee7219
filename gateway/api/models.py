"""`GET /v1/models` and `/v1/models/{id…}`: what a key may use, from memory, whatever the engines do.

One document serves both families: callers that send `anthropic-version` find the fields of theirs beside the others.
"""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

from gateway.api.front import Local
from gateway.api.local import JSON
from gateway.core.catalog import Catalog, nothing_known
from gateway.core.routes import MODELS
from gateway.runtime.backends import Backends
from gateway.runtime.exchange import Exchange

LATEST = datetime(9999, 1, 1, tzinfo=UTC).timestamp()


class ModelPages:
    """The handlers. Reads the catalog; holds nothing itself."""

    def __init__(self, backends: Backends) -> None:
        self._backends = backends

    def table(self) -> dict[str, Local]:
        return {"/v1/models": Local(self.all, "key"), MODELS: Local(self.one, "key")}

    async def all(self, exchange: Exchange) -> None:
        """The union over backends plus aliases. Raises GatewayError(no_backend) while nothing is known."""
        catalog = self._backends.catalog
        if catalog.is_empty:
            raise nothing_known()
        names = catalog.listed(exchange.key.models if exchange.key else None)
        anthropic = _is_anthropic(exchange)
        data = [_document(catalog, name, name, anthropic=anthropic) for name in names]
        page: dict[str, Any] = {"object": "list", "data": data}
        if anthropic:
            ends = {"first_id": names[0], "last_id": names[-1]} if names else {}
            page |= {"has_more": False, "first_id": None, "last_id": None, **ends}
        await exchange.respond(200, JSON, json.dumps(page).encode())

    async def one(self, exchange: Exchange) -> None:
        """One of them. Raises GatewayError: model_not_found, model_not_allowed, no_backend."""
        name = exchange.path.removeprefix(MODELS)
        catalog = self._backends.catalog
        allowed = exchange.key.models if exchange.key else None
        pool = catalog.resolve(name, allowed, lambda _pool: True)
        document = _document(catalog, pool.name, name, anthropic=_is_anthropic(exchange))
        await exchange.respond(200, JSON, json.dumps(document).encode())


def _is_anthropic(exchange: Exchange) -> bool:
    return exchange.header(b"anthropic-version") is not None


def _document(catalog: Catalog, name: str, shown: str, *, anthropic: bool) -> dict[str, Any]:
    """One model as an engine describes it, under the name that the client uses; its extras kept."""
    own = catalog.told(name) or {}
    out: dict[str, Any] = {"object": "model", "created": 0, "owned_by": "slotgate", **own}
    out["id"] = shown
    if anthropic:
        out |= {"type": "model", "display_name": shown, "created_at": _time(out["created"])}
    return out


def _time(created: object) -> str:
    """Seconds since 1970 as RFC 3339; an engine's nonsense is the beginning of time."""
    seconds = created if isinstance(created, int | float) and 0 <= created < LATEST else 0
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
