"""Engines in virtual time: what `bench.sim_engine` does step by step, between events and by arithmetic.

A step of a continuous-batching engine carries one token for each decoding sequence and up to 512 prompt tokens, and lasts

    itl x (1 + slowdown x (decoding - 1)) + prompt tokens / prefill

so between two events (a prefill ends, a sequence ends, a request comes) all progress at constant rates, and a run of
thousands of requests takes seconds. Prompts are chains of block ids: equal ids mean equal prefixes.

llama-server: a sequence lives in a slot; a request takes the idle slot with the longest common prefix (if above 10 % of
the prompt), else the least recently used one; what a slot loses goes to RAM. vllm: one pool of blocks, shared at once.
More requests than slots wait inside, in order, as in the real ones.
"""

from __future__ import annotations

import heapq
import itertools
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field

STEP = 512  # prompt tokens


@dataclass(slots=True, eq=False)
class Job:
    """One request. Times are virtual seconds; `ends[i]` is how many tokens block i closes."""

    ids: tuple[int, ...]
    ends: tuple[int, ...]
    out_tokens: int
    session: int
    number: int = 0
    came: float = 0.0
    began: float = 0.0  # a slot of an engine took it
    first: float = 0.0
    ended: float = 0.0
    engine: int = -1
    cached: int = 0
    todo: float = 0.0
    left: float = 0.0
    place: object = None
    after: Callable[[float], None] | None = None  # closed loop: what follows its end

    @property
    def tokens(self) -> int:
        return self.ends[-1]


@dataclass(frozen=True, slots=True)
class Speed:
    """One engine's size. Tokens/s, seconds, tokens."""

    kind: str = "llama-server"
    slots: int = 4
    prefill: float = 2000.0
    itl_s: float = 0.015
    slowdown: float = 0.15
    kv_tokens: int = 60_000
    ram_tokens: int = 60_000


def common(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    """How many leading blocks two chains share."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[middle - 1] == b[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low


@dataclass(slots=True, eq=False)
class Slot:
    ids: tuple[int, ...] = ()
    ends: tuple[int, ...] = ()
    busy: bool = False
    used: float = 0.0

    @property
    def size(self) -> int:
        return self.ends[-1] if self.ends else 0

    def hit(self, job: Job) -> int:
        depth = common(self.ids, job.ids)
        return job.ends[depth - 1] if depth else 0


class SlotCache:
    """llama-server: sequences in slots, and what slots lost in RAM."""

    def __init__(self, speed: Speed) -> None:
        self.slots = [Slot() for _ in range(speed.slots)]
        self.ram: deque[Slot] = deque()
        self.ram_size, self.ram_most = 0, speed.ram_tokens

    def take(self, job: Job) -> bool:
        idle = [one for one in self.slots if not one.busy]
        if not idle:
            return False
        best = max(idle, key=lambda one: one.hit(job))
        hit = best.hit(job)
        if hit < 0.1 * job.tokens:
            best = min(idle, key=lambda one: one.used)
            hit = best.hit(job)
        if best.ids and hit < 0.5 * best.size:
            self.ram.append(Slot(best.ids, best.ends))
            self.ram_size += best.size
        for saved in self.ram:
            n = saved.hit(job)
            if n > hit and n >= 0.25 * saved.size:
                hit = n
        while self.ram_size > self.ram_most and self.ram:
            self.ram_size -= self.ram.popleft().size
        best.busy, best.ids, best.ends = True, job.ids, job.ends
        job.place, job.cached = best, min(hit, job.tokens - 1)
        return True

    def prefilled(self, job: Job) -> None:
        pass  # a running sequence serves nobody else

    def give(self, now: float, job: Job) -> None:
        job.place.busy, job.place.used = False, now


class BlockCache:
    """vLLM: shared blocks, the least recently used out."""

    def __init__(self, speed: Speed) -> None:
        self.free, self.most = speed.slots, speed.kv_tokens
        self.blocks: OrderedDict[int, int] = OrderedDict()
        self.size = 0

    def take(self, job: Job) -> bool:
        if not self.free:
            return False
        self.free -= 1
        hit = 0
        for one, end in zip(job.ids, job.ends, strict=True):
            if one not in self.blocks:
                break
            self.blocks.move_to_end(one)
            hit = end
        job.cached = min(hit, job.tokens - 1)
        return True

    def prefilled(self, job: Job) -> None:
        before = 0
        for one, end in zip(job.ids, job.ends, strict=True):
            if one not in self.blocks:
                self.blocks[one] = end - before
                self.size += end - before
            self.blocks.move_to_end(one)
            before = end
        while self.size > self.most:
            self.size -= self.blocks.popitem(last=False)[1]

    def give(self, _now: float, job: Job) -> None:
        self.free += 1
        self.prefilled(job)


class Engine:
    """One simulated engine. Owned by `World`."""

    def __init__(self, number: int, speed: Speed) -> None:
        self.number, self.speed = number, speed
        self.cache = SlotCache(speed) if speed.kind == "llama-server" else BlockCache(speed)
        self.waiting: deque[Job] = deque()
        self.prefilling: deque[Job] = deque()
        self.decoding: list[Job] = []
        self.at = 0.0
        self.version = 0
        self.computed = 0
        self.slot_seconds = 0.0

    def step_s(self) -> float:
        speed, d = self.speed, len(self.decoding)
        decode = speed.itl_s * (1 + speed.slowdown * (d - 1)) if d else 0.0
        return decode + (STEP / speed.prefill if self.prefilling else 0.0)

    def advance(self, now: float) -> None:
        passed, self.at = now - self.at, now
        if passed <= 0 or not (self.prefilling or self.decoding):
            return
        steps = passed / self.step_s()
        self.slot_seconds += passed * (len(self.prefilling) + len(self.decoding))
        if self.prefilling:
            self.prefilling[0].todo -= steps * STEP
        for job in self.decoding:
            job.left -= steps

    def next_event(self) -> float | None:
        """Virtual time at which something ends, if nothing else happens."""
        step = self.step_s()
        if not step:
            return None
        steps = min((job.left for job in self.decoding), default=float("inf"))
        if self.prefilling:
            steps = min(steps, self.prefilling[0].todo / STEP)
        return self.at + max(steps, 0.0) * step

    def admit(self, now: float) -> None:
        while self.waiting and self.cache.take(self.waiting[0]):
            job = self.waiting.popleft()
            job.began, job.todo = now, max(1, job.tokens - job.cached)
            job.left = max(0, job.out_tokens - 1)
            self.computed += int(job.todo)
            self.prefilling.append(job)


@dataclass(slots=True)
class World:
    """The clock, the engines, and who is told what. `policy` is one of `bench.policies`."""

    engines: list[Engine]
    policy: object
    now: float = 0.0
    done: list[Job] = field(default_factory=list)
    _heap: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    _order: itertools.count = field(default_factory=itertools.count)

    def at(self, when: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._heap, (when, next(self._order), what))

    def arrive(self, job: Job) -> None:
        job.came = self.now
        self.policy.arrive(self.now, job)

    def send(self, job: Job, number: int) -> None:
        """The policy's decision: this engine."""
        engine = self.engines[number]
        job.engine = number
        engine.advance(self.now)
        engine.waiting.append(job)
        engine.admit(self.now)
        self._arm(engine)

    def run(self) -> None:
        while self._heap:
            when, _, what = heapq.heappop(self._heap)
            self.now = max(self.now, when)
            what()

    def _arm(self, engine: Engine) -> None:
        engine.version += 1
        due = engine.next_event()
        if due is not None:
            self.at(due, lambda version=engine.version: self._on_engine(engine, version))

    def _on_engine(self, engine: Engine, version: int) -> None:
        if version != engine.version:
            return
        engine.advance(self.now)
        ended = [job for job in engine.decoding if job.left <= 1e-6]
        if engine.prefilling and engine.prefilling[0].todo <= 1e-6:
            job = engine.prefilling.popleft()
            engine.cache.prefilled(job)
            job.first = self.now
            self.policy.first(self.now, job)
            (ended if job.left <= 0 else engine.decoding).append(job)
        for job in ended:
            if job in engine.decoding:
                engine.decoding.remove(job)
            engine.cache.give(self.now, job)
            job.ended = self.now
        engine.admit(self.now)
        self._arm(engine)
        for job in ended:
            self.done.append(job)
            self.policy.ended(self.now, job)
            if job.after is not None:
                job.after(self.now)
