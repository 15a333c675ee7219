"""The ASGI app: which path is what, and the order in which requests are refused before they reach the line.

OPTIONS, 426, 404 path, 405, 401, 403 admin; what comes after that is `gateway.pipeline`'s. Never a redirect.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final, Literal

from starlette.types import Receive, Scope, Send

from gateway.core.errors import GatewayError
from gateway.core.routes import ROUTES, Route, family_of, normal
from gateway.pipeline import Pipeline
from gateway.runtime.disconnect import ClientGone, ClientPresent
from gateway.runtime.exchange import Exchange
from gateway.runtime.observe import Record

Handler = Callable[[Exchange], Awaitable[None]]
ODD: Final = (b"%2e", b"%2f", b"%5c", b"..", b"\\")
MODELS: Final = "/v1/models/"


@dataclass(frozen=True, slots=True)
class Local:
    """A path that the gateway answers itself, from memory."""

    handler: Handler
    needs: Literal["nothing", "key", "admin"] = "nothing"
    methods: tuple[str, ...] = ("GET", "HEAD")


class Front:
    """Every request enters here."""

    def __init__(self, pipeline: Pipeline, local: dict[str, Local]) -> None:
        self._pipeline = pipeline
        self._local = local
        self.active: set[ClientPresent] = set()  # requests in the line
        self.idle = asyncio.Event()  # set while there are none
        self.idle.set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        path = normal(scope["path"])
        route = ROUTES.get(path)
        if route is not None and _is_odd(scope["raw_path"]):
            route = None
        exchange = Exchange(scope, receive, send, route=route, path=path, family=family_of(path))
        try:
            if route is not None and scope["method"] == "POST":
                await self._serve(exchange, route, ClientPresent(scope, receive))
            else:
                await self._aside(exchange, route)
        except GatewayError as error:
            await exchange.refuse(error)
        except ClientGone:
            exchange.cut()

    async def _serve(self, exchange: Exchange, route: Route, present: ClientPresent) -> None:
        self.active.add(present)
        self.idle.clear()
        try:
            await self._pipeline.serve(exchange, route, present)
        finally:
            self.active.discard(present)
            if not self.active:
                self.idle.set()

    async def _aside(self, exchange: Exchange, route: Route | None) -> None:
        """What is not relayed: answers from memory, and refusals by path and method."""
        if exchange.method == "OPTIONS":
            await exchange.respond(204, [], b"")
            return
        if exchange.header(b"upgrade") == b"websocket" and exchange.path == "/v1/responses":
            raise self._refused(
                exchange,
                GatewayError(
                    "upgrade_required", "Slotgate does not speak WebSocket; use POST /v1/responses."
                ),
            )
        if route is not None:
            raise self._refused(exchange, _wrong_method(exchange, ("POST",)))
        local = self._find(exchange)
        if local is None:
            raise self._refused(exchange, GatewayError("not_found", "There is no such path here."))
        if exchange.method not in local.methods:
            raise self._refused(exchange, _wrong_method(exchange, local.methods))
        if local.needs != "nothing":
            try:
                exchange.key = self._pipeline.authenticate(exchange, admin=local.needs == "admin")
            except GatewayError as error:
                raise self._refused(exchange, error) from None
        await local.handler(exchange)

    def _find(self, exchange: Exchange) -> Local | None:
        path = exchange.path
        if path.startswith(MODELS) and len(path) > len(MODELS):
            return self._local.get(MODELS)
        return None if _is_odd(exchange.scope["raw_path"]) else self._local.get(path)

    def _refused(self, exchange: Exchange, error: GatewayError) -> GatewayError:
        """Count and log a refusal that never reached the line."""
        record = Record(exchange, self._pipeline.metrics, self._pipeline.log.request)
        record.__exit__(type(error), error, None)
        return error


def _wrong_method(exchange: Exchange, allowed: tuple[str, ...]) -> GatewayError:
    names = ", ".join(allowed)
    return GatewayError(
        "method_not_allowed",
        f"{exchange.path} takes {names}.",
        headers=[(b"allow", names.encode())],
    )


def _is_odd(raw_path: bytes) -> bool:
    """Could this path mean another one to somebody else?"""
    if b"%" not in raw_path and b".." not in raw_path and b"\\" not in raw_path:
        return False
    lower = raw_path.lower()
    return any(part in lower for part in ODD)
