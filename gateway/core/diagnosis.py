"""What is wrong, in words: from figures to sentences that say what to do.

Law of this file: a sentence names who it is about, gives the figure it rests on, and ends with something that a
person can do. What is merely unusual gets no sentence.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final, Literal

Level = Literal["bad", "warning", "hint"]

STALE_S: Final = 30.0  # probes come at least every five seconds
KV_FULL: Final = 0.95
QUEUE_FULL: Final = 0.01  # share of the last minute
SLOW_TTFT_S: Final = 1.0  # below, nobody asks where the time goes
LEAST_REQUESTS: Final = 5  # of the last minute, before a mean says something
LAG_S: Final = 0.1


@dataclass(frozen=True, slots=True)
class Finding:
    """One sentence. `about`: the backend's name, or empty."""

    level: Level
    text: str
    about: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendFacts:
    """One backend, as far as something could be wrong with it. Counts are of the last minute."""

    name: str
    state: str
    slots: int = 1
    slots_assumed: bool = False
    report_age_s: float | None = 0.0
    others: float = 0.0  # requests in it that did not come through here
    kv_used_ratio: float | None = None
    preemptions: int = 0
    errors: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """The gateway as a whole, over the last minute. Means are None without samples."""

    backends: tuple[BackendFacts, ...] = ()
    queue_full_share: float = 0.0
    shed: int = 0
    timed_out: int = 0  # of those shed: waited max_wait_s
    streams: int = 0  # that reached their first token
    ttft_mean_s: float | None = None
    wait_mean_s: float | None = None
    config_ok: bool = True
    redis_up: bool | None = None  # None: there is no Redis
    loop_lag_s: float = 0.0
    log_dropped: int = 0


def findings(facts: Facts) -> list[Finding]:
    """Everything that is to be said, the worst first."""
    found = [*_fleet(facts), *_queue(facts), *_own(facts)]
    for backend in facts.backends:
        found += _backend(backend)
    ranks = ("bad", "warning", "hint")
    return sorted(found, key=lambda one: ranks.index(one.level))


def _fleet(facts: Facts) -> Iterator[Finding]:
    if not any(one.state in ("up", "sleeping") for one in facts.backends):
        yield Finding(
            "bad", "No backend can take work, so every request is refused: start an engine."
        )


def _queue(facts: Facts) -> Iterator[Finding]:
    if facts.queue_full_share >= QUEUE_FULL:
        yield Finding(
            "bad",
            f"Queue full {_percent(facts.queue_full_share)} of the last minute, {_count(facts.shed, 'request')} "
            "refused: add a slot or a backend.",
        )
    elif facts.shed - facts.timed_out > 0:
        yield Finding(
            "warning",
            f"{_count(facts.shed - facts.timed_out, 'request')} refused in the last minute for lack of room: "
            "add a slot or a backend.",
        )
    if facts.timed_out:
        yield Finding(
            "bad",
            f"{_count(facts.timed_out, 'request')} waited in vain for a slot in the last minute: add a slot or a "
            "backend, or make the queue shorter so that clients hear it sooner.",
        )
    yield from _where_the_wait_is(facts)


def _where_the_wait_is(facts: Facts) -> Iterator[Finding]:
    ttft, wait = facts.ttft_mean_s, facts.wait_mean_s
    if ttft is None or wait is None or ttft < SLOW_TTFT_S or facts.streams < LEAST_REQUESTS:
        return
    share = wait / ttft
    split = f"first tokens took {ttft:.1f} s in the last minute, {min(wait, ttft):.1f} s of them in line"
    if share <= 0.25:
        yield Finding(
            "warning",
            f"Prefill is the wait, not the queue: {split}. More slots will not help; shorter prompts, more cache, or "
            "a faster engine will.",
        )
    elif share >= 0.6:
        yield Finding(
            "warning", f"The queue is the wait, not prefill: {split}. Add a slot or a backend."
        )


def _own(facts: Facts) -> Iterator[Finding]:
    if not facts.config_ok:
        yield Finding(
            "bad",
            "The last change of the configuration could not be used, the one before still holds: see the log, or run "
            "`slotgate check`.",
        )
    if facts.redis_up is False:
        yield Finding(
            "warning",
            "Redis does not answer: limits and slots are kept by this gateway alone until it does.",
        )
    if facts.loop_lag_s >= LAG_S:
        yield Finding(
            "warning",
            f"The gateway itself stood still for {facts.loop_lag_s:.2f} s in the last 30 seconds: give it a core of "
            "its own.",
        )
    if facts.log_dropped:
        yield Finding(
            "warning",
            f"{_count(facts.log_dropped, 'log line')} lost: the log is written too slowly, look at its disk.",
        )


def _backend(one: BackendFacts) -> Iterator[Finding]:
    yield from _state(one)
    if one.preemptions:
        yield Finding(
            "bad",
            f"{one.name} preempts ({one.preemptions} in the last minute, its KV cache is too small for {one.slots} "
            f"slots): lower its slots.",
            one.name,
        )
    elif one.kv_used_ratio is not None and one.kv_used_ratio >= KV_FULL:
        yield Finding(
            "warning",
            f"The KV cache of {one.name} is {_percent(one.kv_used_ratio)} full: lower its slots.",
            one.name,
        )
    if one.others >= 0.5:
        yield Finding(
            "warning",
            f"{one.name} also works on {_count(round(one.others), 'request')} that did not come through here: send all "
            "of them here, so that its slots are counted right.",
            one.name,
        )
    if one.slots_assumed:
        yield Finding(
            "hint",
            f"{one.name} does not say how many requests it runs at once; assuming {one.slots}, set `slots`.",
            one.name,
        )


def _state(one: BackendFacts) -> Iterator[Finding]:
    texts: dict[str, tuple[Level, str]] = {
        "down": ("bad", "is down: start it, or take it out of the configuration"),
        "failing": ("bad", "answers probes but broke our requests: look at its log"),
        "loading": ("hint", "is loading its model: wait"),
        "draining": ("hint", "takes no new work, as the configuration says (`drain`)"),
    }
    level, text = texts.get(one.state, ("hint", ""))
    if text:
        yield Finding(level, f"{one.name} {text}.", one.name)
        return
    if one.errors:
        yield Finding(
            "warning",
            f"{one.name} broke {_count(one.errors, 'request')} in the last minute: look at its log.",
            one.name,
        )
    if one.report_age_s is None or one.report_age_s > STALE_S:
        age = "since the start" if one.report_age_s is None else f"for {one.report_age_s:.0f} s"
        yield Finding(
            "warning",
            f"{one.name} has not said {age} how it is: see whether its health page answers.",
            one.name,
        )


def worst(found: Iterable[Finding]) -> Level | None:
    """The level of the worst of them; None when all is well."""
    levels = {one.level for one in found}
    return next((level for level in ("bad", "warning", "hint") if level in levels), None)


def _percent(share: float) -> str:
    return f"{round(share * 100)} %"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
