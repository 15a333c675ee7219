"""The body of a request as it arrives: refused by its headers alone where they say enough, then read under the limit.

Law of this file: nothing is read of a body that will be refused, and never more than the limit. A body costs its own
size and one read; it grows in place, and is handed out without a copy.
"""

from __future__ import annotations

import io

import msgspec
from starlette.types import Receive

from gateway.core.errors import GatewayError, Headers
from gateway.runtime.disconnect import ClientGone
from gateway.runtime.inflate import codings_of, inflate


class BodyLimit(msgspec.Struct, frozen=True):
    """The most bytes that a body may have, also decoded, and the setting that says so."""

    size: int
    setting: str

    def error(self) -> GatewayError:
        return GatewayError(
            "body_too_large",
            f"The request body is larger than {self.size / 1048576:g} MiB "
            f"({self.setting} in the gateway's configuration).",
        )


def codings_in(headers: Headers) -> tuple[str, ...]:
    """The content codings of the body. Raises GatewayError (415)."""
    encoded = [value for name, value in headers if name == b"content-encoding"]
    return codings_of(encoded) if encoded else ()


async def receive_all(receive: Receive, limit: BodyLimit) -> bytes:
    """The whole body, as it was sent. Raises GatewayError(body_too_large), or ClientGone."""
    message = await receive()
    first: bytes = message.get("body", b"")
    if message["type"] == "http.request" and not message.get("more_body", False):
        if len(first) > limit.size:
            raise limit.error()
        return first
    body = io.BytesIO()
    while True:
        if message["type"] == "http.disconnect":
            raise ClientGone
        body.write(message.get("body", b""))
        if body.tell() > limit.size:
            raise limit.error()
        if not message.get("more_body", False):
            return body.getvalue()
        message = await receive()


async def decoded(body: bytes, codings: tuple[str, ...], limit: BodyLimit) -> bytes:
    """The body without its content codings. Raises GatewayError: body_too_large, invalid_json."""
    return await inflate(body, codings, limit.size, limit.error)
