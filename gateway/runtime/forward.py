"""One request to its backend: build what goes out, try again where it cannot have run, hand over the response.

Law 4: another backend is tried only while no byte of the answer came and the request cannot have run: connection
refused, a stale pooled connection, an engine's 503 or 429. At most once per backend, within one deadline; only an
engine that says it loads its model is waited for, and asked again when its probe says that it has it.
Law 7: a 503 or 429 is back-pressure, not a fault; broken connections and runs of 5xx are.
"""

from __future__ import annotations

from functools import partial
from random import getrandbits
from types import TracebackType

import msgspec

from gateway.core.catalog import Pool
from gateway.core.errors import GatewayError, retry_after
from gateway.core.headers import query_to_upstream, to_upstream
from gateway.core.json_scan import Span
from gateway.core.overflow import CacheFullError
from gateway.core.reading import query_with_model, with_model
from gateway.core.request import drop_top_level
from gateway.core.routes import Route
from gateway.runtime.answer import Answer, Meaning, judged
from gateway.runtime.backends import Backends
from gateway.runtime.dispatcher import Place
from gateway.runtime.exchange import Exchange
from gateway.runtime.metrics import Metrics
from gateway.runtime.observe import Record
from gateway.runtime.upstream import Call, Deadlines, Response, UpstreamError
from gateway.runtime.upstream_error import TIMEOUTS

FAULTS = (500, 502, 504)
_for_text = partial(to_upstream, accept_encoding_identity=True)


class Outgoing(msgspec.Struct, frozen=True, eq=False):
    """What is to be sent, whichever backend it will be."""

    exchange: Exchange
    route: Route
    body: bytes
    model: str | None  # as the client wrote it
    model_span: Span | None  # where in the body
    pins_slot: bool  # it has a top-level `id_slot`
    pool: Pool
    deadlines: Deadlines

    @property
    def content_type(self) -> str:
        return (self.exchange.header(b"content-type") or b"").decode("latin-1")

    def body_for(self, backend: str) -> bytes:
        """The client's bytes; only an alias's model value is replaced, and a pinned slot cut out."""
        body = self.body
        expected = self._other_name(backend) if self.pool.is_alias else None
        if expected is not None:
            body = with_model(self.route, body, self.content_type, expected, self.model_span)
        return drop_top_level(body, "id_slot") if self.pins_slot else body

    def query_for(self, backend: str) -> bytes:
        """The client's query without its key; a GET names its model there."""
        query = self.exchange.query
        if query:
            query = query_to_upstream(query)
        expected = self._other_name(backend) if self.route.method == "GET" else None
        return query if expected is None else query_with_model(query, expected)

    def _other_name(self, backend: str) -> str | None:
        """What this backend calls the model, where the client said an alias."""
        if not self.pool.is_alias or self.model is None:
            return None
        expected = self.pool.ids[backend]
        return expected if expected != self.model else None


class Forward(msgspec.Struct, eq=False):
    """`async with Forward(...) as response`: the first backend that takes the request."""

    _outgoing: Outgoing
    _place: Place
    _record: Record
    _backends: Backends
    _metrics: Metrics
    _call: Call | None = None  # of the last attempt, as is the response
    _response: Response | None = None

    async def __aenter__(self) -> Answer:
        try:
            while (answer := await self._attempt()) is None:
                pass
        except BaseException:
            self._hang_up()
            raise
        finally:
            del self._outgoing  # a long answer must not keep a long prompt in memory
        return answer

    async def __aexit__(
        self,
        _kind: type[BaseException] | None,
        value: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        if value is not None and isinstance(value.__cause__, UpstreamError):
            self._fault(self._place.backend, value.__cause__)  # it broke while it was relayed
        elif isinstance(value, CacheFullError):
            self._backends.on_cache_full(self._place.backend)
            self._place.finished(served=False)
        elif value is not None and self._response is not None and self._response.ended:
            self._place.finished(served=False)  # whatever became of it here, the engine is done
        self._hang_up()

    async def _attempt(self) -> Answer | None:
        """Ask the backend of its place: the answer that is passed on, or None when another attempt is to be made.

        1 it cannot have run: another backend; none left: 502
        2 it may have run: 502 or 504, and never again
        3 it answered that it is busy, or loads its model: to whom may take it, or passed on when nobody may
        4 it answered: that is passed on
        """
        place = self._place
        try:
            self._call = call = self._prepared(place)
            self._response = response = await call.__aenter__()
            engine = self._backends.engine_of(place.backend)
            meaning, answer = await judged(response, engine)
        except UpstreamError as error:
            self._fault(place.backend, error)
            if error.may_have_run:
                raise refusal(error) from error
            self._metrics.retries[place.backend, error.kind] += 1
            await place.elsewhere()
            return None
        if response.replayed:
            self._metrics.retries[place.backend, "stale"] += 1
        if meaning == "answer":
            if answer.status in FAULTS:
                self._fault(place.backend, answer.status)
            return answer
        if meaning == "busy":
            place.pressed()
        if not (place.may_wait() if meaning == "loading" else place.may_go_elsewhere()):
            return _with_retry_after(answer, place)
        await self._go_on(meaning)
        return None

    async def _go_on(self, meaning: Meaning) -> None:
        """Nothing ran: to another backend, or to this one once it has its model."""
        place = self._place
        self._metrics.retries[place.backend, meaning] += 1
        self._hang_up()
        if meaning == "loading":
            self._backends.on_loading(place.backend)
        await place.elsewhere(loading=meaning == "loading")

    def _prepared(self, place: Place) -> Call:
        """What is sent to the backend of its place."""
        backend, outgoing, exchange = place.backend, self._outgoing, self._outgoing.exchange
        self._record.placed(place)
        self._backends.touch(backend)
        known = exchange.of_head(_for_text if outgoing.route.makes_text else to_upstream)
        headers = [*known, attempt_id()]
        return self._backends.upstream(backend).open(
            exchange.method,
            exchange.path,
            outgoing.query_for(backend),
            headers,
            outgoing.body_for(backend),
            outgoing.deadlines,
        )

    def _hang_up(self) -> None:
        """Give the connection of the last attempt back, whatever became of it."""
        call, self._call = self._call, None
        if call is not None:
            call.close()

    def _fault(self, backend: str, fault: UpstreamError | int) -> None:
        kind = fault.kind if isinstance(fault, UpstreamError) else "status_5xx"
        self._metrics.backend_errors[backend, kind] += 1
        self._backends.on_fault(backend, fault)


def attempt_id() -> tuple[bytes, bytes]:
    """The header that names one attempt, fresh for each: engines key running requests by it."""
    return b"x-request-id", b"sg-%024x" % getrandbits(96)  # unique is enough


def _with_retry_after(answer: Answer, place: Place) -> Answer:
    if all(name != b"retry-after" for name, _ in answer.headers):
        answer.headers = [*answer.headers, *retry_after(place.again_s())]
    return answer


def refusal(error: UpstreamError) -> GatewayError:
    """A broken attempt as the client sees it."""
    if error.kind in TIMEOUTS:
        return GatewayError(
            "upstream_timeout",
            "The backend did not answer in time (timeouts in the gateway's configuration).",
        )
    key = "upstream_failed_ran" if error.may_have_run else "upstream_failed"
    return GatewayError(key, "The backend could not be reached, or failed before its answer began.")
