"""A key's limits, kept by several gateways together.

Law of this file: each gateway counts what the others use as if it were its own, from when it hears of it. So limits are
exceeded by no more than what other gateways let in between two words of theirs, and a request waits for nobody.

A gateway tells of each limited key how many requests are in flight, and what was spent in all since its start. Others
take the difference to what they heard before out of their own bucket; of somebody they hear for the first time they
take the level, which is what the whole fleet has left.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from gateway.core.limits import MINUTE_S, Bucket, Limits, Usage


class Spent(NamedTuple):
    """What one gateway tells of one key. Levels are None where it keeps no such bucket."""

    in_flight: int
    requests: float
    tokens: float
    requests_level: float | None
    tokens_level: float | None


@dataclass(slots=True, eq=False)
class SharedLimits:
    """Owner of what was last heard of other gateways' keys. It changes the `Limits` of this one."""

    limits: Limits
    _heard: Mapping[str, Mapping[str, Spent]] = field(default_factory=dict)  # gateway: key
    _changed: dict[str, tuple[Spent, float]] = field(default_factory=dict)  # of our own, and when

    def told(self, now: float) -> dict[str, Spent]:
        """Our own keys in use, or used within the minute in which that matters to others."""
        for name, usage in self.limits.usage.items():
            spent = _spent(usage)
            before = self._changed.get(name)
            if before is None or before[0][:3] != spent[:3]:
                self._changed[name] = (spent, now)
        found = {}
        for name, (_, at) in list(self._changed.items()):
            usage = self.limits.usage[name]
            if usage.in_flight or now < at + MINUTE_S:
                found[name] = _spent(usage)
        return found

    def hear(self, now: float, told: Mapping[str, Mapping[str, Spent]]) -> None:
        """What all others told last. Who is not among them any more has nothing in flight."""
        elsewhere: dict[str, int] = {}
        for gateway, keys in told.items():
            before = self._heard.get(gateway, {})
            for key, spent in keys.items():
                elsewhere[key] = elsewhere.get(key, 0) + spent.in_flight
                self._take(now, key, before.get(key), spent)
        self._heard = told
        for name, usage in self.limits.usage.items():
            usage.elsewhere = elsewhere.get(name, 0)

    def alone(self) -> None:
        """Nobody is heard any more: the limits are this gateway's own until somebody is."""
        for usage in self.limits.usage.values():
            usage.elsewhere = 0

    def _take(self, now: float, key: str, before: Spent | None, spent: Spent) -> None:
        usage = self.limits.usage.get(key)
        if usage is None:
            usage = self.limits.usage[key] = Usage()
        old = before or spent
        usage.requests = _lowered(
            now, usage.requests, before is None, spent.requests - old.requests, spent.requests_level
        )
        usage.tokens = _lowered(
            now, usage.tokens, before is None, spent.tokens - old.tokens, spent.tokens_level
        )


def _spent(usage: Usage) -> Spent:
    return Spent(
        usage.in_flight,
        usage.spent_requests,
        usage.spent_tokens,
        usage.requests.level if usage.requests else None,
        usage.tokens.level if usage.tokens else None,
    )


def _lowered(
    now: float, bucket: Bucket | None, is_new: bool, more: float, level: float | None
) -> Bucket | None:
    """The bucket after what somebody else took out of it; one that is not kept yet starts where theirs is."""
    if level is None:
        return bucket
    if bucket is None:
        bucket = Bucket(0.0)  # `Limits` sets its size when a request of that key comes
        bucket.level, bucket.at = level, now
        return bucket
    bucket.level -= more
    if is_new:
        bucket.level = min(bucket.level, level)
    return bucket
