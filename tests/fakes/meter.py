"""A `gateway.runtime.watch.Meter` that only counts, for tests of what passes a stream's watch."""

from __future__ import annotations

from gateway.core.figures import Usage


class Counts:
    """How many events with content it was told of."""

    def __init__(self) -> None:
        self.events = 0

    def content(self, _now: float, events: int) -> None:
        self.events += events

    def told(self, usage: Usage | None, prefill_s: float | None = None) -> None:
        pass

    def left_with_all(self) -> None:
        pass
