"""The state of a backend in one word, the same in metrics, status, log and dashboard."""

from __future__ import annotations

from typing import Final

from gateway.core.fleet import Backend, Fitness

FAILING: Final = "failing"  # the breaker is open: it answered probes, but our requests broke there
STATES: Final = (*(fitness.value for fitness in Fitness), FAILING)


def word_of(backend: Backend) -> str:
    """The same for people, who wonder why nothing starts there: `busy` and `settling` are ways to be up."""
    state = state_of(backend)
    if state != Fitness.UP.value or backend.in_flight + backend.settling_permits < backend.lendable:
        return state
    return "busy" if backend.in_flight >= backend.lendable else "settling"


def state_of(backend: Backend) -> str:
    """One of STATES. What the operator said comes first, then what the engine says, then what we met there."""
    if backend.draining:
        return Fitness.DRAINING.value
    if backend.fitness is Fitness.UP and backend.breaker.is_open:
        return FAILING
    return backend.fitness.value
