"""Bytes from the engine to the client, unchanged and at once. The tap looks on (`core.sse`).

After the first byte there is no status code. A stream that breaks ends with the family's error event if the last event
is whole, else the connection is broken; it never looks finished.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

from gateway.core.errors import GatewayError, Headers
from gateway.core.figures import Usage, usage_of_json
from gateway.core.headers import to_downstream
from gateway.core.routes import Route
from gateway.core.sse import Tap
from gateway.core.wire import Wire
from gateway.runtime.exchange import Exchange
from gateway.runtime.forward import refusal
from gateway.runtime.upstream import Response, UpstreamError

JSON_TAIL = 65_536  # most bytes of a whole answer that are kept to read its usage
STREAM_HEADERS: Headers = [
    (b"cache-control", b"no-cache, no-transform"),
    (b"x-accel-buffering", b"no"),
]
BROKE = "The backend broke off in the middle of its answer."


class Meter(Protocol):
    """Who is told what passes. Called once per read that carries content."""

    def content(self, now: float, events: int) -> None: ...
    def used(self, usage: Usage | None) -> None: ...


async def relay(response: Response, exchange: Exchange, route: Route, meter: Meter) -> None:
    """Pass one response on. Returns after a whole answer; raises GatewayError for one that failed.

    A GatewayError raised after bytes were sent is written by `Exchange.refuse` as the last event; where the last
    event is cut, the connection has been broken already and `exchange.ended` says so.
    """
    if response.status in (401, 403):
        raise GatewayError("upstream_auth", "The backend refused the gateway's own key.")
    kind = _content_type(response.headers)
    headers = to_downstream(response.headers)
    headers += exchange.identity()
    if response.status == 200 and kind in (b"text/event-stream", b"application/x-ndjson"):
        wire = Wire.OLLAMA_NDJSON if kind == b"application/x-ndjson" else route.wire
        await _stream(response, exchange, headers, Tap(wire), meter)
    else:
        await _whole(response, exchange, headers, route, meter)


async def _stream(
    response: Response, exchange: Exchange, headers: Headers, tap: Tap, meter: Meter
) -> None:
    dropped = (b"cache-control", b"x-accel-buffering")
    headers = [pair for pair in headers if pair[0] not in dropped] + STREAM_HEADERS
    await exchange.start(response.status, headers)
    clock = asyncio.get_running_loop().time
    try:
        while data := await response.read():
            events = tap.feed(data)
            if events:
                meter.content(clock(), events)
            await exchange.write(data)
    except UpstreamError as error:
        _cut_unless_whole(exchange, tap)
        raise GatewayError("upstream_broke", BROKE) from error
    meter.used(tap.usage)
    if tap.saw_error:  # the engine has told the client itself
        await exchange.end()
        raise GatewayError("upstream_broke", "The backend reported an error in its stream.")
    if not tap.saw_terminal:
        _cut_unless_whole(exchange, tap)
        raise GatewayError("upstream_broke", BROKE)
    await exchange.end()


async def _whole(
    response: Response, exchange: Exchange, headers: Headers, route: Route, meter: Meter
) -> None:
    """A response that is not a stream. Nothing is sent before its first byte, so that a failure is a status."""
    tail = b""
    try:
        data = await response.read()
    except UpstreamError as error:
        raise refusal(error) from error
    await exchange.start(response.status, headers)
    try:
        while data:
            tail = (tail + data)[-JSON_TAIL:] if tail else data[-JSON_TAIL:]
            if response.complete:
                break
            await exchange.write(data)
            data = await response.read()
    except UpstreamError as error:
        exchange.cut()
        raise GatewayError("upstream_broke", BROKE) from error
    await exchange.end(data)
    if response.status == 200:
        meter.used(usage_of_json(tail, route.wire))


def _cut_unless_whole(exchange: Exchange, tap: Tap) -> None:
    """An event cut in half cannot be followed by another: break the connection."""
    if not tap.at_boundary:
        exchange.cut()


def _content_type(headers: Headers) -> bytes:
    for name, value in headers:
        if name == b"content-type":
            return value.split(b";", 1)[0].strip().lower()
    return b""
