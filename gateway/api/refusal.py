"""An answer that the edge gives by itself, as bytes: the app has not seen the request, or failed at it."""

from __future__ import annotations

from collections.abc import Collection
from http import HTTPStatus
from typing import Final
from uuid import uuid4

from gateway.core.errors import Family, GatewayError, Headers, body_of, headers_of, status_of
from gateway.core.headers import own_request_id
from gateway.core.origins import shared_with
from gateway.core.routes import family_of, meaning_of


def _status_line(status: int) -> bytes:
    try:
        phrase = HTTPStatus(status).phrase
    except ValueError:  # 529 and its like have no name
        phrase = ""
    return f"HTTP/1.1 {status} {phrase}\r\n".encode()


STATUS_LINES: Final = {status: _status_line(status) for status in range(200, 600)}


def refusal(
    error: GatewayError,
    target: bytes,
    headers: Headers,
    origins: Collection[str] = (),
    *,
    is_head: bool = False,
) -> bytes:
    """The whole response, which also says that the connection closes.

    `target` is the request target as far as it is known: it decides in which family's form the error is. `headers`
    are those that have come, with names in lower case: the client's own id for the request may be among them, and the
    web page that asks, which may read the answer if it is one of `origins`.
    """
    path = meaning_of(target.partition(b"?")[0], key_in_path=True).path
    family = family_of(path)
    request_id = own_request_id(headers) or f"req_{uuid4().hex}"
    status = status_of(error, family)
    body = body_of(error, family, request_id)
    lines = [STATUS_LINES[status]]
    lines += (b"%b: %b\r\n" % pair for pair in headers_of(error) if pair[0] != b"connection")
    origin = next((value for name, value in headers if name == b"origin"), None)
    lines += (b"%b: %b\r\n" % pair for pair in shared_with(origin, origins))
    lines.append(b"x-request-id: %b\r\n" % request_id.encode())
    if family is Family.ANTHROPIC:
        lines.append(b"request-id: %b\r\n" % request_id.encode())
    lines.append(b"content-type: application/json\r\ncontent-length: %d\r\n" % len(body))
    lines.append(b"connection: close\r\n\r\n")
    return b"".join(lines) + (b"" if is_head else body)
