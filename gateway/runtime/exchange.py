"""One request and its response, over ASGI: the body in, bytes out, and what has been sent so far."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from secrets import token_hex
from typing import Any

from starlette.types import Receive, Scope, Send

from gateway.core.errors import (
    Family,
    GatewayError,
    Headers,
    body_of,
    headers_of,
    status_of,
    stream_event,
)
from gateway.core.keys import Key
from gateway.core.routes import Route
from gateway.runtime.disconnect import EXTENSION, ClientGone

MAX_REQUEST_ID = 128


class Exchange:
    """Owner of the response's state: nothing else calls `send`."""

    __slots__ = (
        "_edge",
        "_receive",
        "_send",
        "bytes_out",
        "describe",
        "ended",
        "family",
        "headers",
        "key",
        "method",
        "path",
        "query",
        "received_at",
        "request_id",
        "route",
        "scope",
        "started",
        "status",
    )

    def __init__(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
        *,
        route: Route | None,
        path: str,
        family: Family,
    ) -> None:
        self.scope = scope
        self._receive = receive
        self._send = send
        self._edge: Any = scope.get("extensions", {}).get(EXTENSION)
        self.route = route
        self.family = family
        self.path = path
        self.key: Key | None = None
        self.method: str = scope["method"]
        self.query: bytes = scope["query_string"]
        self.headers: Headers = scope["headers"]
        self.request_id = _request_id(self.headers)
        self.received_at = 0.0
        self.started = False
        self.status = 0
        self.bytes_out = 0
        self.ended = False  # properly, or by breaking the connection: nothing more can be said
        self.describe: Callable[[], Headers] = list  # headers that tell where it went

    def header(self, name: bytes) -> bytes | None:
        """The first header of this lower-case name."""
        for key, value in self.headers:
            if key == name:
                return value
        return None

    async def body(self, limit_bytes: int, setting: str) -> bytes:
        """The whole request body. Raises GatewayError(body_too_large), or ClientGone."""
        length = self.header(b"content-length")
        if length is not None and length.isdigit() and int(length) > limit_bytes:
            raise _too_large(limit_bytes, setting)
        buffered: bytes | None = self._edge.body_buffered() if self._edge is not None else None
        if buffered is None:
            buffered = await self._receive_all(limit_bytes, setting)
        elif len(buffered) > limit_bytes:
            raise _too_large(limit_bytes, setting)
        received: float | None = getattr(self._edge, "received_at", None)
        self.received_at = received or asyncio.get_running_loop().time()
        return buffered

    async def _receive_all(self, limit_bytes: int, setting: str) -> bytes:
        parts: list[bytes] = []
        size = 0
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            part: bytes = message.get("body", b"")
            size += len(part)
            if size > limit_bytes:
                raise _too_large(limit_bytes, setting)
            parts.append(part)
            if not message.get("more_body", False):
                return parts[0] if len(parts) == 1 else b"".join(parts)

    async def start(self, status: int, headers: Headers) -> None:
        """Send the head."""
        self.started = True
        self.status = status
        await self._send(
            {
                "type": "http.response.start",
                "status": status,
                "headers": [*headers, *self.describe()],
            }
        )

    async def write(self, data: bytes) -> None:
        """Send bytes of the body now, and wait for a client that is behind."""
        self.bytes_out += len(data)
        if self._edge is None:
            await self._send({"type": "http.response.body", "body": data, "more_body": True})
            return
        self._edge.write(data, more=True)
        if (
            self._edge.write_paused
        ):  # the edge gives up on a client that reads nothing for write_stall_s
            await self._edge.writable()

    async def end(self, data: bytes = b"") -> None:
        """Send the last bytes, and the proper end."""
        self.bytes_out += len(data)
        self.ended = True
        await self._send({"type": "http.response.body", "body": data, "more_body": False})

    def cut(self) -> None:
        """Break the connection, so that a cut answer cannot look finished."""
        self.ended = True
        if self._edge is not None:
            self._edge.abort()

    async def respond(self, status: int, headers: Headers, body: bytes) -> None:
        """A whole answer of the gateway's own."""
        head = [*headers, (b"content-length", str(len(body)).encode())]
        await self.start(status, head)
        await self.end(body if self.method != "HEAD" else b"")

    async def refuse(self, error: GatewayError) -> None:
        """Say it in the client's family: as a status, or as the last event of a stream that has begun."""
        if self.ended:
            return
        if not self.started:
            body = body_of(error, self.family, self.request_id)
            headers = [(b"content-type", b"application/json"), *headers_of(error)]
            headers += self.identity()
            await self.respond(status_of(error, self.family), headers, body)
            return
        responses = self.path == "/v1/responses"
        await self.end(stream_event(error, self.family, self.request_id, responses=responses))

    def identity(self) -> Headers:
        """The headers that name this request."""
        value = self.request_id.encode()
        if self.family is Family.ANTHROPIC:
            return [(b"x-request-id", value), (b"request-id", value)]
        return [(b"x-request-id", value)]


def _request_id(headers: Headers) -> str:
    """The client's own, if it is at most 128 printable characters; else a fresh one."""
    for name, value in headers:
        if name == b"x-request-id":
            if 0 < len(value) <= MAX_REQUEST_ID and value.isascii():
                text = value.decode()
                if text.isprintable():
                    return text
            break
    return "req-" + token_hex(8)


def _too_large(limit_bytes: int, setting: str) -> GatewayError:
    return GatewayError(
        "body_too_large",
        f"The request body is larger than {limit_bytes // 1048576} MiB ({setting} in the gateway's configuration).",
    )
