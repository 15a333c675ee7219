"""Models of what an engine's cache keeps of past prompts.

Law of this file: a model believes what the engine would keep, no more. It holds at most what the cache holds, in bytes
and in blocks, evicts as it would, and is corrected by what the engine reports.

Two kinds (engines.md 1.9, 3.8):
  Pool       vLLM, SGLang: one pool of blocks; whoever has the prefix profits, even while the first still runs
  Sequences  llama-server, Ollama: whole sequences, one for each slot and some saved in RAM; a running sequence
             serves nobody else, and a newcomer takes over the idle slot with the longest common prefix
"""

from __future__ import annotations

from bisect import insort
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from gateway.core.chain import BLOCK_BYTES, EMPTY, Chain, deepest

TAKE_OVER = (
    0.10  # least share of the new prompt that makes llama-server choose a slot by its prefix
)
SAVE_BELOW = 0.50  # a slot that keeps less than this of its sequence saves it to RAM first
RESTORE_ABOVE = 0.25  # a saved sequence is restored when at least this share of it is used
RAM_BYTES = (
    4 << 20
)  # a million tokens: first guess at `--cache-ram`, which engines do not say; and the most
MOST_BLOCKS = (
    32_768  # of one backend's pool, however small its blocks: about 9 MB (280 bytes each, measured)
)
MOST_RAM_BLOCKS = 16_384  # of one backend's RAM cache
GROWS, SHRINKS = 1.25, 0.4  # the guess, by one answer that speaks against it


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

    def correct(self, ticket: int, cached_bytes: int) -> None:
        """The engine had this many bytes of this request's prompt when it started it."""
        ...

    def resize(self, slots: int, capacity: int) -> None: ...

    def emptied(self) -> Cache:
        """The same cache after a restart of its engine."""
        ...

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
        depth = deepest(chain.hashes, self._held)
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

    def correct(self, ticket: int, cached_bytes: int) -> None:
        pass  # the request has put its blocks there since; what was evicted goes by age

    def resize(self, slots: int, capacity: int) -> None:  # noqa: ARG002
        self._capacity = capacity
        self._evict()

    def emptied(self) -> Pool:
        return Pool(self._capacity)

    def _evict(self) -> None:
        held = self._held
        while held and (self._size > self._capacity or len(held) > MOST_BLOCKS):
            _, size = held.popitem(last=False)
            self._size -= size


@dataclass(slots=True, eq=False)
class Kept:
    """A sequence that the engine keeps."""

    place: int  # its number among the engine's slots
    chain: Chain = EMPTY
    hashes: frozenset[int] = frozenset()
    ticket: int | None = None  # who is using it; None: idle


class Expected(NamedTuple):
    """What a request was expected to find when it started."""

    bytes: int
    saved: int | None  # the sequence in RAM that has it; None: a slot, or nothing
    evicted: bool  # had RAM been full by then?


class Sequences:
    """Whole sequences: one for each slot, and a RAM cache of what slots lost.

    Only slots that have a prompt's first block can have more of it, so a search goes through those alone.
    """

    def __init__(self, slots: int) -> None:
        self._idle: OrderedDict[Kept, None] = OrderedDict()  # the least recently used first
        self._running: dict[int, Kept] = {}  # by ticket
        self._first: dict[int, list[Kept]] = {}  # by their first block, in order of place
        self._ram = Ram()
        self._expected: OrderedDict[int, Expected] = OrderedDict()  # by ticket
        self._places = 0  # given so far
        self.resize(slots, 0)

    @property
    def blocks(self) -> int:
        kept = sum(len(one.hashes) for slots in self._first.values() for one in slots)
        return kept + self._ram.blocks

    def match(self, chain: Chain, *, busy_too: bool) -> int:
        hashes, depth = chain.hashes, 0
        for slot in self._first.get(hashes[0], ()):
            if (busy_too or slot.ticket is None) and hashes[depth] in slot.hashes:
                depth = deepest(hashes, slot.hashes, depth)
                if depth == len(hashes):
                    break
        if depth < len(hashes):
            depth, _ = self._ram.deeper(chain, depth)
        return chain.ends[depth - 1] if depth else 0

    def start(self, ticket: int, chain: Chain) -> None:
        """The engine's own choice: the idle slot with the longest common prefix, else the least recently used."""
        hashes, ends = chain.hashes, chain.ends
        slot, depth = self._longest(hashes)
        if slot is None or ends[depth - 1] <= TAKE_OVER * ends[-1]:
            slot = next(iter(self._idle), None)
            if slot is None:  # more than we know of: nothing can be said about it
                return
            depth = deepest(hashes, slot.hashes)
        common, saved = ends[depth - 1] if depth else 0, None
        if depth < len(hashes):
            depth, saved = self._ram.deeper(chain, depth)
        if saved is not None or self._ram.has_evicted:  # else no answer can say anything new
            self._expect(ticket, ends[depth - 1] if depth else 0, saved)
        if slot.hashes and common < SAVE_BELOW * slot.chain.size:
            self._ram.save(slot)
        self._fill(slot, chain)
        slot.ticket = ticket
        self._running[ticket] = slot
        del self._idle[slot]

    def end(self, ticket: int) -> None:
        slot = self._running.pop(ticket, None)
        if slot is not None:
            slot.ticket = None
            self._idle[slot] = None

    def correct(self, ticket: int, cached_bytes: int) -> None:
        """What was expected from RAM and not there is gone; what was there in spite of us says that RAM is larger."""
        expected = self._expected.pop(ticket, None)
        if expected is None:
            return
        if expected.saved is not None and cached_bytes + BLOCK_BYTES < expected.bytes:
            self._ram.lacked(expected.saved)
        elif expected.evicted and cached_bytes > expected.bytes + 2 * BLOCK_BYTES:
            self._ram.grow()

    def resize(self, slots: int, capacity: int) -> None:  # noqa: ARG002
        new = [Kept(self._places + number) for number in range(slots - self._count)]
        if new:
            self._places += len(new)
            idle = sorted([*self._idle, *new], key=lambda one: bool(one.hashes))  # empty ones first
            self._idle = OrderedDict.fromkeys(idle)
        while self._count > slots and self._idle:
            slot, _ = self._idle.popitem(last=False)
            self._fill(slot, EMPTY)

    def emptied(self) -> Sequences:
        return Sequences(self._count)

    @property
    def _count(self) -> int:
        return len(self._idle) + len(self._running)

    def _longest(self, hashes: tuple[int, ...]) -> tuple[Kept | None, int]:
        """The first idle slot that has the most leading blocks of these, and how many."""
        slot: Kept | None = None
        depth = 0
        for one in self._first.get(hashes[0], ()):
            if one.ticket is None and hashes[depth] in one.hashes:
                slot, depth = one, deepest(hashes, one.hashes, depth)
                if depth == len(hashes):
                    break
        return slot, depth

    def _fill(self, slot: Kept, chain: Chain) -> None:
        """It holds this sequence from now on, in place of its last one."""
        before, now = slot.chain.hashes[:1], chain.hashes[:1]
        slot.chain, slot.hashes = chain, frozenset(chain.hashes)
        if before == now:
            return
        for first in before:
            others = self._first[first]
            others.remove(slot)
            if not others:
                del self._first[first]
        for first in now:
            insort(self._first.setdefault(first, []), slot, key=lambda one: one.place)

    def _expect(self, ticket: int, size: int, saved: int | None) -> None:
        self._expected[ticket] = Expected(size, saved, self._ram.has_evicted)
        if len(self._expected) > 4 * self._count + 64:
            self._expected.popitem(last=False)


@dataclass(slots=True, eq=False)
class Ram:
    """What slots lost, oldest first. Owned by one `Sequences`.

    Its size is guessed high and shrinks by evidence: a prompt that is sent where it is not shows the error at once, one
    that is never sent where it is shows nothing. Mean TTFT of 8 cells of traces against the best other policy, first guess
    65,536 tokens / a million: 0.868 / 0.875 with engines that hold 60,000, 0.949 / 0.840 with those that hold a million.
    Shrinking by 0.8 in place of 0.4: 0.883 and 0.836.

    Each block remembers the newest sequence that has it, so looking for a prefix does not go through all of them.
    """

    has_evicted: bool = False
    _limit: int = RAM_BYTES
    _kept: OrderedDict[int, Chain] = field(default_factory=OrderedDict)
    _newest: dict[int, int] = field(default_factory=dict)  # hash: key of a kept sequence
    _size: int = 0
    _count: int = 0
    _blocks: int = 0

    @property
    def blocks(self) -> int:
        return self._blocks

    def deeper(self, chain: Chain, depth: int) -> tuple[int, int | None]:
        """Does a saved sequence have more leading blocks than `depth`? How many, and which one."""
        more = deepest(chain.hashes, self._newest, depth)
        if more > depth:
            key = self._newest[chain.hashes[more - 1]]
            if chain.ends[more - 1] >= RESTORE_ABOVE * self._kept[key].size:
                return more, key
        return depth, None

    def save(self, slot: Kept) -> None:
        self._count += 1
        chain = slot.chain
        self._kept[self._count] = chain
        self._newest.update(dict.fromkeys(chain.hashes, self._count))
        self._size += chain.size
        self._blocks += len(chain.hashes)
        self._evict()

    def lacked(self, key: int) -> None:
        """A sequence that should be there is not."""
        self._limit = int(self._limit * SHRINKS)
        if key in self._kept:
            self._drop(key)
        self._evict()

    def grow(self) -> None:
        self._limit = min(int(max(self._limit, RAM_BYTES // 256) * GROWS), RAM_BYTES)

    def _evict(self) -> None:
        while self._kept and (self._size > self._limit or self._blocks > MOST_RAM_BLOCKS):
            self.has_evicted = True
            self._drop(next(iter(self._kept)))

    def _drop(self, key: int) -> None:
        chain = self._kept.pop(key)
        self._size -= chain.size
        self._blocks -= len(chain.hashes)
        for one in chain.hashes:
            if self._newest.get(one) == key:
                del self._newest[one]
