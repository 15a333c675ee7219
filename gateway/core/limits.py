"""A key's own limits: requests at once, requests and tokens a minute. Over them: 429, never 503.

Token bucket over one minute. A start is charged what it is expected to use and settled at its end, so the bucket may
go below zero. Refused requests do not count against `rpm`. Where several gateways share the limits, what the others use
counts as of when it was last heard (`core.lease_limits`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import ceil

from gateway.core.errors import GatewayError
from gateway.core.keys import Key

MINUTE_S = 60.0


@dataclass(slots=True)
class Bucket:
    """Refills `per_minute` a minute, holds one minute's worth. May go negative."""

    per_minute: float
    level: float = field(init=False)
    at: float = 0.0

    def __post_init__(self) -> None:
        self.level = self.per_minute

    def refill(self, now: float, per_minute: float) -> None:
        self.per_minute = per_minute
        gained = max(0.0, now - self.at) * per_minute / MINUTE_S
        self.level = min(per_minute, self.level + gained)
        self.at = now

    def wait_s(self, amount: float) -> float:
        """Seconds until `amount` (at most a full bucket) may be taken; 0 when it may be now."""
        missing = min(amount, self.per_minute) - self.level
        return max(0.0, missing * MINUTE_S / self.per_minute)


@dataclass(slots=True)
class Usage:
    """What one key is using. Owned by `Limits`."""

    in_flight: int = 0
    requests: Bucket | None = None
    tokens: Bucket | None = None
    elsewhere: int = 0  # in flight in other gateways
    spent_requests: float = 0.0  # here, since the start
    spent_tokens: float = 0.0


@dataclass(slots=True)
class Limits:
    """Usage of all keys, by name. Bounded by the number of keys."""

    usage: dict[str, Usage] = field(default_factory=dict)

    def enter(self, key: Key) -> None:
        """A request of this key has come. Raises GatewayError(key_concurrency). Pair it with `leave`."""
        usage = self._of(key)
        if key.max_in_flight is not None and usage.in_flight + usage.elsewhere >= key.max_in_flight:
            raise GatewayError(
                "key_concurrency",
                f"This key may have {key.max_in_flight} requests at once (max_in_flight). Please try again in 2s.",
                retry_after_s=2.0,
            )
        usage.in_flight += 1

    def leave(self, key: Key) -> None:
        self._of(key).in_flight -= 1

    def charge(self, now: float, key: Key, tokens: float) -> None:
        """It is about to be queued or started. Raises GatewayError(key_rate_limit); then nothing is taken."""
        usage = self._of(key)
        usage.requests = _current(usage.requests, key.rpm, now)
        usage.tokens = _current(usage.tokens, key.tpm, now)
        wait = max(
            usage.requests.wait_s(1) if usage.requests else 0.0,
            usage.tokens.wait_s(tokens) if usage.tokens else 0.0,
        )
        if wait > 0:
            again = min(max(wait, 1.0), 60.0)
            raise GatewayError(
                "key_rate_limit",
                f"This key is over its limit a minute (rpm or tpm). Please try again in {ceil(again)}s.",
                retry_after_s=again,
            )
        self._spend(usage, 1, tokens)

    def settle(self, key: Key, tokens: float) -> None:
        """`tokens`: what was used beyond, or (negative) below, what was charged."""
        self._spend(self._of(key), 0, tokens)

    def refund(self, key: Key, tokens: float) -> None:
        """It was refused after all: it counts against nothing."""
        self._spend(self._of(key), -1, -tokens)

    @staticmethod
    def _spend(usage: Usage, requests: float, tokens: float) -> None:
        usage.spent_requests += requests
        usage.spent_tokens += tokens
        if usage.requests:
            usage.requests.level -= requests
        if usage.tokens:
            usage.tokens.level -= tokens

    def _of(self, key: Key) -> Usage:
        usage = self.usage.get(key.name)
        if usage is None:
            usage = self.usage[key.name] = Usage()
        return usage


def _current(bucket: Bucket | None, per_minute: int | None, now: float) -> Bucket | None:
    if per_minute is None:
        return None
    if bucket is None:
        bucket = Bucket(per_minute)
    bucket.refill(now, per_minute)
    return bucket
