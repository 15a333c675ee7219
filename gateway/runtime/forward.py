"""One request to its backend: build what goes out, try again where it cannot have run, hand over the response.

Law 4: another backend is tried only while no byte of the answer came and the request cannot have run: connection
refused, a stale pooled connection, an engine's 503 or 429. At most once per backend, within one deadline.
Law 7: a 503 or 429 is back-pressure, not a fault; broken connections and runs of 5xx are.
"""

from __future__ import annotations

from contextlib import AsyncExitStack
from dataclasses import dataclass
from secrets import token_hex
from types import TracebackType

from gateway.core.catalog import Pool
from gateway.core.errors import GatewayError, retry_after
from gateway.core.headers import to_upstream
from gateway.core.request import drop_top_level, replace_model
from gateway.runtime.backends import Backends
from gateway.runtime.dispatcher import Place
from gateway.runtime.exchange import Exchange
from gateway.runtime.metrics import Metrics
from gateway.runtime.observe import Record
from gateway.runtime.upstream import Deadlines, Response, UpstreamError

NACKS = (429, 503)
FAULTS = (500, 502, 504)


@dataclass(frozen=True, slots=True)
class Outgoing:
    """What is to be sent, whichever backend it will be."""

    exchange: Exchange
    body: bytes
    model: str | None  # as the client wrote it
    pool: Pool
    deadlines: Deadlines
    keep_id_slot: bool

    def body_for(self, backend: str) -> bytes:
        """The client's bytes; only an alias's model value is replaced, and a pinned slot cut out."""
        body = self.body
        if self.pool.is_alias and self.model is not None:
            expected = self.pool.ids[backend]
            if expected != self.model:
                body = replace_model(body, expected)
        if b"id_slot" in body and not self.keep_id_slot:
            body = drop_top_level(body, b"id_slot")
        return body


class Forward:
    """`async with Forward(...) as response`: the first backend that takes the request."""

    def __init__(
        self,
        outgoing: Outgoing,
        place: Place,
        record: Record,
        backends: Backends,
        metrics: Metrics,
    ) -> None:
        self._outgoing = outgoing
        self._place = place
        self._record = record
        self._backends = backends
        self._metrics = metrics
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Response:
        try:
            return await self._attempt_all()
        except BaseException:
            await self._stack.aclose()
            raise

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if value is not None and isinstance(value.__cause__, UpstreamError):
            self._fault(self._place.backend, value.__cause__)  # it broke while it was relayed
        await self._stack.__aexit__(kind, value, traceback)

    async def _attempt_all(self) -> Response:
        """Attempt after attempt, until an answer stands that is passed on.

        1 it answered: pass it on, unless it says busy and another backend may be tried
        2 it cannot have run: another backend; none left: 502
        3 it may have run: 502 or 504, and never again
        """
        place = self._place
        while True:
            try:
                response = await self._attempt(place)
            except UpstreamError as error:
                self._fault(place.backend, error)
                if error.may_have_run:
                    raise refusal(error) from error
                self._metrics.retries[place.backend, error.kind] += 1
                await place.elsewhere()
                continue
            if response.status not in NACKS:
                if response.status in FAULTS:
                    self._fault(place.backend, response.status)
                return response
            if not place.may_go_elsewhere():
                if all(name != b"retry-after" for name, _ in response.headers):
                    response.headers.extend(retry_after(place.again_s()))
                return response
            self._metrics.retries[place.backend, "busy"] += 1
            await self._stack.aclose()
            await place.elsewhere()

    async def _attempt(self, place: Place) -> Response:
        """Send it to the backend of its place."""
        backend, exchange = place.backend, self._outgoing.exchange
        self._record.placed(place)
        self._backends.touch(backend)
        headers = to_upstream(
            exchange.headers,
            accept_encoding_identity=True,
            request_id=b"sg-" + token_hex(12).encode(),
        )
        call = self._backends.upstreams[backend].open(
            exchange.method,
            exchange.path,
            exchange.query,
            headers,
            self._outgoing.body_for(backend),
            self._outgoing.deadlines,
        )
        return await self._stack.enter_async_context(call)

    def _fault(self, backend: str, fault: UpstreamError | int) -> None:
        kind = fault.kind if isinstance(fault, UpstreamError) else "status_5xx"
        self._metrics.backend_errors[backend, kind] += 1
        self._backends.on_fault(backend, fault)


def refusal(error: UpstreamError) -> GatewayError:
    """A broken attempt as the client sees it."""
    if error.kind in ("first_byte_timeout", "between_bytes_timeout"):
        return GatewayError(
            "upstream_timeout",
            "The backend did not answer in time (timeouts in the gateway's configuration).",
        )
    key = "upstream_failed_ran" if error.may_have_run else "upstream_failed"
    return GatewayError(key, "The backend could not be reached, or failed before its answer began.")
