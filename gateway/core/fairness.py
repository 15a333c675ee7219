"""Which waiting request is next (law 8).

Between keys: start-time fair queueing (Goyal, Vin and Cheng, SIGCOMM 1996), in permit-seconds by weight, with
several servers (Jin, Chase and Kaur, SIGMETRICS 2004, call it SFQ(D)). A start costs its key the learned service
time of the backend; the release settles the difference. A key that was idle starts at the present virtual time:
idleness earns no credit, and a busy key may use what others leave.

Interactive goes before batch; dispatch asks for the opposite order on every eighth start. Within a key: arrival.
A key whose first request was overtaken nearly 2 x slots times goes first within its class, whatever its weight.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gateway.core.tickets import Waiting

CONSIDERED = 64  # most waiting requests that one decision looks at
MAX_IDLE_LINES = 1_024


@dataclass(slots=True, eq=False)
class Line:
    """One key's place in the order. Owned by `Lines`."""

    key: str
    weight: float = 1.0
    batch: bool = False
    virtual: float = 0.0  # permit-seconds used, by weight
    waiting: list[Waiting] = field(default_factory=list)  # arrival order
    overtaken: int = 0  # starts of others since the first waiting request came to be first
    held: int = 0  # requests of this key in flight


class Lines:
    """All waiting requests, by key."""

    def __init__(self) -> None:
        self._lines: dict[str, Line] = {}
        self._virtual_now = 0.0
        self.count = 0

    def line(self, key: str, weight: float, *, batch: bool) -> Line:
        """The key's line; a new or idle one starts at the present virtual time."""
        line = self._lines.get(key)
        if line is None:
            if len(self._lines) > MAX_IDLE_LINES:
                self._forget_idle()
            line = self._lines[key] = Line(key, virtual=self._virtual_now)
        line.weight, line.batch = weight, batch
        if not line.waiting and not line.held and line.virtual < self._virtual_now:
            line.virtual = self._virtual_now
        return line

    def add(self, line: Line, waiting: Waiting, *, first: bool = False) -> None:
        if first:
            line.waiting.insert(0, waiting)
        else:
            line.waiting.append(waiting)
        self.count += 1

    def remove(self, waiting: Waiting) -> None:
        line = waiting.line
        if line.waiting[0] is waiting:
            line.overtaken = 0
        line.waiting.remove(waiting)
        self.count -= 1

    def lines_waiting(self) -> list[Line]:
        return [line for line in self._lines.values() if line.waiting]

    def __iter__(self) -> Iterator[Waiting]:
        for line in self._lines.values():
            yield from line.waiting

    def order(self, *, batch_first: bool = False) -> list[Waiting]:
        """The first 64 waiting requests, most deserving first."""
        if self.count == 1:
            return list(self)
        active = self.lines_waiting()
        crowd = len(active)
        tagged = []
        for line in active:
            patience = 2 * line.waiting[0].pool_slots
            spent = line.overtaken + crowd >= patience and line.overtaken > 0
            rank = line.batch != batch_first
            base = max(line.virtual, self._virtual_now)
            for place, one in enumerate(line.waiting[:CONSIDERED]):
                overdue = spent and place == 0
                tag = base + place * one.expected_s * one.offer.permits / line.weight
                order = -line.overtaken if overdue else tag
                tagged.append(((rank, not overdue, order, one.arrival), one))
                one.overdue = overdue
        return [one for _, one in heapq.nsmallest(CONSIDERED, tagged, key=lambda item: item[0])]

    def started(self, line: Line, permit_s: float, backend: str) -> None:
        """A request of this line starts on this backend; `permit_s` is what it is expected to use."""
        tag = self._virtual_now = max(self._virtual_now, line.virtual)
        line.virtual = tag + permit_s / line.weight
        line.held += 1
        if self.count:
            for other in self._lines.values():
                if other is not line and other.waiting and backend in other.waiting[0].offer.pool:
                    other.overtaken += 1

    def released(self, line: Line, permit_s: float) -> None:
        """Settle: `permit_s` is what was used beyond (or, negative, below) what was expected."""
        line.held -= 1
        line.virtual += permit_s / line.weight

    def _forget_idle(self) -> None:
        for key in [k for k, line in self._lines.items() if not line.waiting and not line.held]:
            del self._lines[key]
