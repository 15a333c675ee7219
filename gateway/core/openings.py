"""What of a backend's free permits a given request may have: less than all where memory stands in the way.

Law of this file: a slot is no use to a request that does not fit into the KV cache which the slots share
(`core.room`), or whose model would push out one that is at work or still waited for (`core.residence`).
"""

from __future__ import annotations

from gateway.core.fleet import Backend
from gateway.core.queue import Queue
from gateway.core.tickets import Waiting


class Openings:
    """Looks, never changes anything. One of `core.choice`'s parts."""

    def __init__(self, backends: dict[str, Backend], queue: Queue) -> None:
        self._backends = backends
        self._queue = queue
        self._wanted: set[str] = set()  # backends of which somebody waits for a model that is there

    def look(self) -> None:
        """Before a decision: who waits for what is loaded?"""
        self._wanted = set()
        for backend in self._backends.values():
            if backend.residence.loaded is not None and self._is_wanted(backend):
                self._wanted.add(backend.name)

    def free_for(self, now: float, waiting: Waiting, backend: Backend) -> int:
        """Permits that this request could have there now."""
        offer = waiting.offer
        free = backend.free_for(offer.ticket)
        if not free:
            return 0
        if backend.room.tokens is not None and not backend.has_room(
            offer.prompt_bytes, offer.permits, offer.max_tokens
        ):
            return 0
        if backend.residence.loaded is not None and not self._lets_load(now, waiting, backend):
            return 0
        return free

    def in_the_way(self, now: float, waiting: Waiting, names: set[str]) -> set[str]:
        """Those of these backends whose present requests have to end first, and have had their turn."""
        return {name for name in names if self._must_empty(now, waiting, self._backends[name])}

    def _lets_load(self, now: float, waiting: Waiting, backend: Backend) -> bool:
        return backend.residence.lets(
            now,
            waiting.offer.model_on(backend.name),
            since=waiting.arrival,
            turn_s=backend.load_s.value,
            others_wait=backend.name in self._wanted,
        )

    def _must_empty(self, now: float, waiting: Waiting, backend: Backend) -> bool:
        offer, residence = waiting.offer, backend.residence
        if not backend.has_room(offer.prompt_bytes, offer.permits, offer.max_tokens):
            return True
        model = offer.model_on(backend.name)
        return not residence.is_free(model) and residence.is_turn_over(
            now, waiting.arrival, backend.load_s.value
        )

    def _is_wanted(self, backend: Backend) -> bool:
        """By somebody who could have it: more permits than it lends are waited for elsewhere."""
        name, has = backend.name, backend.residence.has
        return any(
            name in one.offer.pool
            and name not in one.tried
            and one.offer.permits <= backend.lendable
            and has(one.offer.model_on(name))
            for one in self._queue
        )
