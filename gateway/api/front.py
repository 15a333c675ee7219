"""The ASGI app: which path is what, and the order in which requests are refused before they reach the line.

OPTIONS, 426, 404 path, 405, 401, 403 admin; what comes after that is `gateway.pipeline`'s. Never a redirect.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final, Literal

from starlette.types import Receive, Scope, Send

from gateway.core import origins
from gateway.core.catalog import NONE
from gateway.core.errors import GatewayError
from gateway.core.routes import MODELS, Meaning, Route, family_of, meaning_of
from gateway.pipeline import Pipeline
from gateway.runtime.disconnect import EXTENSION, ClientGone, ClientPresent
from gateway.runtime.exchange import Exchange
from gateway.runtime.observe import Record
from gateway.runtime.proxies import TrustedProxies

Handler = Callable[[Exchange], Awaitable[None]]
READS: Final = ("GET", "HEAD")


@dataclass(frozen=True, slots=True)
class Local:
    """A path that the gateway answers itself, from memory."""

    handler: Handler
    needs: Literal["nothing", "key", "admin"] = "nothing"
    methods: tuple[str, ...] = READS
    unless: Callable[[], bool] = lambda: False  # then it needs nothing


class Front:
    """Every request enters here."""

    def __init__(
        self,
        pipeline: Pipeline,
        local: dict[str, Local],
        proxies: TrustedProxies | None = None,
    ) -> None:
        self._pipeline = pipeline
        self.proxies = proxies or TrustedProxies()
        self._local = local
        self.active: set[ClientPresent] = set()  # requests in the line
        self.idle = asyncio.Event()  # set while there are none
        self.idle.set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        config = self._pipeline.config
        meaning = meaning_of(scope["raw_path"], key_in_path=config.auth.key_in_path)
        path, route = meaning.path, meaning.route
        family = family_of(path) if route is None else route.family
        exchange = Exchange(scope, receive, send, route=route, path=path, family=family)
        exchange.path_key = meaning.key
        exchange.client = self.proxies.client((scope.get("client") or ("",))[0], exchange.headers)
        if config.cors.origins:
            exchange.shared = origins.shared_with(exchange.header(b"origin"), config.cors.origins)
        try:
            if route is not None and scope["method"] in _methods_of(route):
                present = ClientPresent(receive, scope.get("extensions", {}).get(EXTENSION))
                if not self.active:
                    self.idle.clear()
                self.active.add(present)
                try:
                    line = self._pipeline
                    serve = line.serve if route.generates else line.serve_free
                    await serve(exchange, route, present)
                finally:
                    self.active.discard(present)
                    if not self.active:
                        self.idle.set()
            else:
                await self._aside(exchange, meaning, route)
        except GatewayError as error:
            await exchange.refuse(error)
        except ClientGone:
            exchange.cut()
        finally:
            exchange.describe = list  # its record's, which points back: not one for the collector

    async def _aside(self, exchange: Exchange, meaning: Meaning, route: Route | None) -> None:
        """What is not relayed: answers from memory, and refusals by path and method."""
        if exchange.method == "OPTIONS":
            allowed = origins.preflight(exchange.headers, self._pipeline.config.cors.origins)
            await exchange.respond(204, allowed, b"")
            return
        try:
            await self._local_page(exchange, meaning, route)
        except GatewayError as error:
            raise self._refused(exchange, error) from None

    async def _local_page(self, exchange: Exchange, meaning: Meaning, route: Route | None) -> None:
        if route is not None:
            raise _wrong_method(exchange, _methods_of(route))
        local = self._find(meaning)
        if local is None:
            raise GatewayError("not_found", "There is no such path here.")
        if exchange.method not in local.methods:
            raise _wrong_method(exchange, local.methods)
        if local.needs != "nothing" and not local.unless():
            exchange.key = self._pipeline.authenticate(exchange, admin=local.needs == "admin")
        await local.handler(exchange)

    def _find(self, meaning: Meaning) -> Local | None:
        if not meaning.literal:
            return None
        path = meaning.path
        is_model = path.startswith(MODELS) and len(path) > len(MODELS)
        return self._local.get(MODELS if is_model else path)

    def _refused(self, exchange: Exchange, error: GatewayError) -> GatewayError:
        """Count and log a refusal that never reached the line."""
        record = Record(exchange, self._pipeline.metrics, self._pipeline.log.request)
        record.key = exchange.key.name if exchange.key is not None else NONE
        record.__exit__(type(error), error, None)
        return error


def _methods_of(route: Route) -> tuple[str, ...]:
    """`HEAD` follows its `GET`."""
    return READS if route.method == "GET" else (route.method,)


def _wrong_method(exchange: Exchange, allowed: tuple[str, ...]) -> GatewayError:
    """Also for a WebSocket: one client takes any other answer for a fault, and tries five times more."""
    upgrade = (exchange.header(b"upgrade") or b"").lower()
    if upgrade == b"websocket" and exchange.path == "/v1/responses":
        text = "Slotgate does not speak WebSocket; use POST /v1/responses."
        return GatewayError("upgrade_required", text)
    names = ", ".join(allowed)
    return GatewayError(
        "method_not_allowed",
        f"{exchange.path} takes {names}.",
        headers=[(b"allow", names.encode())],
    )
