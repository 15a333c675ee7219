"""The line that every relayed request follows, from its headers to its last byte.

    authenticate ─► parse ─► admit and pick ─► forward ─► relay ─► observe ─► release

Read `Pipeline.serve` top to bottom. Whatever a block takes, the same block gives back, on every way a request can
end: answered, refused, broken, or left by its client.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from datetime import UTC, datetime

from gateway.core.catalog import NONE, OTHER, Catalog, Pool
from gateway.core.config import Config
from gateway.core.dispatch import Offer
from gateway.core.errors import GatewayError
from gateway.core.keys import Key, KeyRing, Refusal, digests_in, hash_of
from gateway.core.lacking import Lacking
from gateway.core.origins import refuse_pages
from gateway.core.prefix import EMPTY, Chain, chain_of, conversation_of, session_in
from gateway.core.reading import SHOW, read_request
from gateway.core.request import ParsedRequest, parse
from gateway.core.routes import Route
from gateway.runtime.answer import Answer
from gateway.runtime.backends import Backends
from gateway.runtime.body import BodyLimit
from gateway.runtime.disconnect import ClientPresent
from gateway.runtime.dispatcher import Dispatcher
from gateway.runtime.errand import Errand, by_load, respond_estimate
from gateway.runtime.exchange import Exchange
from gateway.runtime.forward import Forward, Outgoing
from gateway.runtime.keepalive import EarlyHead
from gateway.runtime.log import LineLog
from gateway.runtime.metrics import Metrics
from gateway.runtime.observe import Record
from gateway.runtime.quota import Quota
from gateway.runtime.refused import Refused, restated
from gateway.runtime.relay import relay
from gateway.runtime.upstream import Deadlines

NOTHING = nullcontext()
ANONYMOUS = Key(name="anonymous", hash=b"", admin=True)  # no keys at all: everybody is the operator
COUNT_S = 1.0  # for an engine to count tokens; then they are estimated
GUEST = Key(name="anonymous", hash=b"")  # there are keys, and `auth.anonymous` lets others in


@dataclass(slots=True, kw_only=True)
class Pipeline:
    """The parts that a request meets, in order. Built by `app`, which owns them."""

    config: Config
    keys: Callable[[], KeyRing | None]  # None: keyless
    quota: Quota
    backends: Backends
    dispatcher: Dispatcher
    metrics: Metrics
    log: LineLog
    draining: bool = False
    lacking: Lacking = field(default_factory=Lacking)
    chain_of: Callable[..., Chain] = chain_of

    @property
    def deadlines(self) -> Deadlines:
        times = self.config.timeouts
        return Deadlines(times.connect_s, times.first_byte_s, times.between_bytes_s)

    async def serve(self, exchange: Exchange, route: Route, present: ClientPresent) -> None:
        """Carry one request from its headers to its last byte. Raises GatewayError for `exchange.refuse`."""
        with Record(exchange, self.metrics, self.log.request) as record, present:
            key = self.authenticate(exchange)
            record.key = key.name
            exchange.check_body(limit := self._limit)
            with self.quota.of(key, record) as account:
                self._refuse_by_headers(key, route, record)
                body = await exchange.body(limit)
                present.body_read()
                request = self._read(exchange, route, body)
                pool = self._pool(request, key, route, record)
                account.charge(self.dispatcher.now(), request)
                with self._early_head(exchange, request, route):
                    offer = self._offer(request, key, pool, exchange, route)
                    outgoing = self._outgoing(route, pool, request, body, record)
                    async with (
                        self.dispatcher.place(offer) as place,
                        Forward(outgoing, place, record, self.backends, self.metrics) as response,
                    ):
                        del body, request, outgoing  # the prompt, while its answer may take long
                        answer = response
                        if response.status >= 400:
                            answer = await self._heard(response, place.backend, route)
                        await relay(answer, exchange, route, record)
                        place.finished(served=response.status < 400, used=record.used)

    async def serve_free(self, exchange: Exchange, route: Route, present: ClientPresent) -> None:
        """The shorter line of what makes no tokens: no permit, no waiting, none of a key's limits."""
        with Record(exchange, self.metrics, self.log.request) as record, present:
            key = self.authenticate(exchange)
            record.key = key.name
            exchange.check_body(limit := self._limit)
            if self.draining:
                raise _draining()
            body = await exchange.body(limit)
            present.body_read()
            request = self._read(exchange, route, body)
            pool = self._pool(request, key, route, record)
            outgoing = self._outgoing(route, pool, request, body, record)
            order = by_load(pool, self.dispatcher.dispatch.backends)
            patience_s = COUNT_S if route.estimated else None
            async with Errand(outgoing, order, record, self.backends, patience_s) as response:
                if response is None:
                    await respond_estimate(exchange, request)
                else:
                    answer = await self._heard(response, record.backend, route)
                    await relay(answer, exchange, route, record)

    # ------------------------------------------------------------------ the steps

    def authenticate(self, exchange: Exchange, *, admin: bool = False) -> Key:
        """Whose request this is. Raises GatewayError: invalid_api_key, admin_required, origin_not_allowed."""
        ring = self.keys()
        if ring is None:
            refuse_pages(exchange.headers, self.config.cors.origins)
            return ANONYMOUS
        in_path = exchange.path_key  # then headers are not looked at
        digests = (hash_of(in_path),) if in_path else exchange.of_head(digests_in)
        found = ring.find(digests, _utc_now)
        if isinstance(found, Refusal):
            if found is Refusal.ABSENT and not (admin or self.config.needs_key):
                refuse_pages(exchange.headers, self.config.cors.origins)
                return GUEST
            raise found.error
        exchange.key = found
        if admin and not found.admin:
            raise GatewayError("admin_required", "This needs an admin key.")
        return found

    @property
    def _limit(self) -> BodyLimit:
        return BodyLimit(self.config.limits.body_bytes, "limits.body_mib")

    def _refuse_by_headers(self, key: Key, route: Route, record: Record) -> None:
        """What needs no body: draining, and every pool of this key and path full with nobody to give way."""
        if self.draining:
            raise _draining()
        dispatch = self.dispatcher.dispatch
        if not dispatch.queue.waiting and dispatch.limits.queue != 0:  # then nobody can be full
            return
        catalog = self._catalog(route)
        pools, names = catalog.pools, catalog.names(key.models)
        refused = dispatch.full_for(
            self.dispatcher.now(), key.name, {pools[name].backends for name in names}
        )
        if refused is not None:
            record.model = names[0] if len(names) == 1 else NONE
            raise self.dispatcher.refusal(refused)

    def _pool(self, request: ParsedRequest, key: Key, route: Route, record: Record) -> Pool:
        """The backends that may serve it. Raises GatewayError: model_not_found, model_not_allowed, no_backend."""
        catalog = self._catalog(route)
        if request.model_present and request.model is None:
            record.model = OTHER
            raise GatewayError("model_not_found", "`model` is not a model's name.", "model")
        try:
            pool = catalog.resolve(request.model, key.models, self.backends.is_up)
        except GatewayError:
            if request.model_present:
                record.model = catalog.label(request.model)
            raise
        record.model = pool.name
        lacking = self.lacking.backends(self.dispatcher.now(), route.path)
        return pool.having(route.path, catalog.listings, lacking, strict=route.estimated)

    def _catalog(self, route: Route) -> Catalog:
        """All models; of an engine's own path those that such engines serve."""
        catalog = self.backends.catalog
        return catalog.serving(route.path) if route.native else catalog

    @staticmethod
    def _read(exchange: Exchange, route: Route, body: bytes) -> ParsedRequest:
        if route.method == "POST" and not route.form and route.path != SHOW:
            return parse(body, route.wire)
        content_type = (exchange.header(b"content-type") or b"").decode("latin-1")
        return read_request(route, body, content_type, exchange.query)

    async def _heard(self, response: Answer, backend: str | None, route: Route) -> Answer:
        """The answer as it is passed on, and what it says of the path."""
        answer = await restated(response)
        if isinstance(answer, Refused) and backend is not None:
            now = self.dispatcher.now()
            self.lacking.hear(now, backend, route.path, answer.status, answer.body)
        return answer

    def _early_head(
        self, exchange: Exchange, request: ParsedRequest, route: Route
    ) -> AbstractContextManager[object]:
        """For a stream whose engine stays silent for long."""
        after_s = self.config.timeouts.early_headers_s
        if not (request.stream and after_s):
            return NOTHING
        return EarlyHead(exchange, route.wire, after_s)

    def _offer(
        self, request: ParsedRequest, key: Key, pool: Pool, exchange: Exchange, route: Route
    ) -> Offer:
        makes_text = route.makes_text  # what does not leaves nothing in a cache
        pieces = request.pieces if makes_text and self.config.routing.affinity else ()
        return Offer(
            ticket=self.dispatcher.ticket(),
            key=key.name,
            pool=pool.backends,
            model=pool.name,
            permits=request.permits,
            weight=key.weight,
            batch=key.priority == "batch",
            prompt_bytes=request.prompt_bytes,
            conversation=conversation_of(
                exchange.of_head(session_in), request.prompt_cache_key, pieces
            )
            if len(pool.backends) > 1  # else there is nothing to choose by it
            else 0,
            chain=self.chain_of(pieces, pool.name) if pieces else EMPTY,
            max_tokens=request.max_tokens if makes_text else 0,
            ids=pool.ids,
        )

    def _outgoing(
        self, route: Route, pool: Pool, request: ParsedRequest, body: bytes, record: Record
    ) -> Outgoing:
        return Outgoing(
            exchange=record.exchange,
            route=route,
            body=body,
            model=request.model,
            model_span=request.model_span,
            pins_slot=request.pins_slot and not self.config.routing.keep_id_slot,
            pool=pool,
            deadlines=self.deadlines,
        )


def _utc_now() -> datetime:
    return datetime.now(UTC)


def _draining() -> GatewayError:
    return GatewayError(
        "draining",
        "Server overloaded: the gateway is shutting down. Please try again in 2s.",
        retry_after_s=2.0,
    )
