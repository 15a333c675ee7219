"""What is inside a scripted engine now, and the most that ever was: the counts that tests of admission stand on."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field

from tests.fakes.connection import Request
from tests.fakes.engine_slots import Lease

# One that has just left may not be noticed yet when the next one comes: shorter overlaps are the wire's, not the gateway's.
OVERLAP_S = 0.005


@dataclass(slots=True)
class Occupancy:
    """Requests on generation paths, and slots that stay busy after their client left, each with its permits."""

    peak: int = 0
    peak_permits: int = 0
    executions_by_id: Counter[str] = field(default_factory=Counter)
    now: dict[Request | Lease, int] = field(default_factory=dict)

    def enter(self, what: Request | Lease, permits: int, slots: int) -> None:
        self.now[what] = permits
        if sum(self.now.values()) <= slots:
            self._count()
        else:
            asyncio.get_running_loop().call_later(OVERLAP_S, self._count)

    def leave(self, what: Request | Lease) -> None:
        self.now.pop(what, None)

    def ran(self, request: Request, times: int = 1) -> None:
        self.executions_by_id[request.id or ""] += times

    def requests(self) -> list[Request]:
        return [one for one in self.now if isinstance(one, Request)]

    def _count(self) -> None:
        self.peak = max(self.peak, len(self.now))
        self.peak_permits = max(self.peak_permits, sum(self.now.values()))
