"""Reading requests off the wire, by hand and strictly.

Written apart from the parser that the gateway uses, so that a framing mistake of one is not hidden by the other:
anything that is not exactly RFC 9112 raises FramingError.
"""

from __future__ import annotations

from dataclasses import dataclass, field

_END = b"\r\n\r\n"


class FramingError(Exception):
    """The peer sent something that is not a well-framed HTTP/1 request."""


@dataclass(slots=True)
class Head:
    method: str
    target: str
    version: str  # "1.0" or "1.1"
    headers: list[tuple[str, str]]  # as sent, in order, with their case

    def get(self, name: str) -> str | None:
        """The first value of a header, whatever its case."""
        name = name.lower()
        return next((value for key, value in self.headers if key.lower() == name), None)


@dataclass(slots=True)
class RequestReader:
    """Feed it bytes; take Head, then body pieces, then the end, one request after another."""

    _buffer: bytearray = field(default_factory=bytearray)
    _left: int | None = None  # body bytes still to come; None: chunked
    _chunked: bool = False
    _in_body: bool = False

    def feed(self, data: bytes) -> None:
        self._buffer += data

    @property
    def pending(self) -> bytes:
        """What has been fed and not yet taken."""
        return bytes(self._buffer)

    def take_head(self) -> Head | None:
        """The next request's head when it is whole."""
        end = self._buffer.find(_END)
        if end < 0:
            return None
        lines = bytes(self._buffer[:end]).decode("latin-1").split("\r\n")
        del self._buffer[: end + len(_END)]
        head = _parse(lines)
        self._frame(head)
        return head

    def take_body(self) -> tuple[bytes, bool]:
        """The body bytes that are there, decoded, and whether the body is now complete."""
        if not self._chunked:
            assert self._left is not None
            piece = bytes(self._buffer[: self._left])
            del self._buffer[: len(piece)]
            self._left -= len(piece)
            return piece, self._left == 0
        out = bytearray()
        while (chunk := self._take_chunk()) is not None:
            if chunk == b"":
                return bytes(out), True
            out += chunk
        return bytes(out), False

    def _take_chunk(self) -> bytes | None:
        line_end = self._buffer.find(b"\r\n")
        if line_end < 0:
            return None
        text = bytes(self._buffer[:line_end]).split(b";")[0]
        try:
            size = int(text, 16)
        except ValueError:
            raise FramingError(f"chunk size {text!r}") from None
        if size == 0:
            return self._take_trailers(line_end)
        start, end = line_end + 2, line_end + 2 + size
        if len(self._buffer) < end + 2:
            return None
        if self._buffer[end : end + 2] != b"\r\n":
            raise FramingError("a chunk does not end in CRLF")
        chunk = bytes(self._buffer[start:end])
        del self._buffer[: end + 2]
        return chunk

    def _take_trailers(self, line_end: int) -> bytes | None:
        if self._buffer[line_end : line_end + 4] == _END:
            del self._buffer[: line_end + 4]
            return b""
        end = self._buffer.find(_END, line_end)
        if end < 0:
            return None
        del self._buffer[: end + 4]
        return b""

    def _frame(self, head: Head) -> None:
        lengths = {value for key, value in head.headers if key.lower() == "content-length"}
        coding = head.get("transfer-encoding")
        if coding is not None and lengths:
            raise FramingError("both Transfer-Encoding and Content-Length")
        if len(lengths) > 1:
            raise FramingError(f"several lengths: {sorted(lengths)}")
        if coding is not None and coding.lower() != "chunked":
            raise FramingError(f"transfer coding {coding!r}")
        self._chunked = coding is not None
        self._left = None if self._chunked else int(lengths.pop() if lengths else "0")


def _parse(lines: list[str]) -> Head:
    parts = lines[0].split(" ")
    if len(parts) != 3 or parts[2] not in ("HTTP/1.1", "HTTP/1.0"):
        raise FramingError(f"request line {lines[0]!r}")
    headers = []
    for line in lines[1:]:
        name, colon, value = line.partition(":")
        if not colon or not name or name != name.strip():
            raise FramingError(f"header line {line!r}")
        headers.append((name, value.strip(" \t")))
    return Head(parts[0], parts[1], parts[2][5:], headers)
