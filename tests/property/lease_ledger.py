"""The ledger of leases in Python, statement by statement as in gateway/runtime/cluster_ledger.lua.

The property test of the protocol runs on it; tests/engines/test_redis_ledger.py holds it against the script itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from gateway.core.lease import CALM_S, LEASE_S, Message, Reply, Standing


@dataclass
class Member:
    number: int
    until: float
    on: dict[str, Standing]


@dataclass
class Ledger:
    """`now` is its own clock, in seconds."""

    epoch: str = "e0"
    calm_until: float = 0.0
    late_at: float = 0.0
    members: dict[str, Member] = field(default_factory=dict)
    awaited: set[str] = field(default_factory=set)

    def restart(self, now: float, epoch: str) -> None:
        """It lost everything."""
        self.epoch = epoch
        self.calm_until, self.late_at = now + CALM_S, now + LEASE_S
        self.members.clear()
        self.awaited.clear()

    def hear(self, now: float, message: Message) -> Reply | None:
        """None: an answer to a later message was given before."""
        self.members = {name: one for name, one in self.members.items() if one.until >= now}
        known = self.members.pop(message.sender, None)
        if known is not None and message.number <= known.number:
            self.members[message.sender] = known
            return None
        is_late = now >= self.late_at
        if not is_late:
            if message.epoch != self.epoch:
                self.awaited |= {one for one in message.peers if one not in self.members}
            self.awaited.discard(message.sender)
        is_calm = now < self.calm_until or (not is_late and bool(self.awaited))
        on = {}
        for name, claim in message.claims.items():
            held = sum(one.on[name].held for one in self.members.values() if name in one.on)
            base = 0
            if known is not None:
                base = min(claim.hold, known.on[name].held if name in known.on else 0)
            elif is_calm and message.epoch not in (self.epoch, ""):
                base = claim.hold
            granted = max(base, claim.used)
            if not is_calm:
                granted = max(granted, min(claim.ask, claim.slots - held))
            on[name] = Standing(granted, claim.used, claim.need, claim.peak, claim.spare)
        others: Mapping[str, Mapping[str, Standing]] = {n: m.on for n, m in self.members.items()}
        self.members[message.sender] = Member(message.number, now + LEASE_S, on)
        return Reply(
            self.epoch, round(now * 1000), {name: one.held for name, one in on.items()}, others
        )
