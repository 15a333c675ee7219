"""Scripts by name: the things an engine does in most tests, ready to be given to FakeEngine.script.

engine.script(chat_stream(tokens=5, every_s=0.01))
engine.script(raw(b"HTTP/1.1 200 OK\\r\\nContent-Le", 0.05, b"ngth: 2\\r\\n\\r\\nok", FIN))
engine.always(respond(503, {"error": "busy"}, [("Retry-After", "2")]))
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

from tests.fakes.connection import Connection, HeaderPairs, Script
from tests.fakes.wires import WIRES, Answer, Wire


class Act:
    """Something other than bytes in a raw script."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return self.name


FIN: Final = Act("FIN")
RST: Final = Act("RST")
HANG: Final = Act("HANG")
STOP_READING: Final = Act("STOP_READING")

Step = bytes | float | Act


def raw(*steps: Step) -> Script:
    """Exact bytes, pauses in seconds, and acts, in order. Nothing is added; without FIN the connection stays open."""

    async def script(connection: Connection) -> None:
        for step in steps:
            await _do(connection, step)

    return script


def respond(
    status: int,
    body: bytes | str | dict[str, Any] | list[Any] = b"",
    headers: HeaderPairs = (),
    *,
    after_s: float = 0,
    content_type: str = "application/json",
    framing: str = "length",
    version: str = "1.1",
) -> Script:
    """One whole answer after a while."""

    async def script(connection: Connection) -> None:
        await connection.pause(after_s)
        await connection.respond(
            status, body, headers, content_type=content_type, framing=framing, version=version
        )

    return script


def stream(
    events: Iterable[bytes],
    *,
    every_s: float = 0,
    first_s: float = 0,
    headers_after_s: float = 0,
    headers: HeaderPairs = (),
    content_type: str = "text/event-stream",
    framing: str = "chunked",
    version: str = "1.1",
    then: Act | None = None,
) -> Script:
    """Pieces of a body, each in its own write. `then` replaces the clean end: FIN, RST or HANG at that point."""
    pieces = list(events)

    async def script(connection: Connection) -> None:
        await connection.pause(headers_after_s)
        length = [("Content-Length", str(sum(map(len, pieces))))] if framing == "length" else []
        await connection.begin(
            200, [*headers, *length], content_type=content_type, framing=framing, version=version
        )
        await connection.pause(first_s)
        for number, piece in enumerate(pieces):
            await connection.body(piece, every_s if number < len(pieces) - 1 else 0)
        if then is None:
            await connection.end()
        else:
            await _do(connection, then)

    return script


def events_of(
    path: str = "/v1/chat/completions",
    tokens: int = 5,
    *,
    usage: bool = False,
    prompt_tokens: int = 10,
    cached_tokens: int = 0,
    kind: str = "llama-server",
) -> list[bytes]:
    """The events of a good stream of that path, one per item; the last one holds everything that ends it."""
    wire: Wire = WIRES[path]
    answer = Answer("chatcmpl-1", "m", kind, tokens, prompt_tokens, cached_tokens, usage)
    start = wire.start(answer)
    return [
        *([start] if start else []),
        *(wire.token(answer, number) for number in range(tokens)),
        wire.finish(answer),
    ]


def chat_stream(
    tokens: int = 5,
    every_s: float = 0,
    *,
    first_s: float = 0,
    path: str = "/v1/chat/completions",
    usage: bool = False,
    whole: bool = True,
    **how: Any,
) -> Script:
    """A streamed chat; with `whole=False` it stops before anything that ends it (use `then=`)."""
    events = events_of(path, tokens, usage=usage)
    return stream(
        events if whole else events[:-1],
        every_s=every_s,
        first_s=first_s,
        content_type=WIRES[path].content_type,
        **how,
    )


def hang(*, headers: bool = False, comments_every_s: float = 0) -> Script:
    """Says nothing until the peer leaves; or only headers; or headers and then a comment now and then."""

    async def script(connection: Connection) -> None:
        if headers or comments_every_s:
            await connection.begin()
        while comments_every_s:
            await connection.body(b":\n\n", comments_every_s)
        await connection.for_ever()

    return script


def drop(how: Act = FIN, *, after_s: float = 0) -> Script:
    """Closes without a word."""
    return raw(after_s, how)


def endless(piece: bytes = b"data: " + b"x" * 65_000 + b"\n\n", limit: int = 1 << 40) -> Script:
    """Writes as fast as the peer reads, up to `limit` bytes of body."""

    async def script(connection: Connection) -> None:
        await connection.begin()
        written = 0
        while written < limit and connection.is_open:
            await connection.body(piece)
            await connection.pause(0)
            written += len(piece)
        await connection.end()

    return script


def in_order(scripts: Sequence[Script]) -> Script:
    """One script after the other, on the same connection and for the same request."""

    async def script(connection: Connection) -> None:
        for one in scripts:
            await one(connection)

    return script


async def _do(connection: Connection, step: Step) -> None:
    if isinstance(step, bytes):
        await connection.write(step)
    elif isinstance(step, Act):
        await _act(connection, step)
    elif step > 0:
        await connection.pause(step)


async def _act(connection: Connection, act: Act) -> None:
    if act is FIN:
        connection.fin()
    elif act is RST:
        connection.rst()
    elif act is STOP_READING:
        connection.stop_reading()
    else:
        await connection.for_ever()
