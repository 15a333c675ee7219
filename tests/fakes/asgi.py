"""Small ASGI apps on a real port behind the real edge, to test the edge alone.

`SLOTGATE_TEST_EDGE=uvicorn` puts uvicorn's own protocol in its place: the tests that name a failure of plain
uvicorn must fail then, or have become pointless.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any

import pytest

from gateway.api.edge import EdgeSettings
from gateway.api.server import Server
from tests.fakes.running import run

App = Callable[[Any, Any, Any], Awaitable[None]]


@contextlib.asynccontextmanager
async def edge_before(
    app: App, *, on_refused: Callable[[Any], object] = lambda _: None, **settings: Any
) -> AsyncIterator[Server]:
    """The app behind an edge with these EdgeSettings; `server.port` is where."""
    server = Server(
        only_http(app),
        EdgeSettings(**settings),
        host="127.0.0.1",
        port=0,
        on_refused=on_refused,
    )
    if os.environ.get("SLOTGATE_TEST_EDGE") == "uvicorn":
        server._config.http = "httptools"
    await server.start()
    try:
        yield server
    finally:
        await server.stop()


def only_http(app: App) -> App:
    """The app, with the lifespan messages answered for it."""

    async def whole(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            await app(scope, receive, send)
            return
        while (message := (await receive())["type"]) != "lifespan.shutdown":
            await send({"type": f"{message}.complete"})
        await send({"type": "lifespan.shutdown.complete"})

    return whole


def on_both_loops(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[str], None]:
    """Makes two plain tests of an async one: on uvloop and on asyncio's own loop."""

    @pytest.mark.parametrize("loop", ["uvloop", "asyncio"])
    def plain(loop: str) -> None:
        run(test(), loop=loop)

    functools.update_wrapper(plain, test)
    del plain.__wrapped__  # type: ignore[attr-defined]  # pytest would take its signature
    return plain


def edge_of(scope: Any) -> Any:
    """What the edge offers the app."""
    return scope["extensions"]["slotgate.edge"]


async def body_of(receive: Any) -> bytes | None:
    """The request body; None when the client left before its end."""
    body = b""
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        body += message["body"]
        if not message["more_body"]:
            return body


async def answer(
    send: Any, body: bytes = b"ok", status: int = 200, headers: Any = (), *, length: bool = True
) -> None:
    """A whole answer, with its length or in chunks."""
    own = [(b"content-length", b"%d" % len(body))] if length else []
    await send({"type": "http.response.start", "status": status, "headers": [*headers, *own]})
    await send({"type": "http.response.body", "body": body})


class Echo:
    """Answers every request with what it was; `seen` keeps (method, path, query, body) of each."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, str, bytes, bytes]] = []
        self.headers: list[list[tuple[bytes, bytes]]] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        body = await body_of(receive)
        if body is None:
            return
        self.seen.append((scope["method"], scope["path"], scope["query_string"], body))
        self.headers.append(scope["headers"])
        await answer(send, b"%b %b" % (scope["path"].encode(), body))

    @property
    def paths(self) -> list[str]:
        return [path for _, path, _, _ in self.seen]
