"""The ledger of leases in Python, statement by statement as in gateway/runtime/cluster_ledger.lua.

The property test of the protocol runs on it; tests/engines/test_redis_ledger.py holds it against the script itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from gateway.core.lease import CALM_S, LEASE_S, SEEN_S, SHORT_CALM_S, Message, Reply, Standing


@dataclass
class Member:
    number: int
    until: float
    on: dict[str, Standing]
    granted: dict[str, int]
    over_at: float | None = None  # its lease was first seen over


@dataclass
class Ledger:
    """`now` is its own clock, in seconds."""

    epoch: str = "e0"
    calm_until: float = 0.0
    late_at: float = 0.0
    members: dict[str, Member] = field(default_factory=dict)
    awaited: set[str] = field(default_factory=set)

    def restart(self, now: float, epoch: str) -> None:
        """It lost everything. Its calm lasts for a while after the first word that it hears, as in the script."""
        self.epoch = epoch
        self.calm_until, self.late_at = now + CALM_S, float("inf")
        self.members.clear()
        self.awaited.clear()

    def hear(self, now: float, message: Message) -> Reply | None:
        """None: an answer to a later message was given before."""
        if self.late_at == float("inf"):
            self.calm_until = max(self.calm_until, now + SHORT_CALM_S)
            self.late_at = now + LEASE_S
        self._see(now)
        known = self.members.pop(message.sender, None)
        if known is not None and message.number <= known.number:
            self.members[message.sender] = known
            return None
        is_late = now >= self.late_at
        was_calm = now < self.calm_until or (not is_late and bool(self.awaited))
        was_awaited = was_calm and not is_late and message.sender in self.awaited
        if was_calm and not is_late:
            if message.epoch != self.epoch:
                self.awaited |= {one for one in message.peers if one not in self.members}
            self.awaited.discard(message.sender)
        is_calm = now < self.calm_until or (not is_late and bool(self.awaited))
        on, grants = {}, {}
        for name, claim in message.claims.items():
            held = sum(one.on[name].held for one in self.members.values() if name in one.on)
            base = 0
            if known is not None:
                base = min(claim.ask, known.granted.get(name, 0))
            elif (is_calm or was_awaited) and message.epoch not in (self.epoch, ""):
                base = claim.hold
            granted = base
            if not is_calm:
                granted = max(base, min(claim.ask, claim.slots - held))
            grants[name] = granted
            on[name] = Standing(
                max(granted, claim.used), claim.used, claim.need, claim.peak, claim.spare
            )
        others: Mapping[str, Mapping[str, Standing]] = {n: m.on for n, m in self.members.items()}
        self.members[message.sender] = Member(message.number, now + LEASE_S, on, grants)
        return Reply(self.epoch, round(now * 1000), grants, others)

    def _see(self, now: float) -> None:
        for name, one in list(self.members.items()):
            if one.over_at is not None and now >= one.over_at + SEEN_S:
                del self.members[name]
            elif one.until < now and one.over_at is None:
                one.over_at = now
