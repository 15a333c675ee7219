"""The way to one backend: requests out, responses in, over connections that are used again when that is safe.

Law of this file: whoever opens a call gives its connection back on every way out. It is kept only after an
answer that was whole; otherwise its socket is closed at once, because closing is the only cancel that engines
understand. A request is sent a second time only when a stale idle connection swallowed the first.

    Upstream (one per backend)          IdleConnections (idle.py)
      └─ open() -> Call  ──────────────►  Connection (connection.py)  ◄── dial() (dial.py)
             └─ Response (http1.py) ◄──── bytes
"""

from __future__ import annotations

import asyncio
import errno
import socket
import ssl
from collections.abc import Sequence
from types import TracebackType
from typing import Final

import msgspec

from gateway.runtime.connection import Connection
from gateway.runtime.deadlines import Deadlines
from gateway.runtime.dial import dial, tls_context
from gateway.runtime.http1 import Response
from gateway.runtime.idle import IdleConnections
from gateway.runtime.target import Target
from gateway.runtime.upstream_error import Kind, UpstreamError

__all__ = ["Call", "Deadlines", "Response", "Target", "Upstream", "UpstreamError"]

Headers = Sequence[tuple[bytes, bytes]]

# No descriptor, no memory, no local port: this machine's trouble, whoever was to be dialled.
OUR_WANT: Final = frozenset(
    {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL}
)
_TURNS_TO_CLOSE: Final = 100  # of the loop; an aborted transport needs one or two
_BODY_METHODS: Final = frozenset({"POST", "PUT", "PATCH"})


class Upstream:
    """One backend's HTTP client. Owns its connections, idle and in use.

    `idle_expiry_s` must stay below the backend's own patience (5 s for llama-server, vLLM and SGLang); 0 keeps no
    connection. llama-server closes after 100 requests.
    """

    def __init__(
        self,
        target: Target,
        *,
        idle_expiry_s: float = 3.5,
        max_requests_per_connection: int = 100,
    ) -> None:
        self.target = target
        self._idle = IdleConnections(
            expiry_s=idle_expiry_s, max_requests=max_requests_per_connection
        )
        self._connections: set[Connection] = set()
        self._dialling = 0
        self._tls: ssl.SSLContext | None = None
        self._fixed = _fixed_headers(target)
        self._fixed_lines = self._fixed.count(b"\n")
        self.take_idle = self._idle.take

    @property
    def idle(self) -> int:
        """Connections kept for later."""
        return len(self._idle)

    @property
    def open_connections(self) -> int:
        """Sockets that exist or are being connected, idle ones too."""
        return len(self._connections) + self._dialling

    def open(  # noqa: PLR0917 - the parts of a request line and a message, in wire order
        self,
        method: str,
        path: str,
        query: bytes,
        headers: Headers,
        body: bytes,
        deadlines: Deadlines,
    ) -> Call:
        """Prepare one request; `async with` sends it and gives the Response once its head is there.

        `headers` are final but for Host, Authorization and Content-Length, which are added here. `path` is the API
        path ("/v1/…"), sent below the target's base path. Entering raises UpstreamError.
        """
        head = self._head(method, path, query, headers, body)
        return Call(self, head, body, deadlines, method == "HEAD")

    async def aclose(self) -> None:
        """Close the idle connections and keep no more. Calls under way go on to their end."""
        self._idle.close()
        for _ in range(_TURNS_TO_CLOSE):
            if not any(connection.closing for connection in self._connections):
                return
            await asyncio.sleep(0)

    def trust_anew(self) -> None:
        """Read the `ca` file again before the next connection: it may have been renewed."""
        self._tls = None

    # What a call uses.

    def give_back(self, connection: Connection) -> None:
        if connection.release():
            self._idle.put(connection)

    async def connect(self, connect_s: float) -> Connection:
        """A new connection, TLS included, within `connect_s` (0: no limit). Raises UpstreamError."""
        self._dialling += 1
        try:
            async with asyncio.timeout(connect_s or None):
                return await self._connect()
        except TimeoutError as error:
            raise self._error("connect_timeout", error) from error
        except ssl.SSLError as error:
            raise self._error("tls", error) from error
        except ConnectionRefusedError as error:
            raise self._error("refused", error) from error
        except OSError as error:
            ours = error.errno in OUR_WANT
            raise self._error("exhausted" if ours else "unreachable", error) from error
        finally:
            self._dialling -= 1

    # Below: private steps.

    async def _connect(self) -> Connection:
        context = self._context()
        sock = await dial(self.target.host, self.target.port)
        connection = Connection(sock, peer=self._peer(), raw=context is None, on_lost=self._on_lost)
        try:
            await self._wrap(connection, sock, context)
        except BaseException:
            connection.abort()
            sock.close()
            raise
        self._connections.add(connection)
        return connection

    async def _wrap(
        self, connection: Connection, sock: socket.socket, context: ssl.SSLContext | None
    ) -> None:
        loop = asyncio.get_running_loop()
        if context is None:
            await loop.create_connection(lambda: connection, sock=sock)
            return
        try:
            await loop.create_connection(
                lambda: connection, sock=sock, ssl=context, server_hostname=self.target.host
            )
        except ConnectionError as error:  # the peer hung up in the handshake
            raise ssl.SSLError(str(error) or type(error).__name__) from error

    def _context(self) -> ssl.SSLContext | None:
        # Made when first needed: it reads files, and one that is missing must not keep the gateway from starting.
        if self.target.scheme == "https" and self._tls is None:
            try:
                self._tls = tls_context(self.target.ca)
            except OSError as error:
                raise ssl.SSLError(f"ca: {error}") from error
        return self._tls

    def _on_lost(self, connection: Connection) -> None:
        self._connections.discard(connection)
        self._idle.forget(connection)

    def _peer(self) -> str:
        return f"{self.target.name} {self.target.host}:{self.target.port}"

    def _error(self, kind: Kind, error: Exception) -> UpstreamError:
        return UpstreamError(kind, f"{self._peer()}: {str(error) or type(error).__name__}")

    def _head(self, method: str, path: str, query: bytes, headers: Headers, body: bytes) -> bytes:
        where = f"{method} {self.target.base_path}{path}".encode("ascii")
        lines = [where + b"?" + query + self._fixed if query else where + self._fixed]
        lines += map(b": ".join, headers)
        if body or method in _BODY_METHODS:
            lines.append(b"content-length: %d" % len(body))
        head = b"\r\n".join(lines)
        # Whatever slipped through the edge: one header stays one header, one request one request.
        breaks = len(lines) - 1 + self._fixed_lines
        if head.count(b"\n") != breaks or head.count(b"\r") != breaks:
            raise ValueError("a header or the query holds a line break")
        return head + b"\r\n\r\n"


class Call(msgspec.Struct, eq=False):
    """One request and its response: an async context manager. Owns a connection while it is open."""

    _upstream: Upstream
    _head: bytes
    _body: bytes
    _deadlines: Deadlines
    _bodiless: bool
    _connection: Connection | None = None

    async def __aenter__(self) -> Response:
        connection, replayed = self._upstream.take_idle(), False
        while True:
            if connection is None:
                connection = await self._upstream.connect(self._deadlines.connect_s)
            response = Response(connection.loop, bodiless=self._bodiless, replayed=replayed)
            try:
                connection.start(response, self._head, self._body, self._deadlines)
                await response.wait_for_head()
            except UpstreamError as error:
                self._upstream.give_back(connection)
                if replayed or error.kind != "stale":
                    raise
                connection, replayed = None, True
            except BaseException:
                self._upstream.give_back(connection)
                raise
            else:
                self._connection = connection
                self._body = b""  # it will not be sent again, and the answer may take long
                return response

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Give the connection back; what leaving the block does. May be called again."""
        connection, self._connection = self._connection, None
        if connection is not None:
            self._upstream.give_back(connection)


def _fixed_headers(target: Target) -> bytes:
    fixed = b" HTTP/1.1\r\nhost: " + target.authority
    if target.api_key:
        fixed += b"\r\nauthorization: Bearer " + target.api_key.encode("ascii")
    return fixed
