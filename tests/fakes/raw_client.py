"""A client that owns its socket: exact bytes out, exact bytes in, and every way of leaving.

Nothing is read unless the test asks for it, so a client that merely sends has stopped reading by itself
(with `rcvbuf=4096` the server feels it soon). Every wait has a deadline: a hang is a failure with a
message, never a stuck test.

    async with await RawClient.connect(port) as client:
        await client.request("POST", "/v1/chat/completions", body=b"{}")
        response = await client.response()
        assert (response.status, response.ended) == (200, "whole")
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import struct
import time
from dataclasses import dataclass, field
from typing import Any, Literal, Self

SLACK = float(os.environ.get("SLOTGATE_TEST_SLACK", "1"))
PATIENCE_S = 10.0 * SLACK

Framing = Literal["none", "length", "chunked", "close"]
Ended = Literal["whole", "cut", "reset"]
HeaderList = list[tuple[str, str]]


class HangupError(Exception):
    """The server ended the connection where the test wanted bytes. `how` is "fin" or "reset"."""

    def __init__(self, how: Literal["fin", "reset"], got: bytes) -> None:
        super().__init__(f"server left by {how} after {got!r}")
        self.how = how
        self.got = got


@dataclass(slots=True)
class RawResponse:
    status: int
    version: str
    headers: HeaderList  # names in lower case, in the order of arrival
    framing: Framing
    body: bytes = b""
    ended: Ended = "whole"  # "cut": FIN before the framing said so; "reset": RST
    chunks: list[bytes] = field(default_factory=list)

    def header(self, name: str) -> str | None:
        """The first value of this header."""
        return next((v for n, v in self.headers if n == name.lower()), None)

    def all(self, name: str) -> list[str]:
        return [v for n, v in self.headers if n == name.lower()]

    def json(self) -> Any:
        return json.loads(self.body)


class RawClient:
    """One TCP connection. `log` keeps (monotonic seconds, bytes) of every read off the wire."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.buffer = bytearray()
        self.log: list[tuple[float, bytes]] = []

    @classmethod
    async def connect(
        cls,
        port: int,
        host: str = "127.0.0.1",
        *,
        rcvbuf: int | None = None,
        sndbuf: int | None = None,
    ) -> Self:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        sock = socket.socket(family, socket.SOCK_STREAM)
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if rcvbuf is not None:  # before connect: the window is agreed there
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, rcvbuf)
        if sndbuf is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, sndbuf)
        try:
            async with asyncio.timeout(PATIENCE_S):
                await asyncio.get_running_loop().sock_connect(sock, (host, port))
        except BaseException:
            sock.close()
            raise
        return cls(sock)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    # -- sending

    async def send(self, data: bytes, *, patience_s: float = PATIENCE_S) -> None:
        """Exactly these bytes. Raises TimeoutError when the server stops taking them."""
        async with asyncio.timeout(patience_s):
            await asyncio.get_running_loop().sock_sendall(self.sock, data)

    async def send_slowly(self, data: bytes, every_s: float, size: int = 1) -> None:
        for at in range(0, len(data), size):
            await self.send(data[at : at + size])
            await asyncio.sleep(every_s)

    async def request(
        self,
        method: str,
        path: str,
        headers: dict[str, str] | HeaderList | None = None,
        body: bytes | None = None,
        **how: Any,
    ) -> None:
        """A well-formed request in one write; see `encode` for version and chunks."""
        await self.send(encode(method, path, headers, body, **how))

    # -- receiving

    async def response(
        self, *, head_only: bool = False, patience_s: float = PATIENCE_S
    ) -> RawResponse:
        """The next final response, 1xx skipped. Raises HangupError when none comes.

        A body that ends early is no exception: look at `ended`. `head_only` says that the request was a
        HEAD. To meet a stream piece by piece, use `head` and then `chunk` or `until`.
        """
        async with asyncio.timeout(patience_s):
            response = await self.head(head_only=head_only)
            while 100 <= response.status < 200:
                response = await self.head(head_only=head_only)
            await self._body(response)
            return response

    async def head(self, *, head_only: bool = False) -> RawResponse:
        """Only status line and headers, 1xx too; the body stays unread."""
        lines = (await self.until(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        version, status = lines[0].split(" ", 2)[:2]
        headers = [(n.lower(), v.strip()) for n, _, v in (x.partition(":") for x in lines[1:-2])]
        found = RawResponse(int(status), version, headers, "none")
        found.framing = _framing(found, head_only)
        return found

    async def chunk(self) -> bytes:
        """One chunk of a chunked body; b"" is the last one."""
        size = int((await self.until(b"\r\n")).split(b";")[0], 16)
        data = await self.exactly(size)
        await self.exactly(2)
        return data

    async def until(self, mark: bytes) -> bytes:
        """Everything up to and with `mark`. Raises HangupError."""
        while mark not in self.buffer:
            await self._more()
        return self._take(self.buffer.index(mark) + len(mark))

    async def exactly(self, size: int) -> bytes:
        while len(self.buffer) < size:
            await self._more()
        return self._take(size)

    async def ending(self, *, patience_s: float = PATIENCE_S) -> Literal["fin", "reset"]:
        """Read on until the server ends the connection; how it did. The rest stays in `buffer`."""
        async with asyncio.timeout(patience_s):
            while True:
                try:
                    await self._more()
                except HangupError as end:
                    return end.how

    async def is_open(self, for_s: float) -> bool:
        """Whether the server leaves the connection open for that long."""
        try:
            await self.ending(patience_s=for_s)
        except TimeoutError:
            return True
        return False

    # -- leaving

    def half_close(self) -> None:
        """FIN, still reading."""
        self.sock.shutdown(socket.SHUT_WR)

    fin = half_close

    def rst(self) -> None:
        """Leave by RST, at once."""
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.sock.close()

    def close(self) -> None:
        self.sock.close()

    # -- helpers

    async def _more(self) -> None:
        try:
            async with asyncio.timeout(PATIENCE_S * 10):
                data = await asyncio.get_running_loop().sock_recv(self.sock, 65536)
        except (ConnectionResetError, BrokenPipeError):
            raise HangupError("reset", bytes(self.buffer)) from None
        if not data:
            raise HangupError("fin", bytes(self.buffer))
        self.log.append((time.monotonic(), data))
        self.buffer += data

    def _take(self, size: int) -> bytes:
        data = bytes(self.buffer[:size])
        del self.buffer[:size]
        return data

    async def _body(self, response: RawResponse) -> None:
        try:
            if response.framing == "length":
                size = int(response.header("content-length") or 0)
                response.body = await self.exactly(size)
            elif response.framing == "chunked":
                while data := await self.chunk():
                    response.chunks.append(data)
            elif response.framing == "close":
                while True:
                    await self._more()
        except HangupError as end:
            response.ended = "reset" if end.how == "reset" else "cut"
            if response.framing == "close" and end.how == "fin":
                response.ended = "whole"
            if response.framing != "chunked":
                response.body = self._take(len(self.buffer))
        if response.framing == "chunked":
            response.body = b"".join(response.chunks)


def encode(
    method: str,
    path: str,
    headers: dict[str, str] | HeaderList | None = None,
    body: bytes | None = None,
    *,
    version: str = "1.1",
    chunks: list[bytes] | None = None,
) -> bytes:
    """A request as bytes. Host and framing headers are added when `headers` does not name them."""
    pairs = list(headers.items()) if isinstance(headers, dict) else list(headers or [])
    named = {name.lower() for name, _ in pairs}
    if "host" not in named:
        pairs.insert(0, ("Host", "127.0.0.1"))
    if chunks is not None:
        pairs.append(("Transfer-Encoding", "chunked"))
        body = b"".join(b"%x\r\n%b\r\n" % (len(c), c) for c in chunks) + b"0\r\n\r\n"
    elif body is not None and "content-length" not in named:
        pairs.append(("Content-Length", str(len(body))))
    lines = [f"{method} {path} HTTP/{version}", *(f"{n}: {v}" for n, v in pairs), "", ""]
    return "\r\n".join(lines).encode("latin-1") + (body or b"")


def _framing(response: RawResponse, head_only: bool) -> Framing:
    if head_only or response.status in (204, 304) or response.status < 200:
        return "none"
    if (response.header("transfer-encoding") or "").lower() == "chunked":
        return "chunked"
    if response.header("content-length") is not None:
        return "length"
    return "close"
