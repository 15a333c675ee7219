"""The breaker of one backend, as a table. Only broken connections and runs of 5xx count (law 7).

| state     | failure                         | proof of life          | served          | cooldown over |
| closed    | open, if it is the third in a row or a refused connection | - | run forgotten | -             |
| open      | -                               | half_open              | -               | half_open     |
| half_open | open, cooldown doubled          | -                      | cap doubled; closed at full | -  |

A backend that is alone opens by refused connections only. half_open lends one permit, then two, four and so on: one trial, then a ramp. A trial whose client left gives
its permit back like any other, so the trial place cannot get stuck.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

FAILURES_TO_OPEN = 3
FIRST_COOLDOWN_S = 1.0
MAX_COOLDOWN_S = 30.0


class BreakerState(StrEnum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


_CLOSED, _OPEN = BreakerState.CLOSED, BreakerState.OPEN  # each look at an Enum's member is a call


@dataclass(slots=True)
class Breaker:
    state: BreakerState = BreakerState.CLOSED
    run: int = 0  # failures in a row
    cooldown_s: float = FIRST_COOLDOWN_S
    until: float = 0.0
    ramp: int = 1

    @property
    def is_open(self) -> bool:
        return self.state is _OPEN

    def cap(self, slots: int) -> int:
        """The most permits to lend: all when closed, the ramp while half open, none when open."""
        if self.state is _CLOSED:
            return slots
        return min(self.ramp, slots) if self.state is BreakerState.HALF_OPEN else 0

    def fail(self, now: float, *, at_once: bool, alone: bool = False) -> None:
        """A broken connection or a 5xx. `at_once`: it does not listen, so nothing is to be waited for.

        `alone`: nobody could serve in its place, so to open would only turn its failures into refusals.
        """
        self.run += 1
        if self.state is BreakerState.OPEN or (alone and not at_once):
            return
        if self.state is BreakerState.HALF_OPEN:
            self.cooldown_s = min(self.cooldown_s * 2, MAX_COOLDOWN_S)
        elif not at_once and self.run < FAILURES_TO_OPEN:
            return
        self.state, self.until = BreakerState.OPEN, now + self.cooldown_s

    def serve(self, slots: int) -> None:
        """A request was answered."""
        self.run = 0
        if self.state is BreakerState.HALF_OPEN:
            self.ramp *= 2
            if self.ramp >= slots:
                self.state, self.cooldown_s = BreakerState.CLOSED, FIRST_COOLDOWN_S

    def probe(self) -> None:
        """A probe was answered: it lives, so try it."""
        if self.state is BreakerState.OPEN:
            self.state, self.ramp = BreakerState.HALF_OPEN, 1

    def tick(self, now: float) -> None:
        if self.state is BreakerState.OPEN and now >= self.until:
            self.state, self.ramp = BreakerState.HALF_OPEN, 1
