"""Back-pressure of one engine: its 429 or 503 lowers what we send it (law 7). It is no fault.

As in congestion control, down at once to what the engine was bearing, up again by one permit a second (additive
increase, Chiu and Jain, 1989), so that one refusal is not followed by a refusal for every request in line.
"""

from __future__ import annotations

from dataclasses import dataclass

EASE_S = 1.0  # a second without a refusal earns one more permit


@dataclass(slots=True)
class Pressure:
    cap: int | None = None  # most permits; None: no pressure
    until: float = 0.0

    def press(self, now: float, bearing: int) -> None:
        """It refused while it was bearing this many permits of ours. Never below one."""
        self.cap, self.until = max(1, bearing), now + EASE_S

    def ease(self, now: float, slots: int) -> None:
        if self.cap is None or now < self.until:
            return
        self.cap, self.until = self.cap + 1, now + EASE_S
        if self.cap >= slots:
            self.cap = None

    def limit(self, slots: int) -> int:
        return slots if self.cap is None else min(slots, self.cap)
