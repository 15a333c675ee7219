"""What an engine's answer is to those who pass it on, and what it means: is it an answer, or did nothing run?

Law of this file: only what an engine says before its first content can be a nack; and it is judged by its own words,
without taking a byte from what is passed on.
"""

from __future__ import annotations

from typing import Any, Literal, Protocol

import msgspec

from gateway.core.errors import Headers
from gateway.core.json_scan import UNREADABLE
from gateway.engines.base import Answer as Page
from gateway.engines.llama_server import is_loading
from gateway.runtime.upstream import Response

NACKS = (429, 503)
Meaning = Literal["answer", "busy", "loading"]


class Answer(Protocol):
    """`runtime.upstream.Response`, or what stands for it."""

    status: int
    headers: Headers

    @property
    def complete(self) -> bool: ...
    async def read(self) -> bytes: ...


class Restated:
    """A refusal that came as a stream with status 200, as what it is."""

    def __init__(self, status: int, body: bytes) -> None:
        self.status = status
        self.headers: Headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
        ]
        self._body = body

    @property
    def complete(self) -> bool:
        return not self._body

    async def read(self) -> bytes:
        body, self._body = self._body, b""
        return body


async def judged(response: Response, engine: str | None) -> tuple[Meaning, Answer]:
    """What it means, and what to pass on if nobody else is to be asked. Raises UpstreamError.

    1 "Loading model": a llama-server that will be able to       2 503, 429: busy, and nothing ran
    3 SGLang's full queue: status 200, and the 503 in the first event (engines.md 4). So there the head waits for
      the first bytes; everywhere else it is passed on at once.  4 anything else is an answer
    """
    if response.status == 503:
        page = Page(response.status, {}, await response.peek())
        return ("loading" if is_loading(page) else "busy"), response
    if response.status == 429:
        return "busy", response
    if response.status == 200 and engine == "sglang" and _is_event_stream(response.headers):
        restated = _refusal_in(await response.peek())
        if restated is not None:
            return ("busy" if restated.status in NACKS else "answer"), restated
    return "answer", response


def _refusal_in(data: bytes) -> Restated | None:
    """The error that stands where the first event should, if one does."""
    event, end, _ = data.partition(b"\n\n")
    if not (end and event.startswith(b"data:") and b'"error"' in event[:64]):
        return None
    try:
        document: Any = msgspec.json.decode(event[5:])
    except UNREADABLE:
        return None
    error = document.get("error") if isinstance(document, dict) else None
    code = error.get("code") if isinstance(error, dict) else None
    if not isinstance(code, int) or not 400 <= code <= 599:
        return None
    return Restated(code, event[5:].strip())


def _is_event_stream(headers: Headers) -> bool:
    return any(
        name == b"content-type" and value.lower().startswith(b"text/event-stream")
        for name, value in headers
    )
