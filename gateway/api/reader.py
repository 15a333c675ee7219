"""Requests out of bytes.

Laws of this file:
- The parser is never fed past the end of a request. Outside a counted body it stops at every CRLFCRLF, and
  a request ends nowhere else; so the bytes behind a request stay raw, and nobody can smuggle a second
  request into the first.
- A head is bounded in bytes and in headers, and so is everything in a chunked body that is not data.
- What can be read in two ways is refused.
- A head that says byte by byte what the one before it said, but for its content-length, is not read again.
"""

from __future__ import annotations

import logging
from typing import Any, Final, NoReturn, Protocol
from urllib.parse import unquote, urlsplit

import httptools

from gateway.api.known_head import COUNTED, MOST_DIGITS, KnownHead, known_head
from gateway.core.errors import GatewayError

_END: Final = b"\r\n\r\n"
_CHUNKED: Final = -1
_SPECIAL: Final = frozenset({b"content-length", b"transfer-encoding", b"expect", b"host"})
_ASGI: Final = {"version": "3.0", "spec_version": "2.3"}
_log = logging.getLogger("slotgate.edge")


class Sink(Protocol):
    """Who is told what was read. The reader's own fields describe the request that is meant."""

    def on_request(self) -> None: ...
    def on_request_body(self, data: bytes) -> None: ...
    def on_request_end(self) -> None: ...


class RequestReader:
    """The requests of one connection, one after the other. Owns the parser and the request it is in.

    `notes` is for who reads the headers: what follows from them, but for the content-length. It is kept while the
    heads of the connection are alike.
    """

    __slots__ = (
        "_by_count",
        "_count_limit",
        "_fault",
        "_in_body",
        "_known",
        "_muted",
        "_parser",
        "_scope",
        "_seen",
        "_sink",
        "_size_limit",
        "_tail",
        "_uncounted",
        "begun",
        "body_left",
        "ended",
        "headers",
        "keep_alive",
        "method",
        "notes",
        "url",
        "version",
    )

    def __init__(self, sink: Sink, size_limit: int, count_limit: int) -> None:
        self._sink = sink
        self._size_limit = size_limit
        self._count_limit = count_limit
        self._parser = httptools.HttpRequestParser(self)
        self._fault: GatewayError | None = None  # what a callback raised; the parser wraps it
        self._muted = False  # the parser is being told again what it has already said
        self.url = b""
        self.headers: list[tuple[bytes, bytes]] = []
        self.method = ""
        self.version = ""
        self.keep_alive = False  # whether the client can go on using the connection
        self.notes: dict[Any, Any] = {}
        self._known: KnownHead | None = None
        self._scope: dict[str, Any] | None = None  # of the heads that are alike
        self.next()

    def next(self) -> None:
        """Forget the request that ended. Its url, method and headers stay until the next one begins."""
        self.begun = False  # the first byte of a request has come
        self.ended = False
        self.body_left = 0  # negative: chunked
        self._in_body = False
        self._by_count = False  # the body goes past the parser, which has not seen the head
        self._seen: dict[bytes, bytes] = {}  # the headers that are special here
        self._uncounted = 0  # bytes of the head, or of a chunked body since its last data
        self._tail = b""  # where a CRLFCRLF may have begun

    def close(self) -> None:
        """Break the reference cycles; nothing is fed any more."""
        del self._parser, self._sink

    @property
    def awaits_continue(self) -> bool:
        return self._seen.get(b"expect") == b"100-continue"

    def feed(self, data: bytes) -> int:
        """Read until the end of the request or of `data`; how many bytes were used.

        Raises GatewayError (invalid_request, headers_too_large, internal_error); useless after that.
        """
        at, size = 0, len(data)
        known = self._known
        if known is not None and not self.begun and data.startswith(known.before):
            at = self._again(known, data)
        while at < size and not self.ended:
            if self._by_count:
                at = self._count(data, at)
                continue
            stop = self._stop(data, at)
            excess = self._uncounted - self._size_limit
            if excess > 0 and not self._in_body:
                self._push(memoryview(data)[at : stop - excess])  # to know at least the path
                raise GatewayError("headers_too_large", self._too_large())
            self._push(data if stop - at == size else memoryview(data)[at:stop])
            if self._uncounted > self._size_limit:  # body data would have set it back
                raise GatewayError("headers_too_large", self._too_large())
            if self._in_body and not at and self._seen.keys() <= COUNTED:
                self._known = known_head(data[:stop], self.headers, self._size_limit)
            at = stop
        return at

    def scope(self, ends: dict[str, Any]) -> dict[str, Any]:
        """The ASGI scope of this request; `ends` is what its connection adds."""
        if self._scope is not None:
            return {**self._scope, "headers": self.headers}
        raw_path, _, query = self.url.partition(b"?")
        path = raw_path.decode("ascii")
        self._scope = {
            "type": "http",
            "asgi": _ASGI,
            "http_version": self.version,
            "method": self.method,
            "path": unquote(path) if "%" in path else path,
            "raw_path": raw_path,
            "query_string": query,
            "root_path": "",
            "headers": self.headers,
            **ends,
        }
        return self._scope.copy()

    # -- what the parser calls

    def on_message_begin(self) -> None:
        self.begun = True
        self.url = b""
        self.headers = []
        self.notes = {}
        self._known = self._scope = None

    def on_url(self, url: bytes) -> None:
        self.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_body:
            return  # a trailer: nobody here wants it, and it must not become a header
        name = name.lower()
        self.headers.append((name, value))
        if name in _SPECIAL:
            if name in self._seen and name != b"expect":
                self._fail(f"Header {name.decode()} occurs twice.")
            self._seen[name] = value.strip().lower()

    def on_headers_complete(self) -> None:
        if self._muted:
            return
        self.version = self._parser.get_http_version()
        self.method = self._parser.get_method().decode()
        self._check()
        # HTTP/1.0 never can: framed by closing.
        self.keep_alive = self.version == "1.1" and bool(self._parser.should_keep_alive())
        seen = self._seen
        if b"transfer-encoding" in seen:
            self.body_left = _CHUNKED
        elif b"content-length" in seen:
            self.body_left = int(seen[b"content-length"])
        self._in_body = True
        self._uncounted = 0
        self._muted = self._parser.should_upgrade()
        self._sink.on_request()

    def on_body(self, data: bytes) -> None:
        self._uncounted = 0
        self._sink.on_request_body(data)

    def on_message_complete(self) -> None:
        if not self._muted:
            self.ended = True
            self._sink.on_request_end()

    # -- helpers: a head that is known

    def _again(self, known: KnownHead, data: bytes) -> int:
        """Where the body begins, if `data` begins with the known head; else 0."""
        start = len(known.before)
        end = data.find(b"\r", start, start + MOST_DIGITS)
        digits = data[start:end]
        if end < 0 or not digits.isdigit() or not data.startswith(known.after, end):
            return 0
        self.begun = self._in_body = True
        self.body_left = int(digits)
        self._by_count = True
        self.headers = known.headers.copy()
        self.headers[known.place] = (b"content-length", digits)
        self._sink.on_request()
        if not self.body_left:
            self.on_message_complete()
        return end + len(known.after)

    def _count(self, data: bytes, at: int) -> int:
        """Body bytes of a request whose head was known; where they end in `data`."""
        stop = min(len(data), at + self.body_left)
        self.body_left -= stop - at
        self._sink.on_request_body(data[at:stop])
        if not self.body_left:
            self.on_message_complete()
        return stop

    # -- helpers: the parser

    def _stop(self, data: bytes, at: int) -> int:
        """Where the next piece for the parser has to end; also counts it."""
        size = len(data)
        if self._in_body and self.body_left >= 0:
            stop = min(size, at + self.body_left)
            self.body_left -= stop - at
            return stop
        found = data.find(_END, at)
        stop = found + 4 if found >= 0 else size
        if self._tail:  # only ever with at == 0
            across = (self._tail + data[:3]).find(_END)
            if across >= 0:
                found, stop = across, across + 4 - len(self._tail)
        self._tail = b"" if found >= 0 else (self._tail + data[-3:])[-3:]
        self._uncounted += stop - at
        return stop

    def _push(self, piece: bytes | memoryview) -> None:
        try:
            self._parser.feed_data(piece)
        except httptools.HttpParserUpgrade:
            self._resume_body()
        except httptools.HttpParserError as error:
            raise self._translated(error) from None
        if not self.begun:
            self._uncounted = 0  # empty lines before a request are no part of it

    def _resume_body(self) -> None:
        """Read the body of a request that asks for an upgrade, which is ignored here.

        The parser takes everything after such a head for another protocol. A new one is told the framing.
        """
        url, headers = self.url, self.headers
        framing = b"transfer-encoding: chunked"
        if self.body_left >= 0:
            framing = b"content-length: %d" % self.body_left
        self._parser = httptools.HttpRequestParser(self)
        self._parser.feed_data(b"POST / HTTP/1.1\r\n" + framing + _END)
        self.url, self.headers = url, headers
        self._muted = False
        if self.body_left == 0:
            self.on_message_complete()

    def _check(self) -> None:
        """Refuse what the parser lets pass and nobody should."""
        if self.version not in ("1.1", "1.0"):
            self._fail(f"HTTP/{self.version} is not spoken here; use HTTP/1.1.")
        if self.method == "CONNECT":
            self._fail("CONNECT is not served: this is no forward proxy.")
        if self.url[:1] != b"/" or b"#" in self.url:
            self.url = self._origin_form()
        if len(self.headers) > self._count_limit:
            self._fault = GatewayError(
                "headers_too_large", f"A request may have at most {self._count_limit} headers."
            )
            raise self._fault
        coding = self._seen.get(b"transfer-encoding", b"chunked")
        if coding != b"chunked" or (self.version == "1.0" and b"transfer-encoding" in self._seen):
            self._fail("The only transfer coding that is understood is chunked, with HTTP/1.1.")

    def _origin_form(self) -> bytes:
        """Path and query of an absolute-form target; the asterisk of OPTIONS as it is."""
        if self.url == b"*":
            return self.url
        try:
            parts = urlsplit(self.url)
        except ValueError:
            self._fail("The request target is not a valid URL.")
        path = parts.path or b"/"
        return path + b"?" + parts.query if parts.query else path

    def _fail(self, message: str) -> NoReturn:
        self._fault = GatewayError("invalid_request", message)
        raise self._fault

    def _translated(self, error: httptools.HttpParserError) -> GatewayError:
        if self._fault is not None:
            return self._fault
        if isinstance(error, httptools.HttpParserCallbackError):
            _log.error("a bug in reading a request", exc_info=error.__context__ or error)
            return GatewayError("internal_error", "The gateway failed to read this request.")
        return GatewayError("invalid_request", f"Invalid HTTP request: {error}.")

    def _too_large(self) -> str:
        part = "Trailers" if self._in_body else "Request headers"
        return f"{part} are larger than {self._size_limit >> 10} KiB (limits.header_kib)."
