"""An engine's refusal on its way to the client: read while it is still small and whole, and passed on as it is.

Law of this file: the status and the text are the engine's. What may change is the `code` of a prompt that is too long
(`core.overflow`) and a missing Retry-After.
"""

from __future__ import annotations

from typing import Final

from gateway.core.errors import Headers
from gateway.core.overflow import MOST, with_code
from gateway.runtime.answer import NACKS, Answer
from gateway.runtime.forward import refusal
from gateway.runtime.upstream import UpstreamError

READ: Final = (400, 404, 405, 501)
USUAL_RETRY_S: Final = b"5"  # an engine that says no more than "busy"


class Refused:
    """A response whose first bytes have been read already."""

    __slots__ = ("_rest", "body", "headers", "status")

    def __init__(self, response: Answer, body: bytes, headers: Headers) -> None:
        self._rest = response
        self.body = body
        self.status = response.status
        self.headers = headers

    @property
    def complete(self) -> bool:
        return not self.body and self._rest.complete

    async def read(self) -> bytes:
        if self.body:
            data, self.body = self.body, b""
            return data
        return b"" if self._rest.complete else await self._rest.read()


async def restated(response: Answer) -> Answer:
    """The response as the client gets it. Raises GatewayError when it breaks before it could be read."""
    if response.status in NACKS:
        return Refused(response, b"", _with_retry_after(response.headers))
    if response.status not in READ:
        return response
    body = b""
    try:
        while len(body) <= MOST and (data := await response.read()):
            body += data
    except UpstreamError as error:
        raise refusal(error) from error
    headers = list(response.headers)
    if response.status == 400 and len(body) <= MOST:
        told = with_code(body)
        if told is not body:
            body = told
            headers = [pair for pair in headers if pair[0] != b"content-length"]
            headers.append((b"content-length", b"%d" % len(body)))
    return Refused(response, body, headers)


def _with_retry_after(headers: Headers) -> Headers:
    if any(name == b"retry-after" for name, _ in headers):
        return list(headers)
    return [*headers, (b"retry-after", USUAL_RETRY_S)]
