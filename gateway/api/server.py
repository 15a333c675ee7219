"""The listening socket, the signals, and the order in which everything starts and stops.

Law of this file: the first SIGTERM or SIGINT drains while the socket still listens, so that clients get an
answer (the app refuses new work) and never a refused connection; the second one exits at once. Both exit
with status 0.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import signal
import ssl
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import TYPE_CHECKING, Any, Final, cast

import uvicorn
from uvicorn.server import ServerState

from gateway.api.edge import Edge, EdgeSettings, edge

if TYPE_CHECKING:
    from gateway.api.exchange import App

_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)
_BACKLOG: Final = 4096
_FILES: Final = 65536  # descriptors that are asked for: one a client, one an upstream connection
_PARTING_S: Final = 1.0  # for answers already given to reach clients that are still sending
_log = logging.getLogger("slotgate.server")


class StartupError(Exception):
    """The address cannot be listened on, or the app did not start. The text is for the operator."""


class Server:
    """Serves one app on one address. Owns the listening socket and the client connections."""

    def __init__(
        self,
        app: App,
        settings: EdgeSettings,
        *,
        host: str,
        port: int,
        tls: tuple[str, str] | None = None,
    ) -> None:
        """`port` 0 takes a free one. `tls`: paths of certificate chain and key."""
        cert, key = tls or (None, None)
        self._config = uvicorn.Config(
            cast("Any", app),
            http=edge(settings),
            ws="none",
            host=host,
            port=port,
            ssl_certfile=cert,
            ssl_keyfile=key,
            interface="asgi3",
            server_header=False,
            date_header=False,
            proxy_headers=False,
            access_log=False,
            log_config=None,
        )
        self._state = ServerState()
        self._listener: asyncio.Server | None = None
        self.port = port

    @property
    def tls_context(self) -> ssl.SSLContext | None:
        """For new certificates: `load_cert_chain` on it counts from the next connection on."""
        return self._config.ssl

    @property
    def connections(self) -> int:
        return len(self._state.connections)

    async def start(self) -> None:
        """Start the app, then listen. `port` is the real one afterwards. Raises StartupError."""
        config = self._config
        config.load()
        _raise_file_limit()
        self._lifespan = config.lifespan_class(config)
        await self._lifespan.startup()
        if self._lifespan.should_exit:
            raise StartupError("the app did not start; the log says why")
        loop = asyncio.get_running_loop()
        try:
            self._listener = await loop.create_server(
                self._connection, config.host, config.port, ssl=config.ssl, backlog=_BACKLOG
            )
        except OSError as error:
            await self._lifespan.shutdown()
            raise StartupError(
                f"cannot listen on {config.host}:{config.port}: {error.strerror or error}"
            ) from error
        self.port = self._listener.sockets[0].getsockname()[1]

    async def stop(self, *, at_once: bool = False) -> None:
        """Stop listening, close idle connections, and break what is still at work a second later.

        Wait for running requests before. `at_once` gives nobody that second.
        """
        if self._listener is not None:
            self._listener.close()
        for connection in self._edges():
            connection.shutdown()
        if not at_once:
            await self._until_gone(_PARTING_S)
        for connection in self._edges():
            connection.abort()
        for task in list(self._state.tasks):
            task.cancel()
        await self._until_gone(_PARTING_S)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_PARTING_S if at_once else None):
                await self._lifespan.shutdown()

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

    async def _until_gone(self, for_s: float) -> None:
        loop = asyncio.get_running_loop()
        end = loop.time() + for_s
        while (self._state.connections or self._state.tasks) and loop.time() < end:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def serving(server: Server) -> AsyncIterator[Server]:
    """The server from start to stop, without signals: for tests and the demo."""
    await server.start()
    try:
        yield server
    finally:
        await server.stop()


async def serve(
    server: Server,
    *,
    on_ready: Callable[[], object],
    on_drain: Callable[[], Coroutine[Any, Any, object]],
) -> None:
    """Run until told to stop. `on_ready` is called when `server.port` takes connections.

    At the first SIGTERM or SIGINT `on_drain` is awaited while the server goes on listening; at the second it
    is cancelled and every connection breaks. Raises StartupError. For the main thread only, and for a
    process that ends then: both signals stay blocked afterwards, so that a late one cannot spoil the status.
    """
    loop = asyncio.get_running_loop()
    first, second = asyncio.Event(), asyncio.Event()

    def on_signal() -> None:
        (second if first.is_set() else first).set()

    for number in _SIGNALS:
        loop.add_signal_handler(number, on_signal)
    await server.start()
    on_ready()
    await first.wait()
    draining = loop.create_task(on_drain())
    hurry = loop.create_task(second.wait())
    await asyncio.wait({draining, hurry}, return_when=asyncio.FIRST_COMPLETED)
    await _ended(draining)
    stopping = loop.create_task(server.stop(at_once=second.is_set()))
    await asyncio.wait({stopping, hurry}, return_when=asyncio.FIRST_COMPLETED)
    if not stopping.done():
        stopping.cancel()
        await server.stop(at_once=True)
    await _ended(hurry)
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)


def run(main: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine on the fastest event loop there is."""
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        runner.run(main)


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    try:
        import uvloop  # noqa: PLC0415  # not on every platform
    except ImportError:
        return asyncio.new_event_loop
    return cast("Callable[[], asyncio.AbstractEventLoop]", uvloop.new_event_loop)


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
