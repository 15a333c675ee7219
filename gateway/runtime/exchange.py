"""One request and its response, over ASGI: the body in, bytes out, and what has been sent so far."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from random import getrandbits
from typing import Any, TypeVar

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
from gateway.core.headers import own_request_id
from gateway.core.keys import Key
from gateway.core.routes import Route
from gateway.runtime.body import BodyLimit, codings_in, decoded, receive_all
from gateway.runtime.disconnect import EXTENSION

T = TypeVar("T")
EVENT_STREAM = b"text/event-stream"
NDJSON = b"application/x-ndjson"
STREAM_HEADERS: Headers = [
    (b"cache-control", b"no-cache, no-transform"),
    (b"x-accel-buffering", b"no"),
]


class Exchange:
    """Owner of the response's state: nothing else calls `send`."""

    __slots__ = (
        "_codings",
        "_edge",
        "_notes",
        "_receive",
        "_send",
        "answered",
        "client",
        "describe",
        "early",
        "ended",
        "family",
        "headers",
        "key",
        "method",
        "path",
        "path_key",
        "query",
        "received_at",
        "request_id",
        "route",
        "shared",
        "started",
        "status",
        "streams",
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
        self._receive = receive
        self._send = send
        self._edge: Any = scope.get("extensions", {}).get(EXTENSION)
        self.route = route
        self.family = family
        self.path = path
        self.key: Key | None = None
        self.client = ""  # its address, as far as that is known
        self.path_key: str | None = None  # the key that stood in the path
        self.shared: Headers = []  # what lets a web page read the answer
        self.method: str = scope["method"]
        self.query: bytes = scope["query_string"]
        self.headers: Headers = scope["headers"]
        self._notes: dict[Any, Any] = {} if self._edge is None else self._edge.notes
        self.request_id = self.of_head(own_request_id) or _fresh_id()
        self.received_at = 0.0
        self._codings: tuple[str, ...] = ()  # of the request body
        self.started = False
        self.early = False  # with a head of ours, because the engine was silent for long
        self.streams = b""  # the content type, once a stream of events or records has begun
        self.status = 0
        self.answered = False  # a byte of the engine's body has passed
        self.ended = False  # properly, or by breaking the connection: nothing more can be said
        self.describe: Callable[[], Headers] = list  # headers that tell where it went

    def header(self, name: bytes) -> bytes | None:
        """The first header of this lower-case name."""
        for key, value in self.headers:
            if key == name:
                return value
        return None

    def of_head(self, follows: Callable[[Headers], T]) -> T:
        """What follows from the headers, but for content-length: worked out once while a connection's heads are alike."""
        notes = self._notes
        if follows in notes:
            return notes[follows]  # type: ignore[no-any-return]
        found = notes[follows] = follows(self.headers)
        return found

    def check_body(self, limit: BodyLimit) -> None:
        """Refuse what its headers say is too large or not decodable. Raises GatewayError."""
        if self._declared > limit.size:
            raise limit.error()
        self._codings = self.of_head(codings_in)

    @property
    def _declared(self) -> int:
        """Bytes that the body is going to have, as far as the client says."""
        if self._edge is not None:
            return self._edge.declared  # type: ignore[no-any-return]
        length = self.header(b"content-length") or b""
        return int(length) if length.isdigit() else 0

    async def body(self, limit: BodyLimit) -> bytes:
        """The whole request body, decoded; after `check_body`.

        Raises GatewayError: body_too_large, invalid_json (a broken coding); or ClientGone.
        """
        body: bytes | None = self._edge.body_buffered() if self._edge is not None else None
        if body is None:
            body = await receive_all(self._receive, limit)
        elif len(body) > limit.size:
            raise limit.error()
        received: float | None = getattr(self._edge, "received_at", None)
        self.received_at = received or asyncio.get_running_loop().time()
        return await decoded(body, self._codings, limit) if self._codings else body

    async def start(self, status: int, headers: Headers) -> None:
        """Send the head, if it has not left early."""
        if self.early:
            return
        self.started = True
        self.status = status
        headers = [*headers, *self.describe(), *self.shared]
        if self._edge is not None:
            self._edge.start(status, headers)
        else:
            await self._send({"type": "http.response.start", "status": status, "headers": headers})

    def start_early(self, content_type: bytes) -> None:
        """Send the head of a stream before the engine has said anything. Does not wait."""
        self.started = self.early = True
        self.status = 200
        self.streams = content_type
        headers = [(b"content-type", content_type), *STREAM_HEADERS, *self.identity()]
        self._edge.start(200, [*headers, *self.describe(), *self.shared])

    def insert(self, comment: bytes) -> None:
        """Send bytes that are no part of the engine's answer. Does not wait."""
        if not self._edge.write_paused:
            self._edge.write(comment, more=True)

    @property
    def can_put(self) -> bool:
        """Only our own edge can be written to without waiting, and beside the request's task."""
        return self._edge is not None

    def put(self, data: bytes) -> bool:
        """Send bytes of the body now. False: the client is behind, so wait for `caught_up` before the next."""
        self.answered = True
        self._edge.write(data, more=True)
        return not self._edge.write_paused

    @property
    def put_chunk(self) -> Callable[[bytes], bool] | None:
        """`put` for one whole chunk, as it is framed already."""
        return None if self._edge is None else self._edge.write_chunk

    async def caught_up(self) -> None:
        """Wait for a client that is behind; the edge gives up on one that reads nothing for write_stall_s."""
        if self._edge.write_paused:
            await self._edge.writable()

    async def write(self, data: bytes) -> None:
        """Send bytes of the body now, and wait for a client that is behind."""
        if self.can_put:
            self.put(data)
            await self.caught_up()
            return
        self.answered = True
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self, data: bytes = b"") -> None:
        """Send the last bytes, and the proper end."""
        self.ended = True
        if self._edge is None:
            await self._send({"type": "http.response.body", "body": data, "more_body": False})
            return
        await self.caught_up()
        self._edge.write(data, more=False)

    def cut(self) -> None:
        """Break the connection, so that a cut answer cannot look finished."""
        self.ended = True
        if self._edge is not None:
            self._edge.abort()

    async def respond(self, status: int, headers: Headers, body: bytes) -> None:
        """A whole answer of the gateway's own, which also says which request it answers."""
        length = (b"content-length", str(len(body)).encode())
        await self.start(status, [*headers, *self.identity(), length])
        await self.end(body if self.method != "HEAD" else b"")

    async def refuse(self, error: GatewayError) -> None:
        """Say it in the client's family: as a status, or as the last event of a stream that has begun."""
        if self.ended:
            return
        if not self.started:
            body = body_of(error, self.family, self.request_id)
            headers = [(b"content-type", b"application/json"), *headers_of(error)]
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


def _fresh_id() -> str:
    return f"req-{getrandbits(64):016x}"  # unique is enough: it opens nothing
