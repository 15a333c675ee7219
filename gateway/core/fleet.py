"""What we believe of each backend. Owned and mutated by `core.dispatch` alone.

Laws held here: our own in-flight count is truth; what an engine reports is advice with an age (law 5).
A settling slot is not in flight and not lent again until a report shows it idle or its time has passed (law 1).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from gateway.core.breaker import Breaker, BreakerState
from gateway.core.pressure import Pressure
from gateway.core.residence import PRIOR_LOAD_S, Residence
from gateway.core.room import Room

PRIOR_PREFILL_RATE = 1_500.0  # tokens/s; design.md section 4, until the first sample
CAUTIOUS_PREFILL_RATE = 50.0  # tokens/s: a small model on a busy processor
PRIOR_SERVICE_S = 10.0  # seconds a permit is held; the same source
BYTES_PER_TOKEN = 4.0
LEARN = 0.2  # weight of a new sample in the moving averages
FIRST_SAMPLES = 4  # that weigh more: all of them the same
TRUST_AFTER = 2.0  # samples of its own that weigh as much as what all backends taught
MAX_SETTLE_S = 60.0
BATCH_TOKENS = 2_048  # llama-server looks at who left between batches (`-b`)
DECODE_SETTLE_S = (
    0.3  # a cancelled decode leaves a llama-server slot at its next token (engines.md 1.8)
)
REPORT_FADES_S = 10.0


class Fitness(StrEnum):
    """May this backend take new work?"""

    UP = "up"
    LOADING = "loading"  # it will be able to: requests may wait for it
    SLEEPING = "sleeping"  # takes work, and wakes by it
    DRAINING = "draining"  # takes no new work; what is in flight finishes
    DOWN = "down"


_SLEEPING, _TAKING = Fitness.SLEEPING, (Fitness.UP, Fitness.SLEEPING)  # each look at an Enum's
_CLOSED, _OPEN = BreakerState.CLOSED, BreakerState.OPEN  # member is a call


class Average:
    """A robust moving average: after the first, one sample moves it as if it were at most four times as far.

    With `shared`, the average of all backends, a backend that has few samples is believed to be like the others:
    without it, one that was never used looks faster than any that was, and every conversation moves there. What is
    shared shares nothing itself.
    """

    __slots__ = ("_shared", "own", "samples")

    def __init__(self, prior: float, shared: Average | None = None) -> None:
        self.own = prior
        self._shared = shared
        self.samples = 0

    @property
    def value(self) -> float:
        if self._shared is None:
            return self.own
        weight = self.samples / (self.samples + TRUST_AFTER)
        return weight * self.own + (1 - weight) * self._shared.own

    @property
    def is_known(self) -> bool:
        """Was anything measured, here or elsewhere?"""
        return self.samples > 0 or (self._shared is not None and self._shared.samples > 0)

    def learn(self, sample: float) -> None:
        """Take a sample; what is not positive says nothing."""
        if sample <= 0:
            return
        if self._shared is not None:
            self._shared.learn(sample)
        own = self.own
        if self.samples == 0:
            self.own = sample
        else:
            least, most = own / 4, own * 4
            if not least <= sample <= most:
                sample = most if sample > most else least
            weight = 1 / (self.samples + 1) if self.samples < FIRST_SAMPLES else LEARN
            self.own = own + weight * (sample - own)
        self.samples += 1


@dataclass(slots=True, eq=False)
class Habits:
    """What all backends together have taught, for one that has not yet."""

    prefill_rate: Average = field(default_factory=lambda: Average(PRIOR_PREFILL_RATE))
    bytes_per_token: Average = field(default_factory=lambda: Average(BYTES_PER_TOKEN))
    service_s: Average = field(default_factory=lambda: Average(PRIOR_SERVICE_S))
    answer_s: Average = field(default_factory=lambda: Average(PRIOR_SERVICE_S))


@dataclass(frozen=True, slots=True)
class Advice:
    """What the engine itself last said of its load; None where it does not say."""

    at: float
    running: int | None = None
    waiting: int | None = None
    kv_used_ratio: float | None = None


class Settling(NamedTuple):
    """Permits of a cancelled request whose slots may still be at work."""

    since: float
    until: float
    permits: int
    tokens: int  # of the shared KV cache that they may still hold


@dataclass(slots=True, eq=False)
class Backend:
    """One engine at one address, as dispatch sees it. Times are monotonic seconds, loads are permits or tokens."""

    name: str
    habits: Habits = field(default_factory=Habits)
    slots: int = 1
    slots_assumed: bool = (
        False  # nobody said how many; the engine may queue what we send beyond its own
    )
    share: int | None = None  # of them, what this gateway may lend of those it shares; None: all
    fitness: Fitness = Fitness.DOWN
    draining: bool = False
    settles: bool = False  # llama-server and Ollama: a cancelled slot is not free at once
    in_flight: int = 0
    settling: list[Settling] = field(default_factory=list)
    backlog_tokens: int = 0  # uncached prompt tokens sent there that have not reached a first token
    prefill_rate: Average = field(init=False)
    bytes_per_token: Average = field(init=False)
    service_s: Average = field(init=False)
    answer_s: Average = field(init=False)  # seconds from a first token to the end of its answer
    load_s: Average = field(init=False)  # seconds to load a model, or to wake
    breaker: Breaker = field(default_factory=Breaker)
    pressure: Pressure = field(default_factory=Pressure)
    room: Room = field(default_factory=Room)
    residence: Residence = field(default_factory=Residence)
    advice: Advice | None = None
    released: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=64))
    reserved_by: int | None = None  # the ticket for which freed slots are kept
    idle_wanted_since: float | None = None  # a slot is free, and somebody who could use it waits
    idle_spells: deque[float] = field(
        default_factory=lambda: deque(maxlen=256)
    )  # seconds, not yet told
    since_batch: int = 0  # interactive starts since the last batch start while batch waits

    def __post_init__(self) -> None:
        self.prefill_rate = Average(PRIOR_PREFILL_RATE, self.habits.prefill_rate)
        self.bytes_per_token = Average(BYTES_PER_TOKEN, self.habits.bytes_per_token)
        self.service_s = Average(PRIOR_SERVICE_S, self.habits.service_s)
        self.answer_s = Average(PRIOR_SERVICE_S, self.habits.answer_s)
        self.load_s = Average(PRIOR_LOAD_S)

    def end_idle(self, now: float) -> None:
        """Its free slot was given away, or nobody wants it any more."""
        if self.idle_wanted_since is not None:
            self.idle_spells.append(now - self.idle_wanted_since)
            self.idle_wanted_since = None

    @property
    def settling_permits(self) -> int:
        return sum(one.permits for one in self.settling) if self.settling else 0

    @property
    def takes_work(self) -> bool:
        """May a request start here now, slots permitting?"""
        return self.fitness in _TAKING and not self.draining and self.breaker.state is not _OPEN

    @property
    def is_hopeful(self) -> bool:
        """May a request wait for this backend? A loading one, or one on trial, comes back soon."""
        return self.fitness is not Fitness.DOWN and not self.draining and not self.breaker.is_open

    @property
    def lendable(self) -> int:
        """The most permits we would lend now: fewer than its slots after a failure, or when it said it was busy."""
        most = self.slots
        if self.pressure.cap is not None:
            most = self.pressure.limit(most)
        if self.breaker.state is not _CLOSED:
            most = self.breaker.cap(most)
        return most if self.share is None else min(most, self.share)

    @property
    def free(self) -> int:
        """Permits that may be lent now. Negative counts after a shrink lend nothing new and cut nothing."""
        if not self.takes_work:
            return 0
        if not self.settling:
            return max(0, self.lendable - self.in_flight)
        own = self.slots if self.share is None else min(self.slots, self.share)
        return max(0, min(self.lendable, own - self.settling_permits) - self.in_flight)

    @property
    def surely_idle(self) -> bool:
        """Is there a slot that is free beyond doubt? Of a number that is only assumed, the first one."""
        return not self.slots_assumed or not self.in_flight

    def free_for(self, ticket: int) -> int:
        """Free permits, unless they are being kept for somebody else."""
        if self.reserved_by is not None and self.reserved_by != ticket:
            return 0
        return self.free

    def has_room(self, prompt_bytes: int, permits: int, max_tokens: int | None) -> bool:
        """Does a request fit into the KV cache that its slots share?"""
        if self.room.tokens is None:
            return True
        need = self.room.need(self.tokens_in(prompt_bytes), permits, max_tokens)
        alone = not (self.in_flight or self.settling)
        return self.room.has(need, sum(one.tokens for one in self.settling), alone=alone)

    def tokens_in(self, prompt_bytes: int) -> int:
        return round(prompt_bytes / self.bytes_per_token.value)

    def must_load(self, model: str) -> bool:
        """Would a request for this model have to wait until it is loaded?"""
        residence = self.residence
        if residence.loaded is not None and not residence.has(model):
            return True
        return self.fitness is _SLEEPING

    def others(self, now: float) -> float:
        """Requests of other clients inside the engine, by its last report, fading with its age."""
        advice = self.advice
        if advice is None or advice.running is None:
            return 0.0
        age = now - advice.at
        if age >= REPORT_FADES_S:
            return 0.0
        ours = self.in_flight + self.settling_permits
        ours += sum(permits for at, permits in self.released if at > advice.at - 2.0)
        foreign = max(0, advice.running + (advice.waiting or 0) - ours)
        return foreign * (1 - age / REPORT_FADES_S)

    def prefill_left_s(self, tokens: int, elapsed_s: float) -> float:
        """How long it may go on computing these prompt tokens, `elapsed_s` after they were sent.

        While no rate was ever measured, a slow one: to lend a slot that is still at work is worse than to wait for the
        report that shows it idle.
        """
        rate = self.prefill_rate.value if self.prefill_rate.is_known else CAUTIOUS_PREFILL_RATE
        return tokens / rate - elapsed_s

    def settle(self, now: float, seconds: float, permits: int, tokens: int = 0) -> None:
        self.settling.append(Settling(now, now + min(seconds, MAX_SETTLE_S), permits, tokens))

    def expire_settling(self, now: float) -> None:
        if self.settling:
            self.settling = [one for one in self.settling if one.until > now]

    def hear(self, advice: Advice, asked_at: float) -> None:
        """Take a report: it corrects what we believe of settling slots, and ages from now on.

        Only a report that was asked for after the cancel can say that the cancelled slot is idle.
        """
        self.advice = advice
        if advice.running is None or not self.settling:
            return
        busy = max(0, advice.running - self.in_flight)
        kept: list[Settling] = []
        for one in self.settling:
            if one.since >= asked_at or busy > 0:
                kept.append(one)
                busy -= one.permits
        self.settling = kept
