"""Bytes from the engine to the client, unchanged and at once. The tap looks on (`core.sse`).

After the first byte there is no status code. A stream that breaks ends with the family's error event if the last event
is whole, else the connection is broken; it never looks finished.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeAlias

from gateway.core.body_tap import BodyTap
from gateway.core.errors import GatewayError, Headers
from gateway.core.headers import to_downstream
from gateway.core.overflow import CACHE_FULL, CacheFullError
from gateway.core.routes import Route
from gateway.core.sse import Tap
from gateway.core.wire import Wire
from gateway.runtime.answer import Answer
from gateway.runtime.exchange import EVENT_STREAM, NDJSON, STREAM_HEADERS, Exchange
from gateway.runtime.forward import refusal
from gateway.runtime.keepalive_refusal import refusal_event
from gateway.runtime.upstream import Response, UpstreamError
from gateway.runtime.watch import Meter, Watch

# A length that an engine gives to a stream leaves no room for the error event that may have to follow.
NOT_ON_STREAMS = frozenset([b"content-length", *(name for name, _ in STREAM_HEADERS)])
MOST_REFUSAL = 65_536  # bytes of an engine's refusal that are read when it must become an event
BROKE = "The backend broke off in the middle of its answer."


async def relay(response: Answer, exchange: Exchange, route: Route, meter: Meter) -> None:
    """Pass one response on. Returns after a whole answer; raises GatewayError for one that failed.

    A GatewayError raised after bytes were sent is written by `Exchange.refuse` as the last event; where the last
    event is cut, the connection has been broken already and `exchange.ended` says so.

    1 the engine refuses our own key: never the client's matter
    2 a stream was begun while the engine was silent, and this is none: tell it as an event
    3 a stream: event by event            4 anything else, and what we cannot look into: as one document
    """
    if response.status in (401, 403):
        raise GatewayError("upstream_auth", "The backend refused the gateway's own key.")
    streams = _stream_type(response)
    if exchange.early and streams != exchange.streams:
        await _too_late(response, exchange, b"")
        return
    headers = to_downstream(response.headers)
    headers += exchange.identity()
    if streams:
        exchange.streams = streams
        wire = Wire.OLLAMA_NDJSON if streams == NDJSON else route.wire
        await _stream(response, exchange, headers, wire, meter)
    else:
        await _whole(response, exchange, headers, route, meter)


async def _stream(
    response: Answer, exchange: Exchange, headers: Headers, wire: Wire, meter: Meter
) -> None:
    _refuse_if_empty(response)
    headers = [pair for pair in headers if pair[0] not in NOT_ON_STREAMS] + STREAM_HEADERS
    await exchange.start(response.status, headers)
    clock = asyncio.get_running_loop().time
    watch = Watch(Tap(wire), meter)
    tap = watch.tap
    try:
        last = await _pass(response, exchange, watch, clock)
    except asyncio.CancelledError:
        if tap.complete:  # Codex and others close at the last event, before the body has ended
            meter.told(tap.usage)
            meter.left_with_all()
        raise
    except UpstreamError as error:
        if error.kind == "first_byte_timeout":  # only its head came: too slow, and not broken off
            raise refusal(error) from error
        _cut_unless_whole(exchange, tap)
        raise GatewayError("upstream_broke", BROKE) from error
    if events := tap.finish():
        meter.content(clock(), events)
    meter.told(tap.usage)
    await _end(exchange, tap, last, judged=wire is not Wire.JSON, told=watch.told)


Clock: TypeAlias = Callable[[], float]  # the loop's, in seconds


async def _pass(response: Answer, exchange: Exchange, watch: Watch, clock: Clock) -> bytes:
    """Every read to the client, looked at on its way, but for the last one, which is handed back."""
    while True:
        if isinstance(response, Response):
            await _pass_at_once(response, exchange, watch, clock)
        data = await response.read()
        if data:
            watch.look(data, clock())
        if response.complete:
            return data
        await exchange.write(data)


async def _pass_at_once(response: Response, exchange: Exchange, watch: Watch, clock: Clock) -> None:
    """Each read in the turn in which it comes, until the client is behind or the body is about to end."""
    put_chunk = exchange.put_chunk
    if put_chunk is None:
        return

    def take(data: bytes) -> bool:
        watch.look(data, clock())
        return exchange.put(data)

    await response.pass_on(take, watch.chunk_taker(put_chunk, response.stop_passing))
    await exchange.caught_up()


async def _end(exchange: Exchange, tap: Tap, last: bytes, *, judged: bool, told: bytes) -> None:
    """The engine's framing is satisfied. Is its answer whole too?

    1 its wire ended as it ends, or has no end of its own: the end
    2 the engine has told the client of an error itself: the end, but not a whole answer
    3 neither: broken off, however politely
    """
    if tap.complete or not judged:
        await exchange.end(last)
    elif tap.saw_error:
        await exchange.end(last)
        kind = CacheFullError if CACHE_FULL in told else GatewayError
        raise kind("upstream_broke", "The backend reported an error in its stream.")
    else:
        if last:
            await exchange.write(last)
        _cut_unless_whole(exchange, tap)
        raise GatewayError("upstream_broke", BROKE)


async def _whole(
    response: Answer, exchange: Exchange, headers: Headers, route: Route, meter: Meter
) -> None:
    """A response that is not a stream. Nothing is sent before its first byte, so that a failure is a status."""
    try:
        data = await response.read()
    except UpstreamError as error:
        raise refusal(error) from error
    if exchange.early:  # meanwhile
        await _too_late(response, exchange, data)
        return
    await exchange.start(response.status, headers)
    tap = BodyTap(route.wire)
    try:
        while data:
            tap.feed(data)
            if response.complete:
                break
            await exchange.write(data)
            data = await response.read()
    except UpstreamError as error:
        exchange.cut()
        raise GatewayError("upstream_broke", BROKE) from error
    await exchange.end(data)
    if response.status == 200:
        figures = tap.figures
        timings = figures.timings
        meter.told(figures.usage, timings.prompt_ms / 1000 if timings else None)


async def _too_late(response: Answer, exchange: Exchange, body: bytes) -> None:
    """The status is given away: what the engine says instead of a stream becomes the stream's last event.

    `body`: what has been read of it.
    """
    if response.status < 400:
        raise GatewayError(
            "upstream_failed_ran", "The backend answered with no stream, after one had begun."
        )
    try:
        while len(body) < MOST_REFUSAL and (data := await response.read()):
            body += data
    except UpstreamError:
        pass  # the status says it, and so does what came of the body
    exchange.status = response.status  # what the outcome and the log line go by
    await exchange.end(
        refusal_event(
            response.status,
            body,
            exchange.family,
            exchange.request_id,
            responses=exchange.path == "/v1/responses",
        )
    )


def _refuse_if_empty(response: Answer) -> None:
    """A stream that has ended already, without a byte, is no answer; and its status is still ours to choose."""
    if response.complete:
        raise GatewayError("upstream_failed_ran", "The backend ended its answer before it began.")


def _cut_unless_whole(exchange: Exchange, tap: Tap) -> None:
    """An event cut in half cannot be followed by another: break the connection."""
    if not tap.at_boundary:
        exchange.cut()


def _stream_type(response: Answer) -> bytes:
    """The content type of a stream that we can look into; b"" for anything else."""
    kind = b""
    for name, value in response.headers:
        if name == b"content-type":
            kind = value.split(b";", 1)[0].strip().lower()
        elif name == b"content-encoding" and value.strip().lower() != b"identity":
            return b""
    return kind if response.status == 200 and kind in (EVENT_STREAM, NDJSON) else b""
