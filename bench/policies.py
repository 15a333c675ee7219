"""Slotgate's `core.dispatch` and the policies that others publish, for engines in virtual time.

round robin, least in flight, power of two, consistent hash with bounded load (1.25; Mirrokni, Thorup and
Zadimoghaddam 2016), and cache-aware as sglang-router and vllm-router document it: a prefix tree for each worker, the
worker with the best match if it is at least 0.3 of the prompt, else the smallest tree; the least loaded one when
max - min > 64 and max > 1.5 x min requests. None of them has a queue: the engines' own queues hold what waits.
"""

from __future__ import annotations

from bisect import bisect
from math import ceil
from random import Random
from zlib import crc32

from bench.virtual import Job, World
from gateway.core.dispatch import Dispatch, Limits, Offer, Start, Used
from gateway.core.fleet import Fitness
from gateway.core.prefix import Chain

BYTES = 4  # of a token


class Direct:
    """A policy that sends every request on at once. `pick` is all it decides."""

    def __init__(self, count: int, seed: int) -> None:
        self.load = [0] * count
        self.rng = Random(seed)
        self.world: World | None = None

    def arrive(self, _now: float, job: Job) -> None:
        number = self.pick(job)
        self.load[number] += 1
        self.world.send(job, number)

    def first(self, now: float, job: Job) -> None:
        pass

    def ended(self, _now: float, job: Job) -> None:
        self.load[job.engine] -= 1

    def pick(self, job: Job) -> int:
        raise NotImplementedError


class RoundRobin(Direct):
    turn = -1

    def pick(self, _job: Job) -> int:
        self.turn = (self.turn + 1) % len(self.load)
        return self.turn


class LeastInFlight(Direct):
    def pick(self, _job: Job) -> int:
        least = min(self.load)
        return self.rng.choice([n for n, load in enumerate(self.load) if load == least])


class PowerOfTwo(Direct):
    def pick(self, _job: Job) -> int:
        a, b = self.rng.sample(range(len(self.load)), 2)
        return a if self.load[a] <= self.load[b] else b


class BoundedHash(Direct):
    def __init__(self, count: int, seed: int) -> None:
        super().__init__(count, seed)
        self.ring = sorted((crc32(b"%d/%d" % (n, v)), n) for n in range(count) for v in range(160))
        self.points = [point for point, _ in self.ring]

    def pick(self, job: Job) -> int:
        most = ceil(1.25 * (sum(self.load) + 1) / len(self.load))
        at = bisect(self.points, crc32(b"s%d" % job.session))
        for step in range(len(self.ring)):
            number = self.ring[(at + step) % len(self.ring)][1]
            if self.load[number] < most:
                return number
        raise AssertionError("one is always below the bound")


class CacheAware(Direct):
    def __init__(self, count: int, seed: int) -> None:
        super().__init__(count, seed)
        self.trees: list[dict[int, None]] = [{} for _ in range(count)]

    def pick(self, job: Job) -> int:
        most, least = max(self.load), min(self.load)
        if most - least > 64 and most > 1.5 * least:
            number = self.load.index(least)
        else:
            number = self._by_tree(job)
        self.trees[number].update(dict.fromkeys(job.ids))
        return number

    def _by_tree(self, job: Job) -> int:
        depths = [self._depth(tree, job.ids) for tree in self.trees]
        best = max(depths)
        if best and job.ends[best - 1] >= 0.3 * job.tokens:
            return depths.index(best)
        return min(range(len(self.trees)), key=lambda n: len(self.trees[n]))

    @staticmethod
    def _depth(tree: dict[int, None], ids: tuple[int, ...]) -> int:
        low, high = 0, len(ids)
        while low < high:
            middle = (low + high + 1) // 2
            if ids[middle - 1] in tree:
                low = middle
            else:
                high = middle - 1
        return low


class Slotgate:
    """The real dispatch, told what a gateway would learn: first tokens, ends, and the tokens of `usage`."""

    def __init__(self, world: World, *, reports_cached: bool = True) -> None:
        self.world = world
        self.reports_cached = reports_cached
        self.dispatch = Dispatch(Limits(queue=10**9, max_wait_s=1e9))
        self.jobs: dict[int, Job] = {}
        self.tickets = 0
        self.wake = float("inf")
        self.predicted = self.cached = 0
        for engine in world.engines:
            speed, name = engine.speed, f"e{engine.number}"
            pooled = speed.kind != "llama-server"
            self.dispatch.put(
                0.0, name, slots=speed.slots, settles=not pooled, pooled=pooled,
                kv_tokens=speed.kv_tokens if pooled else None,
            )  # fmt: skip
            self.dispatch.report(0.0, name, Fitness.UP, None, 0.0)
        self.pool = frozenset(self.dispatch.backends)

    def arrive(self, now: float, job: Job) -> None:
        self.tickets += 1
        job.number = self.tickets
        self.jobs[self.tickets] = job
        chain = Chain(job.ids, tuple(end * BYTES for end in job.ends))
        offer = Offer(
            self.tickets, "k", self.pool, prompt_bytes=job.tokens * BYTES,
            conversation=crc32(b"%d" % job.session), chain=chain,
        )  # fmt: skip
        self.carry_out(self.dispatch.offer(now, offer))

    def first(self, now: float, job: Job) -> None:
        self.dispatch.first_token(now, job.number)

    def ended(self, now: float, job: Job) -> None:
        del self.jobs[job.number]
        self.predicted += self.dispatch.held[job.number].matched // BYTES
        self.cached += job.cached
        used = Used(job.tokens, job.cached if self.reports_cached else None)
        self.carry_out(self.dispatch.release(now, job.number, served=True, used=used))

    def carry_out(self, decisions) -> None:
        for one in decisions:
            if isinstance(one, Start):
                self.world.send(self.jobs[one.ticket], int(one.backend[1:]))
        due = self.dispatch.wake_at(self.world.now)
        if due is not None and due < min(self.wake, 1e8):
            self.wake = due
            self.world.at(due, lambda due=due: self._tick(due))

    def _tick(self, due: float) -> None:
        if due == self.wake:
            self.wake = float("inf")
            self.carry_out(self.dispatch.tick(self.world.now))


PEERS = {
    "round robin": RoundRobin,
    "least in flight": LeastInFlight,
    "power of two": PowerOfTwo,
    "bounded hash": BoundedHash,
    "cache-aware": CacheAware,
}


def policy(name: str, world: World, seed: int):
    """The policy of this name, in charge of this world."""
    made = Slotgate(world) if name == "slotgate" else PEERS[name](len(world.engines), seed)
    made.world = world
    world.policy = made
    return made
