"""Which backend holds how much of a prompt in its cache, and which conversation a prompt belongs to.

Chains are `core.chain`, the caches' models `core.caches`. The index is corrected by what engines report, and forgets
everything of an engine that restarted.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from zlib import crc32

from gateway.core.caches import Cache, Pool, Sequences
from gateway.core.chain import BLOCK_BYTES, EMPTY, Chain, chain_of

__all__ = [
    "BLOCK_BYTES",
    "EMPTY",
    "Chain",
    "PrefixIndex",
    "chain_of",
    "conversation_of",
    "session_in",
]

SESSION_HEADERS = frozenset(  # what agents call their conversations; X-Request-ID never does (clients.md, rule 10)
    {
        b"x-claude-code-session-id",
        b"x-session-affinity",
        b"x-session-id",
        b"session-id",
        b"session_id",
        b"thread-id",
    }
)
POOL_BYTES = 65_536 * 4  # of prompt: assumed KV cache of an engine that does not say


class PrefixIndex:
    """The caches of all backends. Owned by `core.dispatch`."""

    def __init__(self) -> None:
        self._caches: dict[str, Cache] = {}

    def put(self, backend: str, *, pooled: bool, slots: int, capacity: int | None) -> None:
        """A backend is new or resized. `capacity`: bytes its cache holds, None when it does not say."""
        cache = self._caches.get(backend)
        if cache is None or isinstance(cache, Pool) is not pooled:
            self._caches[backend] = Pool(capacity or POOL_BYTES) if pooled else Sequences(slots)
        else:
            cache.resize(slots, capacity or POOL_BYTES)

    def forget(self, backend: str) -> None:
        """It restarted: its cache is empty."""
        cache = self._caches.get(backend)
        if cache is not None:
            self._caches[backend] = cache.emptied()

    def remove(self, backend: str) -> None:
        """It is gone."""
        self._caches.pop(backend, None)

    def match(self, backend: str, chain: Chain, *, busy_too: bool) -> int:
        """Leading bytes of this prompt that the backend has."""
        cache = self._caches.get(backend)
        return cache.match(chain, busy_too=busy_too) if cache is not None and chain.hashes else 0

    def start(self, backend: str, ticket: int, chain: Chain) -> None:
        cache = self._caches.get(backend)
        if cache is not None and chain.hashes:
            cache.start(ticket, chain)

    def end(self, backend: str, ticket: int) -> None:
        cache = self._caches.get(backend)
        if cache is not None:
            cache.end(ticket)

    def correct(self, backend: str, ticket: int, cached_bytes: int) -> None:
        cache = self._caches.get(backend)
        if cache is not None:
            cache.correct(ticket, cached_bytes)

    def blocks(self, backend: str) -> int:
        """Blocks held for this backend: its memory, about 280 bytes each."""
        cache = self._caches.get(backend)
        return cache.blocks if cache is not None else 0


def session_in(headers: Iterable[tuple[bytes, bytes]]) -> bytes | None:
    """What these headers call the conversation, if they do."""
    return next((value for name, value in headers if name in SESSION_HEADERS), None)


def conversation_of(
    session: bytes | None, cache_key: str | None, pieces: Sequence[bytes | memoryview]
) -> int:
    """A number for the conversation, the same in every gateway: the seed of the rendezvous hash.

    By its name, when a client gives it one; else by how its prompt begins.
    """
    if cache_key is not None:
        return crc32(cache_key.encode())
    if session is not None:
        return crc32(session)
    seed = 0
    for piece in pieces[:2]:
        seed = crc32(piece[: 4 * BLOCK_BYTES], seed)
    return seed
