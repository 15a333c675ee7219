"""From a host name to a connected socket, whichever of its addresses answers.

Law of this file: nothing outlives the call but the socket it returns, however the call ends. So the attempts are
callbacks, not tasks: cleaning up after a cancellation needs no await. The environment's proxies are never used.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
import ssl
from typing import Any, Final

FALLBACK_S: Final = 0.25  # head start of one address before the next (RFC 8305 section 5)

# A peer that vanished is noticed within 15 + 3 * 5 s.
KEEPALIVE_IDLE_S: Final = 15
KEEPALIVE_INTERVAL_S: Final = 5
KEEPALIVE_PROBES: Final = 3

Address = tuple[socket.AddressFamily, tuple[Any, ...]]  # a sockaddr has 2 or 4 parts


async def dial(host: str, port: int) -> socket.socket:
    """A connected, non-blocking TCP socket. The name is resolved anew each time. Raises OSError."""
    addresses = _literal(host, port) or await _resolve(host, port)
    return await Race(addresses).winner()


def tls_context(ca: str | None) -> ssl.SSLContext:
    """A context that verifies name and chain, against the PEM file `ca` if given. Raises OSError."""
    context = ssl.create_default_context(cafile=ca)
    context.set_alpn_protocols(["http/1.1"])
    return context


class Race:
    """Connects to several addresses, each a little later than the one before. Owns all sockets but the winner."""

    def __init__(self, addresses: list[Address], *, fallback_s: float = FALLBACK_S) -> None:
        self._loop = asyncio.get_running_loop()
        self._waiting = list(reversed(addresses))
        self._fallback_s = fallback_s
        self._trying: set[socket.socket] = set()
        self._won: asyncio.Future[socket.socket] = self._loop.create_future()
        self._timer: asyncio.TimerHandle | None = None
        self._errors: list[OSError] = []

    async def winner(self) -> socket.socket:
        winner: socket.socket | None = None
        try:
            self._try_next()
            winner = await self._won
        finally:
            self._stop(winner)
        return winner

    def _try_next(self) -> None:
        self._cancel_timer()
        while self._waiting and not self._won.done():
            if self._begin(*self._waiting.pop()):
                if self._waiting:
                    self._timer = self._loop.call_later(self._fallback_s, self._try_next)
                return
        if not self._trying and not self._won.done():
            self._won.set_exception(_most_telling(self._errors))

    def _begin(self, family: socket.AddressFamily, address: tuple[Any, ...]) -> bool:
        """Start one attempt. False if it failed on the spot."""
        try:
            sock = _new_socket(family)
        except OSError as error:
            self._errors.append(error)
            return False
        self._trying.add(sock)
        code = sock.connect_ex(address)
        if code == errno.EINPROGRESS:
            self._loop.add_writer(sock.fileno(), self._on_writable, sock)
            return True
        return self._settle(sock, code)

    def _on_writable(self, sock: socket.socket) -> None:
        self._loop.remove_writer(sock.fileno())
        code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if not self._settle(sock, code):
            self._try_next()

    def _settle(self, sock: socket.socket, code: int) -> bool:
        """One attempt has ended: true if it connected."""
        if not code and _is_itself(sock):
            code = errno.ECONNREFUSED
        if code:
            self._trying.discard(sock)
            sock.close()
            self._errors.append(OSError(code, os.strerror(code)))
        elif not self._won.done():
            self._won.set_result(sock)
        return code == 0

    def _stop(self, winner: socket.socket | None) -> None:
        self._cancel_timer()
        for sock in self._trying:
            self._loop.remove_writer(sock.fileno())
            if sock is not winner:
                sock.close()
        self._trying.clear()

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _literal(host: str, port: int) -> list[Address]:
    """The one address, if the host is written as one: no thread is needed to resolve it."""
    for family in (socket.AF_INET, socket.AF_INET6):
        with contextlib.suppress(OSError):
            socket.inet_pton(family, host)
            return [(family, (host, port))]
    return []


async def _resolve(host: str, port: int) -> list[Address]:
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return _alternated([(family, address) for family, _, _, _, address in found])


def _alternated(addresses: list[Address]) -> list[Address]:
    """The resolver's order, families in turn, so that one broken family delays us only once."""
    if not addresses:
        raise OSError(errno.EADDRNOTAVAIL, "the name has no address")
    first = [a for a in addresses if a[0] == addresses[0][0]]
    other = [a for a in addresses if a[0] != addresses[0][0]]
    out = []
    while first or other:
        out += first[:1] + other[:1]
        first, other = first[1:], other[1:]
    return out


def _new_socket(family: socket.AddressFamily) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", KEEPALIVE_IDLE_S),
        ("TCP_KEEPINTVL", KEEPALIVE_INTERVAL_S),
        ("TCP_KEEPCNT", KEEPALIVE_PROBES),
    ):
        if hasattr(socket, name):  # not on every system
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return sock


def _is_itself(sock: socket.socket) -> bool:
    """A local port of the ephemeral range on which nobody listens can connect to itself (simultaneous open)."""
    try:
        return bool(sock.getsockname() == sock.getpeername())
    except OSError:  # reset meanwhile: whoever uses the socket will see
        return False


def _most_telling(errors: list[OSError]) -> OSError:
    """A refusal says more than the want of a route; otherwise the first."""
    for error in errors:
        if isinstance(error, ConnectionRefusedError):
            return error
    return errors[0]
