"""Which models an engine holds in memory, where to use another one means to load it: Ollama, a llama-server router.

Laws of this file (cases.md B021):
- A model at work is not pushed out by us. Its requests end first.
- Whoever waits for a model that is there goes before whoever needs a load, for one turn. A turn lasts as long as a
  load, so that at most half of the time is spent on loading; then the next model has its turn, and nobody starves.
- What the engine says of its memory counts from when it was asked: before the last load it knew nothing of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

PRIOR_LOAD_S = 5.0  # seconds to load a model, until the first was measured
SHORTEST_TURN_S = 1.0
LONGEST_TURN_S = 10.0


@dataclass(frozen=True, slots=True)
class Memory:
    """What an engine says of its memory."""

    loaded: frozenset[str] = frozenset()  # own ids of the models that are there
    names: Mapping[str, str] = field(default_factory=dict)  # other names of its models: own id
    most: int | None = None  # models held at once; None: not told, so taken to be one
    waits: bool = False  # it lets running requests end by itself before it pushes their model out


@dataclass(slots=True, eq=False)
class Residence:
    """The memory of one backend. Owned by `core.fleet`'s Backend; times are monotonic seconds."""

    told: Memory = field(default_factory=Memory)
    loaded: frozenset[str] | None = None  # own ids; None: all its models are always there
    running: dict[str, int] = field(default_factory=dict)  # requests in flight, by own id
    turn_since: float = float("-inf")
    _known_at: float = float("-inf")  # older answers of the engine are out of date
    _loading: int | None = None  # the ticket that pays for a load under way

    def has(self, model: str) -> bool:
        """Is it there, as far as we know?"""
        if self.loaded is None:
            return True
        own = self.own(model)
        return own in self.loaded or own in self.running

    def own(self, model: str) -> str:
        """Its own id of a model."""
        return self.told.names.get(model, model)

    def is_free(self, model: str) -> bool:
        """May it start without pushing out a model that is at work?"""
        if self.loaded is None or not self.running:
            return True
        return self.has(model) or len(self._held()) < (self.told.most or 1)

    def lets(
        self, now: float, model: str, *, since: float, turn_s: float, others_wait: bool
    ) -> bool:
        """May a request start that has waited since `since`? `others_wait`: for a model that is there.

        An engine that waits for running requests by itself is trusted to after another turn.
        """
        if self.has(model):
            return True
        turn_over = self.is_turn_over(now, since, turn_s)
        if self.is_free(model):
            return turn_over or not others_wait
        return self.told.waits and self.is_turn_over(now, since + turn_s, turn_s)

    def is_turn_over(self, now: float, since: float, turn_s: float) -> bool:
        """Have those who use what is loaded had a turn since this one came, or since the last load?"""
        turn = min(max(turn_s, SHORTEST_TURN_S), LONGEST_TURN_S)
        return now >= max(since, self.turn_since) + turn

    def start(self, now: float, ticket: int, model: str) -> bool:
        """A request starts. True: it pushes out what was there, as far as we know."""
        own = self.told.names.get(model, model)
        if self.loaded is None:
            self.running[own] = self.running.get(own, 0) + 1
            return False
        there = self.has(model)
        held = self._held()
        self.running[own] = self.running.get(own, 0) + 1
        if there:
            return False
        pushes = bool(held) and len(held) >= (self.told.most or 1)
        self.loaded = frozenset(self.running) if pushes else held | {own}
        self.turn_since = self._known_at = now
        self._loading = ticket
        return pushes

    def arrived(self, now: float, ticket: int) -> None:
        """Its first token came, so the model is there; or it ended, and who knows."""
        if self._loading == ticket:
            self._loading = None
            self._known_at = now

    def end(self, now: float, ticket: int, model: str) -> None:
        """A request ended."""
        own = self.told.names.get(model, model)
        left = self.running.get(own, 0) - 1
        if left > 0:
            self.running[own] = left
        else:
            self.running.pop(own, None)
        if self._loading is not None:
            self.arrived(now, ticket)

    def hear(self, memory: Memory, asked_at: float) -> bool:
        """What the engine says it holds. True: something that was there is gone."""
        self.told = memory
        if self._loading is not None or asked_at <= self._known_at:
            return False
        gone = bool((self.loaded or frozenset()) - memory.loaded)
        self.loaded = memory.loaded
        return gone

    def _held(self) -> frozenset[str]:
        return (self.loaded or frozenset()) | frozenset(self.running)
