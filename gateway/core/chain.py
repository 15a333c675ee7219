"""A prompt as chained block hashes.

Law of this file: equal hashes mean equal prefixes. Each hash covers all before it; pieces (tools, system, then message
by message) are cut one by one, so one more turn leaves all earlier blocks as they were.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from struct import Struct
from typing import Final

import msgspec

BLOCK_BYTES = 512
MAX_BLOCKS = 4_096  # of one prompt: 2 MiB are told apart, what follows is not

_blocks: Final = Struct(f"{BLOCK_BYTES}s").iter_unpack


class Chain(msgspec.Struct, frozen=True, eq=False, gc=False):
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
        size = min(len(piece), MAX_BLOCKS * BLOCK_BYTES)
        whole = size - size % BLOCK_BYTES
        for block in _blocks(piece[:whole]):  # cut in C: the loop is most of what a prompt costs
            last = hash((last, block))
            hashes.append(last)
        ends += range(end + BLOCK_BYTES, end + whole + 1, BLOCK_BYTES)
        if whole < size:
            last = hash((last, bytes(piece[whole:size])))
            hashes.append(last)
            ends.append(end + size)
        end += len(piece)
        if len(hashes) >= MAX_BLOCKS:
            break
    return Chain(tuple(hashes[:MAX_BLOCKS]), tuple(ends[:MAX_BLOCKS]))


def deepest(hashes: Sequence[int], held: Container[int], least: int = 0) -> int:
    """How many leading blocks are held, by binary search: a block that is held has all before it held, nearly always.

    An LRU pool may have lost an early block; then the engine cannot use the later ones either. `least`: so many are
    known to be held, and nothing is said when the next one is not.
    """
    if least >= len(hashes) or hashes[least] not in held:
        return least
    low, high = least + 1, len(hashes)
    while low < high:
        middle = (low + high + 1) // 2
        if hashes[middle - 1] in held:
            low = middle
        else:
            high = middle - 1
    return low
