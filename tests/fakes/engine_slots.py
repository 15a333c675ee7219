"""Slots and prompt caches inside the scripted engine: more requests than slots wait in order, without a word.

A token is four characters. llama-server keeps one sequence per slot, which serves nobody else while it runs; vLLM
shares one pool. Only what affinity tests need is modelled: the longest common prefix.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field

CHARS_PER_TOKEN = 4
BLOCK_TOKENS = 16


@dataclass(slots=True, eq=False)
class Slot:
    number: int
    text: str = ""
    busy: bool = False
    used: int = 0  # a turn counter, for least recently used
    decoded: int = 0
    ever_used: bool = False


@dataclass(slots=True, eq=False)
class Lease:
    """Slots held by one request, and what of its prompt was cached."""

    slots: list[Slot]
    cached_tokens: int


@dataclass(slots=True)
class Slots:
    """A line and the places it waits for. `shared`: one pool of blocks (vLLM) instead of a sequence per slot."""

    count: int
    shared: bool = False
    caching: bool = True
    places: list[Slot] = field(init=False)
    waiting: deque[tuple[int, str, asyncio.Future[Lease]]] = field(default_factory=deque)
    seen: deque[str] = field(default_factory=lambda: deque(maxlen=64))
    turn: int = 0

    def __post_init__(self) -> None:
        self.places = [Slot(number) for number in range(self.count)]

    @property
    def running(self) -> int:
        return sum(slot.busy for slot in self.places)

    async def take(self, permits: int, prompt: str) -> Lease:
        """Waits for `permits` slots at once, first come first served."""
        turn: asyncio.Future[Lease] = asyncio.get_running_loop().create_future()
        entry = (permits, prompt, turn)
        self.waiting.append(entry)
        self._wake()
        try:
            return await turn
        except asyncio.CancelledError:
            if entry in self.waiting:
                self.waiting.remove(entry)
                self._wake()  # a big one that left may have kept small ones waiting
            elif not turn.cancelled():
                self.give(turn.result())
            raise

    def give(self, lease: Lease) -> None:
        for slot in lease.slots:
            slot.busy = False
            slot.decoded = 0
        self._fit()
        self._wake()

    def resize(self, count: int) -> None:
        """More or fewer places; running ones stay until they end."""
        new = range(len(self.places), count)
        self.count = count
        self.places += [Slot(number) for number in new]
        self._fit()
        self._wake()

    def _fit(self) -> None:
        for slot in [one for one in reversed(self.places) if not one.busy]:
            if len(self.places) > self.count:
                self.places.remove(slot)

    def forget(self) -> None:
        """As after a restart."""
        self.seen.clear()
        for slot in self.places:
            slot.text, slot.ever_used = "", False

    def _wake(self) -> None:
        while self.waiting and self.count - self.running >= self.waiting[0][0]:
            permits, prompt, turn = self.waiting.popleft()
            if not turn.cancelled():
                turn.set_result(self._lease(permits, prompt))

    def _lease(self, permits: int, prompt: str) -> Lease:
        cached = self._shared_prefix(prompt) if self.shared else 0
        taken = []
        for _ in range(permits):
            slot, own = self._best(prompt)
            cached = cached if self.shared else max(cached, own)
            self.turn += 1
            slot.busy, slot.ever_used, slot.text, slot.used = True, True, prompt, self.turn
            taken.append(slot)
        if self.shared:
            self.seen.append(prompt)
        if not self.caching or not prompt:
            return Lease(taken, 0)
        whole = len(prompt) // CHARS_PER_TOKEN
        return Lease(taken, max(0, min(cached // CHARS_PER_TOKEN, whole - 1)))

    def _best(self, prompt: str) -> tuple[Slot, int]:
        idle = [slot for slot in self.places if not slot.busy]
        ranked = [(common_prefix(slot.text, prompt), slot) for slot in idle]
        length, best = max(ranked, key=lambda pair: (pair[0], -pair[1].used))
        if length * 10 > len(prompt):
            return best, length
        return min(idle, key=lambda slot: slot.used), 0

    def _shared_prefix(self, prompt: str) -> int:
        longest = max((common_prefix(text, prompt) for text in self.seen), default=0)
        block = BLOCK_TOKENS * CHARS_PER_TOKEN
        return longest // block * block


def common_prefix(one: str, other: str) -> int:
    """How many leading characters are the same."""
    low, high = 0, min(len(one), len(other))
    while low < high:  # halving: comparing slices is fast, comparing characters is not
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
