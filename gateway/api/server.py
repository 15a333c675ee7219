"""The listening socket, the signals, and the order in which everything starts and stops.

Law of this file: the first SIGTERM or SIGINT drains while the socket still listens, so that clients get an
answer (the app refuses new work) and never a refused connection; the second one exits at once. Both exit
with status 0.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import resource
import signal
import ssl
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, Final, cast

import uvicorn
from uvicorn.server import ServerState

from gateway.api.edge import Edge, EdgeSettings, edge
from gateway.runtime.certificate import Certificate

if TYPE_CHECKING:
    from gateway.api.cycle import App
    from gateway.core.config import Tls
    from gateway.core.errors import GatewayError

_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)
_BACKLOG: Final = 4096
_FILES: Final = 65536  # descriptors that are asked for: one a client, one an upstream connection
_PARTING_S: Final = 1.0  # for answers already given to reach clients that are still sending
_log = logging.getLogger("slotgate.server")


class StartupError(OSError):
    """The address cannot be listened on, or the app did not start. The text is for the operator."""


class Server:
    """Serves one app on one address. Owns the listening socket, the client connections and the signals."""

    def __init__(
        self,
        app: App,
        settings: EdgeSettings,
        *,
        host: str,
        port: int,
        tls: Tls | None = None,
        on_refused: Callable[[GatewayError], object] = lambda _: None,
    ) -> None:
        """`port` 0 takes a free one. `on_refused`: see `edge`."""
        self._config = uvicorn.Config(
            cast("Any", app),
            http=edge(settings, on_refused),
            ws="none",
            host=host,
            port=port,
            interface="asgi3",
            server_header=False,
            date_header=False,
            proxy_headers=False,
            access_log=False,
            log_config=None,
        )
        self._tls = tls
        self._certificate: Certificate | None = None
        self._state = ServerState()
        self._listener: asyncio.Server | None = None
        self._first = asyncio.Event()
        self._second = asyncio.Event()
        self.port = port

    def apply(self, settings: EdgeSettings, tls: ssl.SSLContext | None = None) -> None:
        """New limits: for every connection at once, save those of heads, which new connections get.

        `tls`: another certificate, for handshakes to come; it does not turn TLS on.
        """
        cast("type[Edge]", self._config.http).settings = settings
        if tls is not None and self._certificate is not None:
            self._certificate.renew(tls)

    @property
    def connections(self) -> int:
        """Client connections that are open."""
        return len(self._state.connections)

    async def start(self) -> None:
        """Start the app, then listen; `port` is the real one afterwards. Raises StartupError."""
        config = self._config
        config.load()
        _raise_file_limit()
        context = self._listening_context()
        self._lifespan = config.lifespan_class(config)
        await self._lifespan.startup()
        if self._lifespan.should_exit:
            raise StartupError("the app did not start; the log says why")
        loop = asyncio.get_running_loop()
        try:
            self._listener = await loop.create_server(
                self._connection, config.host, config.port, ssl=context, backlog=_BACKLOG
            )
        except OSError as error:
            await self._lifespan.shutdown()
            raise StartupError(
                f"cannot listen on {config.host}:{config.port}: {error.strerror or error}"
            ) from error
        self.port = self._listener.sockets[0].getsockname()[1]

    def catch_signals(self) -> None:
        """From now on SIGTERM and SIGINT mean what `until_signalled` says.

        To be called in the main thread before anybody is told that the server is ready.
        """
        loop = asyncio.get_running_loop()
        for number in _SIGNALS:  # not by the loop, which goes back to the default when it closes
            signal.signal(number, lambda *_: loop.call_soon_threadsafe(self._on_signal))

    async def until_signalled(self, drain: Callable[[], Coroutine[Any, Any, object]]) -> None:
        """Serve until the first signal and the end of its `drain`, or until a second signal.

        `drain` runs while the server goes on listening. A second signal, also after this has returned,
        breaks every connection and ends the process with status 0, two seconds later at the latest. For a
        process that ends then: `stop` has the signals ignored.
        """
        self.catch_signals()
        loop = asyncio.get_running_loop()
        await self._first.wait()
        draining = loop.create_task(drain())
        second = loop.create_task(self._second.wait())
        await asyncio.wait({draining, second}, return_when=asyncio.FIRST_COMPLETED)
        await _ended(second)
        await _ended(draining)

    async def stop(self) -> None:
        """Stop listening, close idle connections, and break what is still at work a second later.

        Wait for running requests before: see `until_signalled`.
        """
        if self._listener is not None:
            self._listener.close()
        for connection in self._edges():
            connection.shutdown()
        await self._until_gone()
        for connection in self._edges():
            connection.abort()
        for task in list(self._state.tasks):
            task.cancel()
        await self._until_gone()
        await self._lifespan.shutdown()
        if self._first.is_set():
            for number in _SIGNALS:  # a late one must not spoil the exit status
                signal.signal(number, signal.SIG_IGN)

    def _listening_context(self) -> ssl.SSLContext | None:
        if self._tls is None:
            return None
        try:
            self._certificate = Certificate(self._tls)
        except OSError as error:
            raise StartupError(f"the certificate cannot be used: {error}") from error
        return self._certificate.listening

    def _connection(self) -> Edge:
        return cast(
            "Edge",
            cast("Any", self._config.http_protocol_class)(
                config=self._config,
                server_state=self._state,
                app_state=self._lifespan.state,
            ),
        )

    def _edges(self) -> list[Edge]:
        return cast("list[Edge]", list(self._state.connections))

    def _on_signal(self) -> None:
        if self._second.is_set():
            return
        if not self._first.is_set():
            self._first.set()
            return
        self._second.set()  # exit now: whoever is still connected sees a break, never a clean end
        for connection in self._edges():
            connection.abort()
        asyncio.get_running_loop().call_later(_PARTING_S * 2, os._exit, 0)

    async def _until_gone(self) -> None:
        """Until connections and requests are gone, for a second at most."""
        state, loop = self._state, asyncio.get_running_loop()
        end = loop.time() + _PARTING_S
        while (state.connections or state.tasks) and loop.time() < end:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def _ended(task: asyncio.Task[Any]) -> None:
    """Cancel a task that still runs; log what went wrong in one that does not."""
    task.cancel()
    try:
        await task
    except asyncio.CancelledError:
        pass
    except Exception:  # noqa: BLE001
        # Noticed by: the operator in the log. The process stops in any case.
        _log.exception("draining failed")


def _raise_file_limit() -> None:
    """Many systems start a process with 1,024 descriptors and let it ask for more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _FILES if hard == resource.RLIM_INFINITY else min(_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):  # then the old limit holds
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
