"""Which backend holds how much of a prompt in its cache: chained block hashes, and a model of each engine's cache.

Law of this file: the index believes what the engine would keep, no more. It holds at most what the cache holds,
evicts as it would, is corrected by what the engine reports, and forgets everything when the engine restarted.

A chain is the prompt cut into blocks, each hash covering all before it, so equal hashes mean equal prefixes. Pieces
(tools, system, then message by message) are cut one by one: one more turn leaves all earlier blocks as they were.

Two kinds of cache (engines.md 1.9, 3.8):
  Pool       vLLM, SGLang: one pool of blocks; whoever has the prefix profits, even while the first still runs
  Sequences  llama-server, Ollama: whole sequences, one for each slot and some saved in RAM; a running sequence
             serves nobody else, and a newcomer takes over the idle slot with the longest common prefix
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol
from zlib import crc32

BLOCK_BYTES = 512
MAX_BLOCKS = 4_096  # of one prompt: 2 MiB are told apart, what follows is not
TAKE_OVER = (
    0.10  # least share of the new prompt that makes llama-server choose a slot by its prefix
)
SAVE_BELOW = 0.50  # a slot that keeps less than this of its sequence saves it to RAM first
RESTORE_ABOVE = 0.25  # a saved sequence is restored when at least this share of it is used
RAM_TOKENS = (
    65_536  # assumed size of `--cache-ram` (8 GiB by default; engines do not say it in tokens)
)
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
POOL_TOKENS = 65_536  # assumed KV cache of an engine that does not say


@dataclass(frozen=True, slots=True, eq=False)
class Chain:
    """A prompt as chained hashes; `ends[i]` is how many bytes of it block i closes."""

    hashes: tuple[int, ...] = ()
    ends: tuple[int, ...] = ()

    @property
    def size(self) -> int:
        return self.ends[-1] if self.ends else 0


EMPTY = Chain()


def chain_of(pieces: Iterable[bytes | memoryview], seed: object = None) -> Chain:
    """Hash a prompt, piece by piece. `seed`: the model, whose prompts are nobody else's."""
    hashes: list[int] = []
    ends: list[int] = []
    last = hash(seed)
    end = 0
    for piece in pieces:
        size = len(piece)
        for start in range(0, min(size, MAX_BLOCKS * BLOCK_BYTES), BLOCK_BYTES):
            last = hash((last, bytes(piece[start : start + BLOCK_BYTES])))
            hashes.append(last)
            ends.append(end + min(start + BLOCK_BYTES, size))
        end += size
        if len(hashes) >= MAX_BLOCKS:
            break
    return Chain(tuple(hashes[:MAX_BLOCKS]), tuple(ends[:MAX_BLOCKS]))


class Cache(Protocol):
    """What one backend is believed to hold. Sizes in bytes of prompt."""

    def match(self, chain: Chain, *, busy_too: bool) -> int:
        """How many leading bytes of this prompt it has. `busy_too`: count what is free by the time it starts."""
        ...

    def start(self, ticket: int, chain: Chain) -> None:
        """A request runs there now."""
        ...

    def end(self, ticket: int) -> None:
        """It ended: what it left can be used."""
        ...

    def correct(self, chain: Chain, cached_bytes: int) -> None:
        """The engine had this many bytes of this prompt when it started it."""
        ...

    def resize(self, slots: int, capacity: int) -> None: ...

    @property
    def blocks(self) -> int: ...


class Pool:
    """One pool of blocks, the least recently used out first."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._held: OrderedDict[int, int] = OrderedDict()  # hash: bytes
        self._size = 0

    @property
    def blocks(self) -> int:
        return len(self._held)

    def match(self, chain: Chain, *, busy_too: bool) -> int:  # noqa: ARG002  (running blocks are shared at once)
        depth = _deepest(chain.hashes, self._held)
        return chain.ends[depth - 1] if depth else 0

    def start(self, ticket: int, chain: Chain) -> None:  # noqa: ARG002
        held, ends = self._held, chain.ends
        for place in range(len(ends) - 1, -1, -1):  # the head last: the tail goes first, as in vLLM
            one = chain.hashes[place]
            if one in held:
                held.move_to_end(one)
            else:
                held[one] = size = ends[place] - (ends[place - 1] if place else 0)
                self._size += size
        self._evict()

    def end(self, ticket: int) -> None:
        pass

    def correct(self, chain: Chain, cached_bytes: int) -> None:
        pass  # the request has put its blocks there since; what was evicted goes by age

    def resize(self, slots: int, capacity: int) -> None:  # noqa: ARG002
        self._capacity = capacity
        self._evict()

    def _evict(self) -> None:
        while self._size > self._capacity and self._held:
            _, size = self._held.popitem(last=False)
            self._size -= size


@dataclass(slots=True, eq=False)
class Kept:
    """A sequence that the engine keeps. `hashes` maps each block to the bytes it closes."""

    hashes: dict[int, int] = field(default_factory=dict)
    size: int = 0
    ticket: int | None = None  # who is using it; None: idle
    used: int = 0  # order of last use

    def common(self, chain: Chain) -> int:
        depth = _deepest(chain.hashes, self.hashes)
        return chain.ends[depth - 1] if depth else 0


class Sequences:
    """Whole sequences: one for each slot, and a RAM cache of what slots lost."""

    def __init__(self, slots: int, ram: int) -> None:
        self._slots = [Kept() for _ in range(slots)]
        self._ram: OrderedDict[int, Kept] = OrderedDict()  # oldest first
        self._ram_size = 0
        self._ram_limit = ram
        self._clock = 0
        self._saved = 0

    @property
    def blocks(self) -> int:
        kept = [*self._slots, *self._ram.values()]
        return sum(len(one.hashes) for one in kept)

    def match(self, chain: Chain, *, busy_too: bool) -> int:
        best = 0
        for slot in self._slots:
            if slot.size > best and (busy_too or slot.ticket is None):
                best = max(best, slot.common(chain))
                if best == chain.size:
                    return best
        for saved in self._ram.values():
            common = saved.common(chain)
            if common > best and common >= RESTORE_ABOVE * saved.size:
                best = common
        return best

    def start(self, ticket: int, chain: Chain) -> None:
        """The engine's own choice: the idle slot with the longest common prefix, else the least recently used."""
        idle = [slot for slot in self._slots if slot.ticket is None]
        if not idle:  # more than we know of: nothing can be said about it
            return
        slot, common = idle[0], 0
        for one in idle:
            if one.size > common and (shared := one.common(chain)) > common:
                slot, common = one, shared
        if common <= TAKE_OVER * chain.size:
            slot = min(idle, key=lambda one: one.used)
            common = slot.common(chain)
        if slot.size and common < SAVE_BELOW * slot.size:
            self._save(slot)
        slot.hashes = dict(zip(chain.hashes, chain.ends, strict=True))
        slot.size, slot.ticket = chain.size, ticket
        self._clock += 1
        slot.used = self._clock

    def end(self, ticket: int) -> None:
        for slot in self._slots:
            if slot.ticket == ticket:
                slot.ticket = None
                self._clock += 1
                slot.used = self._clock

    def correct(self, chain: Chain, cached_bytes: int) -> None:
        """A saved sequence that should have given more than the engine found is not there."""
        for key, saved in list(self._ram.items()):
            common = saved.common(chain)
            if common > cached_bytes + BLOCK_BYTES and common >= RESTORE_ABOVE * saved.size:
                self._drop(key)

    def resize(self, slots: int, capacity: int) -> None:  # noqa: ARG002
        while len(self._slots) < slots:
            self._slots.append(Kept())
        while len(self._slots) > slots and any(one.ticket is None for one in self._slots):
            idle = [one for one in self._slots if one.ticket is None]
            self._slots.remove(min(idle, key=lambda one: one.used))

    def _save(self, slot: Kept) -> None:
        self._saved += 1
        self._ram[self._saved] = Kept(slot.hashes, slot.size)
        self._ram_size += slot.size
        while self._ram_size > self._ram_limit and self._ram:
            self._drop(next(iter(self._ram)))

    def _drop(self, key: int) -> None:
        self._ram_size -= self._ram.pop(key).size


class PrefixIndex:
    """The caches of all backends. Owned by `core.dispatch`."""

    def __init__(self) -> None:
        self._caches: dict[str, Cache] = {}

    def put(self, backend: str, *, pooled: bool, slots: int, capacity: int | None) -> None:
        """A backend is new or resized. `capacity`: bytes its cache holds, None when it does not say."""
        cache = self._caches.get(backend)
        if cache is None or isinstance(cache, Pool) is not pooled:
            ram = RAM_TOKENS * 4
            cache = Pool(capacity or POOL_TOKENS * 4) if pooled else Sequences(slots, ram)
            self._caches[backend] = cache
        else:
            cache.resize(slots, capacity or POOL_TOKENS * 4)

    def forget(self, backend: str) -> None:
        """It restarted, or is gone: its cache is empty."""
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

    def correct(self, backend: str, chain: Chain, cached_bytes: int) -> None:
        cache = self._caches.get(backend)
        if cache is not None:
            cache.correct(chain, cached_bytes)

    def blocks(self, backend: str) -> int:
        """Blocks held for this backend: its memory, about 100 bytes each."""
        cache = self._caches.get(backend)
        return cache.blocks if cache is not None else 0


def conversation_of(
    headers: Iterable[tuple[bytes, bytes]],
    cache_key: str | None,
    pieces: Sequence[bytes | memoryview],
) -> int:
    """A number for the conversation, the same in every gateway: the seed of the rendezvous hash.

    By its name, when a client gives it one; else by how its prompt begins.
    """
    if cache_key is not None:
        return crc32(cache_key.encode())
    for name, value in headers:
        if name in SESSION_HEADERS:
            return crc32(value)
    seed = 0
    for piece in pieces[:2]:
        seed = crc32(piece[: 4 * BLOCK_BYTES], seed)
    return seed


def _deepest(hashes: Sequence[int], held: dict[int, int] | OrderedDict[int, int]) -> int:
    """How many leading blocks are held: a block that is held has all blocks before it held, nearly always.

    Binary search; an LRU pool may have lost an early block, and then the engine cannot use the later ones either.
    """
    if not hashes or hashes[0] not in held:
        return 0
    low, high = 1, len(hashes)
    while low < high:
        middle = (low + high + 1) // 2
        if hashes[middle - 1] in held:
            low = middle
        else:
            high = middle - 1
    return low
