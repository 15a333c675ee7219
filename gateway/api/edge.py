"""The client side of the gateway: one TCP connection, from accept to the last byte.

Laws of this file:
- While the app works, reading goes on, so the client's leaving is seen at once; a FIN counts as leaving.
- Whatever is refused here is answered in the client's own error form, and the client really receives it:
  answer, FIN, then what is still coming is read and dropped for a while, then close.
- Every state in which a client owes us something (a head, body bytes, room for an answer) has a deadline.

`edge(settings)` gives the class that `uvicorn.Config(http=…)` wants. It is a protocol of its own and no
subclass of uvicorn's, of which nothing but the constructor was left.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from enum import Enum
from typing import TYPE_CHECKING, Any, ClassVar, Final, cast

from uvicorn.protocols.utils import get_local_addr, get_remote_addr, is_ssl

from gateway.api import tcp
from gateway.api.cycle import App, Cycle
from gateway.api.edge_settings import EdgeSettings
from gateway.api.intake import Intake
from gateway.api.reader import RequestReader
from gateway.api.refusal import refusal
from gateway.api.waiting import Outflow, Watch
from gateway.core.errors import GatewayError

if TYPE_CHECKING:
    import uvicorn
    from uvicorn.server import ServerState


__all__ = ["Edge", "EdgeSettings", "edge"]
Refused = Callable[[GatewayError], object]


def edge(settings: EdgeSettings, on_refused: Refused = lambda _: None) -> type[Edge]:
    """The protocol class with these limits, for `uvicorn.Config(http=…)`.

    `on_refused` is told of each request that is answered with an error before the app has seen it.
    """
    members = {"settings": settings, "_on_refused": (on_refused,)}  # bare, it would become a method
    return type("Edge", (Edge,), members)


class _Phase(Enum):
    READING = "between requests, in a head or in a body (then there is a cycle)"
    BUSY = "the request has arrived, its answer is not complete"
    LINGER = "the last answer is out; what still comes is dropped"
    CLOSED = "closing or closed"


_READING, _BUSY, _LINGER, _CLOSED = _Phase
_UNSENT_S: Final = 300.0  # for what is unsent at the end, when write_stall_s is off


class Edge(asyncio.Protocol):
    """One client connection. Owns its reader, its watch, its backlog and the cycle in progress."""

    settings: ClassVar[EdgeSettings]
    _on_refused: ClassVar[tuple[Refused]]

    def __init__(
        self,
        config: uvicorn.Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        if not config.loaded:
            config.load()
        self.app = cast("App", config.loaded_app)
        self.app_state = app_state
        self.server_state = server_state
        self.tasks = server_state.tasks
        self.loop = _loop or asyncio.get_running_loop()
        self.transport: asyncio.Transport = None  # type: ignore[assignment]  # until connection_made
        settings = self.settings
        self.reader = RequestReader(self, settings.header_kib << 10, settings.header_count)
        self.cycle: Cycle | None = None
        self.outflow = Outflow(self.loop)
        self._watch: Watch = None  # type: ignore[assignment]  # until connection_made
        self._phase = _READING
        self._stopping = False
        self._head_timed = False
        self._intake: Intake = None  # type: ignore[assignment]  # until connection_made

    # -- what the transport calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        cast("set[object]", self.server_state.connections).add(self)
        tcp.set_options(transport)
        self._intake = Intake(self.transport)
        self._watch = Watch(self.loop, self.transport, self._expire, self.abort)
        self._ends = {
            "scheme": "https" if is_ssl(self.transport) else "http",
            "server": get_local_addr(self.transport),
            "client": get_remote_addr(self.transport),
        }
        self._rest()

    def data_received(self, data: bytes) -> None:
        phase = self._phase
        if phase is _READING:
            self._read(data)
        elif phase is _BUSY:
            self._intake.hold(data, self.settings.backlog_bytes)
        elif phase is _LINGER:
            self._drop(len(data))

    def eof_received(self) -> None:
        """A FIN counts as leaving, a half-close too. The transport flushes and closes by itself."""
        cycle = self.cycle
        self._become_closed()
        if cycle is not None:
            cycle.leave()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        cast("set[object]", self.server_state.connections).discard(self)
        cycle, self.cycle = self.cycle, None
        self._phase = _CLOSED
        self._intake.take()
        self.reader.close()
        self._watch.stop()
        if cycle is not None:
            cycle.leave()
        self.outflow.resume()

    def pause_writing(self) -> None:
        self.outflow.pause()
        self._watch.stalled(self.settings.write_stall_s)

    def resume_writing(self) -> None:
        if self._phase is not _CLOSED:
            self._watch.flowing()
        self.outflow.resume()

    # -- what the reader calls

    def on_request(self) -> None:
        reader = self.reader
        cycle = Cycle(
            self,
            is_head=reader.method == "HEAD",
            takes_chunks=reader.version == "1.1",
            keep_alive=reader.keep_alive and not self._stopping,
            awaits_continue=reader.awaits_continue,
            declared=reader.body_left,
            notes=reader.notes,
        )
        self.cycle = cycle
        self._watch.nothing()
        scope = reader.scope(self._ends)
        scope["state"] = self.app_state.copy()
        scope["extensions"] = {"slotgate.edge": cycle}
        task = self.loop.create_task(cycle.run(self.app, scope))
        cycle.task = task
        self.tasks.add(task)

    def on_request_body(self, data: bytes) -> None:
        cycle = self.cycle
        if cycle is None:
            return
        if cycle.complete:
            self._drop(len(data))
            return
        cycle.feed(data)
        if cycle.held > self.settings.body_high_water:
            self._intake.pause()

    def on_request_end(self) -> None:
        cycle = self.cycle
        if cycle is None:
            return
        if cycle.complete:
            self._rest()  # answered early and now drained: the connection lives on
            return
        self._phase = _BUSY
        self._watch.nothing()
        cycle.end_body(self.loop.time())
        self._intake.resume()  # to see the client leave

    # -- what the cycle calls

    def expect_body(self, cycle: Cycle) -> None:
        """The app waits for body bytes that have not come."""
        if cycle.awaits_continue:
            cycle.awaits_continue = False
            if not cycle.started:
                self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        self._intake.resume()
        self._watch.within(self.settings.body_silence_s)

    def can_drain(self, cycle: Cycle) -> bool:
        """Whether the connection can be kept when the answer begins before the whole body is here."""
        return not cycle.awaits_continue and self.reader.body_left <= self.settings.drain_bytes

    def answered(self, cycle: Cycle) -> None:
        """The answer is complete."""
        self.server_state.total_requests += 1
        if not cycle.keep_alive:
            self._linger()
        elif self._phase is _BUSY:
            self._rest()
            self._intake.resume()
            if self._intake.backlog:
                self._read(self._intake.take())
        else:
            self._intake.answered()
            self._intake.resume()
            self._watch.within(self.settings.drain_s)

    def refuse(self, error: GatewayError) -> None:
        """Answer the request that is arriving or in progress with an error, and close.

        After the start of an answer nothing can be said any more, and the connection breaks instead.
        """
        cycle = self.cycle
        if self._phase is _LINGER or self._phase is _CLOSED:
            return
        if cycle is None or not cycle.started:
            is_head = cycle is not None and cycle.is_head
            reader = self.reader
            headers, origins = reader.headers, self.settings.origins
            self.transport.write(refusal(error, reader.url, headers, origins, is_head=is_head))
        if cycle is None:
            self._on_refused[0](error)
        else:
            cycle.refusal = error
        if cycle is not None and cycle.started and not cycle.complete:
            self.abort()
            return
        self._linger()
        if cycle is not None:
            cycle.leave()

    def abort(self) -> None:
        """End the connection by RST."""
        cycle = self.cycle
        self._become_closed()
        tcp.reset_on_close(self.transport)
        self.transport.abort()
        if cycle is not None:
            cycle.leave()

    # -- what the server calls

    def shutdown(self) -> None:
        """Close when idle, else after the answer in progress."""
        self._stopping = True
        if self.cycle is not None:
            self.cycle.keep_alive = False
        elif self._phase is _READING:
            self._close()

    # -- helpers: reading

    def _read(self, data: bytes) -> None:
        try:
            used = self.reader.feed(data)
        except GatewayError as error:
            self.refuse(error)
            return
        if used < len(data):
            self.data_received(data[used:])
        elif self.cycle is None and self.reader.begun and not self._head_timed:
            self._head_timed = True
            self._watch.within(self.settings.headers_s)

    def _drop(self, count: int) -> None:
        if self._intake.drop(count, self.settings.drain_bytes):
            self._close()

    # -- helpers: phases

    def _rest(self) -> None:
        """Wait for the next request."""
        self.cycle = None
        self._phase = _READING
        self._head_timed = False
        self.reader.next()
        self._watch.within(self.settings.keepalive_s)

    def _linger(self) -> None:
        """Send FIN and read on for a while: to close with unread bytes would be an RST, which eats the answer."""
        has_all = self._phase is _BUSY
        self._phase = _LINGER
        self.cycle = None
        self._intake.take()
        self._intake.answered()
        if self.transport.is_closing():
            return
        if self.transport.can_write_eof():
            self.transport.write_eof()
        elif has_all:  # TLS has no half-close
            self._close()
            return
        self._intake.resume()
        self._watch.within(self.settings.drain_s)

    def _close(self) -> None:
        self._become_closed()
        self.transport.close()

    def _become_closed(self) -> None:
        """What is unsent goes on its way, but not for ever."""
        self._phase = _CLOSED
        self.cycle = None
        self._intake.take()
        self._watch.nothing()
        self._watch.stalled(self.settings.write_stall_s or _UNSENT_S)

    def _expire(self) -> None:
        cycle = self.cycle
        if self._phase is _LINGER or (cycle is not None and cycle.complete):
            self._close()
        elif cycle is not None:
            self.refuse(_timeout("The request body did not arrive", self.settings.body_silence_s))
        elif self.reader.begun:
            self.refuse(_timeout("The request headers did not arrive", self.settings.headers_s))
        else:
            self._close()


def _timeout(what: str, seconds: float) -> GatewayError:
    return GatewayError("request_timeout", f"{what} within {seconds:g} s.")
