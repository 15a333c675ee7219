"""The state of a backend in one word, the same in metrics, status, log and dashboard."""

from __future__ import annotations

from typing import Final

from gateway.core.fleet import Backend, Fitness

FAILING: Final = "failing"  # the breaker is open: it answered probes, but our requests broke there
STATES: Final = (*(fitness.value for fitness in Fitness), FAILING)


def state_of(backend: Backend) -> str:
    """One of STATES. What the operator said comes first, then what the engine says, then what we met there."""
    if backend.draining:
        return Fitness.DRAINING.value
    if backend.fitness is Fitness.UP and backend.breaker.is_open:
        return FAILING
    return backend.fitness.value
