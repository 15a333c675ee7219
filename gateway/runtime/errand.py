"""A request that makes no tokens, to the first backend that answers: without a permit, never queued.

Law of this file: it repeats nothing that an engine has answered, and tries each backend once. Such requests may be
repeated after any break, for they change nothing in an engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from types import TracebackType

from gateway.core.catalog import Pool
from gateway.core.errors import GatewayError
from gateway.core.estimate import estimated_tokens
from gateway.core.fleet import Backend
from gateway.core.headers import to_upstream
from gateway.core.request import ParsedRequest
from gateway.runtime.answer import NACKS
from gateway.runtime.backends import Backends
from gateway.runtime.exchange import Exchange
from gateway.runtime.forward import Outgoing, attempt_id, refusal
from gateway.runtime.observe import Record
from gateway.runtime.upstream import Response, UpstreamError


class Errand:
    """`async with Errand(...) as response`. Raises GatewayError: no_backend, upstream_failed, upstream_timeout.

    With `patience_s` (seconds) the response is None in those cases, and when none has begun in that time.
    """

    def __init__(
        self,
        outgoing: Outgoing,
        order: Sequence[str],
        record: Record,
        backends: Backends,
        patience_s: float | None = None,
    ) -> None:
        self._outgoing = outgoing
        self._order = order
        self._record = record
        self._backends = backends
        self._patience_s = patience_s
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Response | None:
        try:
            async with asyncio.timeout(self._patience_s):
                return await self._first_answer()
        except (GatewayError, TimeoutError):
            await self._stack.aclose()
            self._record.backend = None
            if self._patience_s is None:
                raise
            return None
        except BaseException:
            await self._stack.aclose()
            raise

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._stack.__aexit__(kind, value, traceback)

    async def _first_answer(self) -> Response:
        last: UpstreamError | None = None
        for number, backend in enumerate(self._order, 1):
            try:
                response = await self._ask(backend)
            except UpstreamError as error:
                self._backends.on_fault(backend, error)
                last = error
                continue
            if response.status not in NACKS or number == len(self._order):
                return response
            await self._stack.aclose()
        if last is None:
            raise GatewayError(
                "no_backend",
                "Server overloaded: no backend of this model is up. Please try again in 5s.",
                retry_after_s=5.0,
            )
        raise refusal(last) from last

    async def _ask(self, backend: str) -> Response:
        outgoing, exchange = self._outgoing, self._outgoing.exchange
        self._record.backend = backend
        headers = [*exchange.of_head(to_upstream), attempt_id()]
        call = self._backends.upstream(backend).open(
            "GET" if exchange.method == "HEAD" else exchange.method,
            exchange.path,
            outgoing.query_for(backend),
            headers,
            outgoing.body_for(backend),
            outgoing.deadlines,
        )
        return await self._stack.enter_async_context(call)


def by_load(pool: Pool, backends: Mapping[str, Backend]) -> list[str]:
    """Where to ask what takes no permit: awake and least busy first. Those that are down are left out."""
    up = [backends[name] for name in pool.backends if name in backends]
    up = [backend for backend in up if backend.is_hopeful]
    up.sort(key=lambda one: (not one.takes_work, one.in_flight / one.slots, one.name))
    return [one.name for one in up]


async def respond_estimate(exchange: Exchange, request: ParsedRequest) -> None:
    """A token count that no engine has made, and says so."""
    body = b'{"input_tokens":%d}' % estimated_tokens(request)
    headers = [(b"content-type", b"application/json"), (b"x-slotgate-estimated", b"true")]
    await exchange.respond(200, headers, body)
