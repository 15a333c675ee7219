"""Which headers cross the gateway, in each direction.

Law of this file: nothing that belongs to one hop, names the client's place or holds a client's secret reaches a
backend; nothing that describes the backend's hop or competes with what the gateway says itself reaches a client.
Names are lower-case, as ASGI and the upstream client give them. Cases B057, B070, B072, B076, B077, B111.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final
from urllib.parse import unquote_to_bytes

Header = tuple[bytes, bytes]

MAX_REQUEST_ID: Final = 128  # characters

# RFC 9110 section 7.6.1, and what older peers treat likewise.
_HOP: Final = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authentication-info",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
        b"http2-settings",
    }
)

_CREDENTIALS: Final = frozenset(
    {b"authorization", b"x-api-key", b"api-key", b"x-goog-api-key", b"cookie", b"cookie2"}
)

_CREDENTIAL_PARAMETERS: Final = frozenset(
    {b"key", b"api_key", b"api-key", b"apikey", b"x-api-key", b"access_token"}
)

_NOT_UPSTREAM: Final = (
    _HOP
    | _CREDENTIALS
    | {
        # The backend has its own authority, and some engines refuse foreign ones and anything from a web page.
        b"host",
        b"origin",
        b"referer",
        # The body is decoded and framed anew.
        b"content-length",
        b"content-encoding",
        b"expect",
        # Written by us.
        b"accept-encoding",
        b"x-request-id",
        # Who the client is, is ours to know.
        b"forwarded",
        b"x-real-ip",
        # To llama-server this means: go on generating when the client has left.
        b"x-conversation-id",
        # vLLM would let the client choose the replica.
        b"x-data-parallel-rank",
    }
)
_NOT_UPSTREAM_PREFIXES: Final = (b"sec-", b"proxy-", b"x-forwarded-", b"access-control-request-")

_NOT_DOWNSTREAM: Final = _HOP | {
    b"x-request-id",
    b"request-id",
    b"alt-svc",  # would lead clients past the gateway
}
_NOT_DOWNSTREAM_PREFIXES: Final = (b"access-control-", b"x-slotgate-")

_USUAL_OPTIONS: Final = frozenset({b"close", b"keep-alive", b""})


def own_request_id(headers: Iterable[Header]) -> str | None:
    """The id that the client gave its request, if it is at most 128 printable characters."""
    for name, value in headers:
        if name == b"x-request-id":
            if not (0 < len(value) <= MAX_REQUEST_ID and value.isascii()):
                return None
            text = value.decode()
            return text if text.isprintable() else None
    return None


def to_upstream(
    headers: Iterable[Header], *, accept_encoding_identity: bool = False
) -> list[Header]:
    """The client's headers as a backend may see them. An id of the attempt is for the caller to add.

    `accept_encoding_identity`: generation paths, whose answers we look into; elsewhere the client's own wish stands,
    or identity if it has none. Host, Authorization of the backend and Content-Length are added by the upstream client.
    """
    out: list[Header] = []
    named: set[bytes] = set()
    codings = b""
    for header in headers:
        name = header[0]
        if name in _NOT_UPSTREAM:
            if name == b"connection":
                named |= _options(header[1])
            elif name == b"accept-encoding":
                codings = codings + b", " + header[1] if codings else header[1]
        elif not name.startswith(_NOT_UPSTREAM_PREFIXES):
            out.append(header)
    if named:
        out = [header for header in out if header[0] not in named]
    out.append(
        (b"accept-encoding", b"identity" if accept_encoding_identity or not codings else codings)
    )
    return out


def to_downstream(
    headers: Iterable[Header], *, without: frozenset[bytes] = frozenset()
) -> list[Header]:
    """A backend's headers as the client may see them; `without` names those that the gateway sets itself.

    Content-Length stays, unless the body came chunked: then the two may not agree (RFC 9112 section 6.3).
    """
    out: list[Header] = []
    named = without
    for header in headers:
        name = header[0]
        if name in _NOT_DOWNSTREAM:
            if name == b"connection":
                named |= _options(header[1])
            elif name == b"transfer-encoding":
                named |= {b"content-length"}
        elif not name.startswith(_NOT_DOWNSTREAM_PREFIXES):
            out.append(header)
    if named:
        out = [header for header in out if header[0] not in named]
    return out


def query_to_upstream(query: bytes) -> bytes:
    """The query string without parameters that hold a client's key; all else byte for byte."""
    if not query:
        return query
    kept = [part for part in query.split(b"&") if not _is_credential(part)]
    return b"&".join(kept)


def _options(value: bytes) -> set[bytes]:
    """Header names listed in a Connection header. Never those that frame or type the message."""
    options = {option.strip().lower() for option in value.split(b",")}
    return options - _USUAL_OPTIONS - {b"content-type", b"content-length", b"accept-encoding"}


def _is_credential(part: bytes) -> bool:
    return unquote_to_bytes(part.partition(b"=")[0]).lower() in _CREDENTIAL_PARAMETERS
