"""What becomes known of one request while it passes, and where it is told when it ends: metrics and the log line."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from types import TracebackType
from typing import Final, Self

from gateway.core.catalog import NONE
from gateway.core.errors import GatewayError, Headers, Outcome, status_of
from gateway.core.figures import Usage
from gateway.core.tickets import Used
from gateway.runtime.decisions import Attempt, Decision
from gateway.runtime.disconnect import ClientGone
from gateway.runtime.dispatcher import Place
from gateway.runtime.exchange import Exchange
from gateway.runtime.log import RequestLine
from gateway.runtime.metrics import Metrics, Series

Log = Callable[[RequestLine], None]
_KEY: Final = re.compile(r"sk-[\w-]*")
TELL_EVERY_S: Final = (
    1.0  # the gaps between events: counting each as it comes took a tenth of an event's cost
)
MOST_PATH: Final = 200  # characters of an unknown path that are logged


class Record:
    """`with Record(...) as record`: every ending becomes one Outcome, one log line, one count."""

    __slots__ = (
        "_clock",
        "_decision",
        "_gaps",
        "_last_at",
        "_log",
        "_metrics",
        "_place",
        "_series",
        "_since",
        "_status",
        "_tell_at",
        "_whole",
        "affinity",
        "backend",
        "error",
        "events",
        "exchange",
        "key",
        "model",
        "outcome",
        "queued_s",
        "ttft_s",
        "usage",
        "used",
    )

    def __init__(self, exchange: Exchange, metrics: Metrics, log: Log) -> None:
        self.exchange = exchange
        self._metrics = metrics
        self._log = log
        self._clock = metrics.clock
        self._since = self._clock()
        self._series: Series | None = None
        self._last_at = 0.0
        self._gaps: list[float] = []  # between events, in seconds; not told yet
        self._tell_at = 0.0
        self.key = NONE
        self.model = NONE
        self.backend: str | None = None
        self.outcome: Outcome | None = None
        self.error: str | None = None
        self.queued_s: float | None = None
        self._status = 0  # of a refusal that is yet to be sent
        self.affinity: str = "none"
        self.ttft_s: float | None = None
        self.events = 0
        self.usage: Usage | None = None
        self.used: Used | None = None  # the same, for who learns from it
        self._whole = False  # its client left, with all of the answer
        self._place: Place | None = None
        self._decision: Decision | None = None
        exchange.describe = self.headers

    def __enter__(self) -> Self:
        return self

    def placed(self, place: Place) -> None:
        """It has a backend, perhaps not its first."""
        self.backend, self.queued_s, self.affinity = place.backend, place.queued_s, place.affinity
        self._series = self._metrics.series(self.model, place.backend)
        self._place = place
        self._decided(place)

    def _decided(self, place: Place) -> None:
        """Remember why, so that it can be explained."""
        decision = self._decision
        if decision is None:
            decision = self._decision = Decision(
                self.exchange.request_id, self._clock(), self.key, self.model
            )
            self._metrics.decisions.keep(decision)
        if place.price is not None:
            decision.attempts.append(
                Attempt(place.backend, place.affinity, place.queued_s, place.price, place.prices)
            )

    def headers(self) -> Headers:
        """What the client is told of where its request went."""
        if self.backend is None:
            return []
        queue_ms = round((self.queued_s or 0.0) * 1000)
        return [
            (b"x-slotgate-backend", self.backend.encode()),
            (b"x-slotgate-queue-ms", b"%d" % queue_ms),
            (b"x-slotgate-affinity", self.affinity.encode()),
        ]

    def content(self, now: float, events: int) -> None:
        """A read brought this many events with generated content."""
        series = self._series
        if series is None:
            return
        if self.events == 0:
            self.ttft_s = now - (self.exchange.received_at or self._since)
            series.first_token(now, self.ttft_s)
            if self._place is not None:
                self._place.first_token()
        elif events == 1:
            self._gaps.append(now - self._last_at)
        else:  # that many gaps of a share each
            self._gaps += [(now - self._last_at) / events] * events
        series.last_event_at = self._last_at = now
        self.events += events
        if now >= self._tell_at:
            self._tell_gaps(series, now)

    def _tell_gaps(self, series: Series, now: float) -> None:
        series.gaps(now, self._gaps)
        self._gaps = []
        self._tell_at = now + TELL_EVERY_S

    def told(self, usage: Usage | None, prefill_s: float | None = None) -> None:
        """What the engine says it used; of an answer that was no stream also how long its prompt took."""
        self.usage = usage
        if usage is not None:
            self.used = Used(
                usage.prompt_tokens, usage.cached_tokens, usage.generated_tokens, prefill_s
            )

    def left_with_all(self) -> None:
        """Its client has left after the last event: that is no answer in vain."""
        self._whole = True

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        self.outcome = self._ending(error)
        route = self.exchange.route
        counts = route is not None and route.generates
        self._metrics.ended(self.model, self.key, self.outcome, counts=counts)
        if self._series is not None:
            self._count(self._series)
        self._explain()
        self._log(self._line())

    def _ending(self, error: BaseException | None) -> Outcome:
        if isinstance(error, GatewayError):
            self.error = error.situation.code
            self._status = status_of(error, self.exchange.family)
            return error.situation.outcome
        if isinstance(error, ClientGone | asyncio.CancelledError):
            return Outcome.SERVED if self._whole else Outcome.CLIENT_GONE
        if error is not None:
            self.error = "internal_error"
            return Outcome.UPSTREAM_FAILED
        return Outcome.SERVED if self.exchange.status < 400 else Outcome.UPSTREAM_REFUSED

    def _count(self, series: Series) -> None:
        metrics, usage = self._metrics, self.usage
        if self._gaps:
            self._tell_gaps(series, self._last_at)
        if self.queued_s is not None:
            metrics.waited(self.model, self.queued_s)
        metrics.affinity[self.affinity,] += 1
        generated = usage.generated_tokens if usage else None
        if generated is None:
            generated = self.events
        series.generated_tokens += generated
        metrics.key_tokens[self.key, "generated"] += generated
        if usage is not None:
            prompt, cached = usage.prompt_tokens or 0, usage.cached_tokens or 0
            series.prompt_tokens += prompt
            series.cached_tokens += cached
            metrics.key_tokens[self.key, "prompt"] += prompt
            metrics.key_tokens[self.key, "cached"] += cached
            self._compare(usage)
        if self.outcome is Outcome.SERVED:
            series.request.observe(self._clock() - (self.exchange.received_at or self._since))

    def _compare(self, usage: Usage) -> None:
        """How much of the prompt we believed to be cached, and how much was."""
        place, cached = self._place, usage.cached_tokens
        if place is None or place.price is None or cached is None or not place.offer.prompt_bytes:
            return
        share = min(1.0, place.price.matched / place.offer.prompt_bytes)
        metrics = self._metrics
        metrics.affinity_predicted[place.backend] += round(share * usage.prompt_tokens)
        metrics.affinity_cached[place.backend] += cached

    def _explain(self) -> None:
        """Tell the ring how it ended."""
        decision = self._decision
        if decision is None:
            return
        decision.outcome = self.outcome
        decision.ttft_s = self.ttft_s
        decision.seconds = self._clock() - self._since
        if self.usage is not None:
            decision.prompt_tokens = self.usage.prompt_tokens
            decision.cached_tokens = self.usage.cached_tokens

    def _line(self) -> RequestLine:
        """The request in one line."""
        exchange, usage = self.exchange, self.usage
        return RequestLine(
            exchange.request_id,
            self.key,
            exchange.client or None,
            exchange.method,
            exchange.path if exchange.route is not None else _shown(exchange.path),
            self.model,
            self.backend,
            self.outcome,
            exchange.status or self._status or None,
            _ms(self.queued_s),
            _ms(self.ttft_s),
            _ms(self._clock() - self._since),
            self.affinity,
            usage.prompt_tokens if usage else None,
            usage.cached_tokens if usage else None,
            usage.generated_tokens if usage else self.events or None,
            self.error,
        )


def _shown(path: str) -> str:
    """A path that is none of ours: cut, and without what looks like a key, which somebody put in a wrong place."""
    return _KEY.sub("sk-…", path[:MOST_PATH])


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 1)
