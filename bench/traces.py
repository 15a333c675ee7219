"""Workloads for the simulation: recorded traces, and agents in a closed loop.

A trace line is {"timestamp" ms, "input_length", "output_length" tokens, "hash_ids": ids of the prompt's 512-token blocks};
equal ids mean an equal prefix (Mooncake, FAST'25, repository kvcache-ai/Mooncake, Apache-2.0). The conversation trace
notes times to three seconds only: arrivals are spread over those three seconds.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random

from bench.virtual import Job, World

BLOCK = 512
GRAIN_S = 3.0


@dataclass(frozen=True, slots=True)
class Line:
    at: float
    ids: tuple[int, ...]
    ends: tuple[int, ...]
    out_tokens: int
    session: int


def load(path: Path) -> list[Line]:
    """The lines of a trace, `.jsonl` or `.jsonl.gz`, in order."""
    packed = path.read_bytes()
    plain = gzip.decompress(packed) if path.suffix == ".gz" else packed
    rows = [json.loads(text) for text in plain.splitlines()]
    coarse = len({row["timestamp"] for row in rows}) < len(rows) / 2
    rng = Random(1)
    out = [_line(row, rng.random() * GRAIN_S if coarse else 0.0) for row in rows]
    return sorted(out, key=lambda line: line.at)


def _line(row: dict, spread_s: float) -> Line:
    tokens = max(1, row["input_length"])
    ids = tuple(row["hash_ids"][: -(-tokens // BLOCK)]) or (-1,)
    ends = tuple(min(BLOCK * (n + 1), tokens) for n in range(len(ids)))
    # all conversations share their first block; the second tells them apart
    session = ids[min(1, len(ids) - 1)]
    return Line(
        row["timestamp"] / 1000 + spread_s, ids, ends, max(1, row["output_length"]), session
    )


def window(lines: list[Line], count: int, seed: int) -> list[Line]:
    """`count` lines in a row, from a place that depends on the seed."""
    first = Random(seed).randrange(max(1, len(lines) - count + 1))
    return lines[first : first + count]


def replay(world: World, lines: list[Line], stretch: float) -> None:
    """Let them arrive, `stretch` times as slowly as recorded."""
    start = lines[0].at
    for line in lines:
        job = Job(line.ids, line.ends, line.out_tokens, line.session)
        world.at((line.at - start) * stretch, lambda job=job: world.arrive(job))


@dataclass(frozen=True, slots=True)
class Agents:
    """Scenarios A, B and C of the HTTP bench, in tokens: a shared prompt, one's own context, and turns."""

    agents: int = 16
    turns: int = 6
    shared: int = 800
    own: int = 4000
    out_tokens: int = 32
    think_s: float = 3.0


SCENARIOS = {
    "A own contexts": Agents(),
    "B shared prompt": Agents(shared=4000, own=480),
    "C twice the slots": Agents(agents=32, turns=4, own=1900, out_tokens=64, think_s=1.0),
    "D long crowd": Agents(agents=48, turns=8, own=3000, out_tokens=128, think_s=5.0),
}


def agents(world: World, shape: Agents, seed: int) -> None:
    """Start them; each asks its next question when the answer to the last one ended."""
    fresh = iter(range(1_000_000, 10**9))
    shared = _cut(shape.shared, fresh)
    for n in range(shape.agents):
        _Agent(world, shape, n, Random(seed * 1000 + n), fresh).begin(shared)


class _Agent:
    def __init__(self, world: World, shape: Agents, number: int, rng: Random, fresh) -> None:
        self.world, self.shape, self.number, self.rng, self.fresh = world, shape, number, rng, fresh
        self.ids: list[int] = []
        self.ends: list[int] = []
        self.turns = 0

    def begin(self, shared: list[tuple[int, int]]) -> None:
        self._grow(shared)
        self._grow(_cut(self.shape.own, self.fresh))
        self.world.at(self.rng.random() * self.shape.think_s * 2, self._ask)

    def _grow(self, blocks: list[tuple[int, int]]) -> None:
        for one, size in blocks:
            self.ids.append(one)
            self.ends.append((self.ends[-1] if self.ends else 0) + size)

    def _ask(self) -> None:
        job = Job(tuple(self.ids), tuple(self.ends), self.shape.out_tokens, self.number)
        job.after = self._answered
        self.world.arrive(job)

    def _answered(self, now: float) -> None:
        self.turns += 1
        if self.turns >= self.shape.turns:
            return
        self._grow(_cut(self.shape.out_tokens + 64, self.fresh))
        self.world.at(now + self.shape.think_s * (0.5 + self.rng.random()), self._ask)


def _cut(tokens: int, fresh: Iterator[int], block: int = 128) -> list[tuple[int, int]]:
    """Blocks of at most `block` tokens with ids that nobody else has."""
    sizes = [block] * (tokens // block) + ([tokens % block] if tokens % block else [])
    return [(next(fresh), size) for size in sizes]
