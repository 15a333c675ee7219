"""The poller: keeps asking every backend how it is, without doing harm.

Law 6: one outstanding question per backend. /slots and /metrics of a llama-server only while it has traffic, as
one pair in two seconds at most, by one gateway for all (`may_weigh`). Nothing that wakes or loads a model. Busy
is not dead. One warning per backend and kind, not one per round.

Pace, each with jitter upwards so that backends and gateways do not march in step: down, loading or suspect 1 s;
idle 5 s; with traffic what the engine's file allows. Two rounds are never closer than a second, whoever pokes.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Final

from gateway.engines.base import Engine, EngineReport, Look, State
from gateway.engines.changes import merged
from gateway.engines.liveness import Activity
from gateway.runtime.probe import Failure, Findings, PollTarget, Probe, silent_report

_PAIR_S: Final = 2.0  # between two looks at the load of one engine, whoever it was configured as
_NEAREST_S: Final = 1.0  # between two rounds
_IDLE_S: Final = 5.0
_FULL_S: Final = 10.0  # models and versions
_TAIL_S: Final = 5.0  # after the last traffic; longer would keep a model awake that may sleep
_LONGEST_WEIGH_S: Final = 30.0  # after load questions went unanswered again and again
_TICK_S: Final = 1.0  # how soon new traffic is noticed
_JITTER: Final = 0.15
_MOST_WARNINGS: Final = 64  # per backend, a bound that its few kinds never reach

OnReport = Callable[[str, EngineReport], None]
OnWarning = Callable[[str, str], None]


@dataclass(slots=True)
class _Watch:
    """What is remembered of one backend between rounds. Owned by its task; others only set `poked` and `stirred`."""

    target: PollTarget
    probe: Probe
    weigh_gap_s: float = _NEAREST_S
    engine: Engine | None = None  # detected, and kept while the backend is up
    known: EngineReport | None = None  # the last report with a state above DOWN, gaps filled
    failures: int = 0  # silent rounds in a row
    ended: float = -1e9  # the last round
    weighed: float = -1e9  # the last round that asked for load
    filled: float = -1e9  # the last full round
    warned: set[str] = field(default_factory=set)
    poked: bool = False
    stirred: asyncio.Event = field(default_factory=asyncio.Event)
    first: asyncio.Event = field(default_factory=asyncio.Event)


class Poller:
    """Owns one task per backend. Everything happens on the loop that called `start`.

    `on_report(name, report)` gets every round's report; in it None means "not said this time".
    `activity(name)` says what our own requests there show. `on_warning(name, text)` gets each kind once.
    `may_weigh(name)`: False where another gateway asks this backend about its load.
    """

    def __init__(
        self,
        targets: Sequence[PollTarget],
        on_report: OnReport,
        activity: Callable[[str], Activity],
        *,
        on_warning: OnWarning | None = None,
        may_weigh: Callable[[str], bool] = lambda _name: True,
        rng: random.Random | None = None,
    ) -> None:
        self._targets = list(targets)
        self._on_report = on_report
        self._activity = activity
        self._log = logging.getLogger("slotgate.poller")
        self._on_warning = on_warning or self._log_warning
        self._may_weigh = may_weigh
        self._rng = rng or random.Random()  # noqa: S311  jitter is no secret
        self._watches: dict[str, _Watch] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._parted: dict[str, float] = {}  # by URL: when its watching ended, for a while

    async def start(self) -> None:
        """Begins to watch all backends at once. Returns before any of them answered."""
        for target in self._targets:
            self._begin(target)

    async def stop(self) -> None:
        """Ends all watching; a question under way is broken off."""
        await self._end(list(self._tasks))

    async def update(self, targets: Sequence[PollTarget]) -> None:
        """Takes up a changed configuration: unchanged backends are watched on without a gap."""
        wanted = {target.name: target for target in targets}
        changed = [n for n, w in self._watches.items() if wanted.get(n) != w.target]
        await self._end(changed)
        for name, target in wanted.items():
            if name not in self._watches:
                self._begin(target)
            elif target.ca:  # the same file, perhaps with another content
                self._watches[name].probe.trust_anew()

    async def first_round(self, timeout: float) -> bool:  # noqa: ASYNC109  the caller asked for a bound
        """Waits until every backend was asked once, at most `timeout` seconds. True: all were."""
        waits = [asyncio.create_task(watch.first.wait()) for watch in self._watches.values()]
        if not waits:
            return True
        _, late = await asyncio.wait(waits, timeout=timeout)
        for task in late:
            task.cancel()
        return not late

    def poke(self, name: str) -> None:
        """Asks for an early look at this backend; never earlier than the pace allows. Unknown names are ignored."""
        watch = self._watches.get(name)
        if watch is not None:
            watch.poked = True
            watch.stirred.set()

    def stir(self, name: str) -> None:
        """What this backend does has changed: when the next look is due is worked out anew."""
        watch = self._watches.get(name)
        if watch is not None:
            watch.stirred.set()

    def _begin(self, target: PollTarget) -> None:
        watch = _Watch(target, Probe(target))
        parted = self._parted.pop(target.url, None)
        if parted is not None:  # it is back, and may have been asked for its load just then (law 6)
            watch.weighed, watch.weigh_gap_s = parted, _PAIR_S
        self._watches[target.name] = watch
        self._tasks[target.name] = asyncio.create_task(self._keep_watch(watch), name=target.name)

    async def _end(self, names: list[str]) -> None:
        tasks = [self._tasks.pop(name) for name in names]
        now = asyncio.get_running_loop().time()
        recent = {url: at for url, at in self._parted.items() if now - at < _PAIR_S}
        self._parted = recent | {self._watches.pop(name).target.url: now for name in names}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _keep_watch(self, watch: _Watch) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                await self._round(watch, loop.time())
                watch.first.set()
                await self._rest(watch, loop)
            except Exception:  # noqa: BLE001
                # A fault of ours must not blind the gateway: the log says it, and so does the report's age.
                self._log.exception("probing backend %s failed", watch.target.name)
                watch.first.set()
                await asyncio.sleep(_IDLE_S)

    async def _round(self, watch: _Watch, now: float) -> None:
        look = self._look(watch, now)
        watch.poked = False
        findings = await watch.probe.ask_round(look, watch.engine)
        if look.full and _is_another(findings, watch.engine):
            findings = await watch.probe.ask_round(Look(), None)
        activity = self._activity(watch.target.name)
        report = findings.report(watch.known)
        watch.failures = 0 if report is not None else watch.failures + 1
        if report is None:
            report = silent_report(findings, watch.known, watch.failures, activity)
            if report.busy:
                watch.failures = 0  # what proves life now does not leave it guilty of the past
        _remember(watch, look, findings, report)
        age = asyncio.get_running_loop().time() - now
        self._publish(watch.target.name, watch, replace(report, age_s=age))

    def _look(self, watch: _Watch, now: float) -> Look:
        weigh = self._is_active(watch) and now - watch.weighed >= watch.weigh_gap_s
        return Look(
            weigh=weigh and self._may_weigh(watch.target.name),
            # Whoever pokes has met something strange: look at everything, also at who is there.
            full=watch.known is None or watch.poked or now - watch.filled >= _FULL_S,
        )

    def _is_active(self, watch: _Watch) -> bool:
        activity = self._activity(watch.target.name)
        age = activity.last_traffic_age_s
        return activity.in_flight > 0 or (age is not None and age < _TAIL_S)

    def _publish(self, name: str, watch: _Watch, report: EngineReport) -> None:
        self._on_report(name, report)
        for text in report.warnings:
            if text not in watch.warned and len(watch.warned) < _MOST_WARNINGS:
                watch.warned.add(text)
                self._on_warning(name, text)

    async def _rest(self, watch: _Watch, loop: asyncio.AbstractEventLoop) -> None:
        """Waits for the next round; looks up once a second whether traffic has made it due earlier."""
        stretch = 1 + _JITTER * self._rng.random()
        while (left := self._due(watch, stretch) - loop.time()) > 0:
            if watch.poked:
                await asyncio.sleep(left)  # nothing can make it due earlier
                continue
            # Not wait_for: in Python 3.11 it loses a cancellation that meets the event (bpo-37658).
            with suppress(TimeoutError):
                async with asyncio.timeout(min(left, _TICK_S)):
                    await watch.stirred.wait()
            watch.stirred.clear()

    def _due(self, watch: _Watch, stretch: float) -> float:
        soonest = watch.ended + _NEAREST_S * stretch
        settled = watch.known is not None and watch.known.state in (State.UP, State.SLEEPING)
        if watch.poked or watch.failures or not settled:
            return soonest
        idle = watch.ended + _IDLE_S * stretch
        if not self._is_active(watch):
            return idle
        return min(idle, max(soonest, watch.weighed + watch.weigh_gap_s * stretch))

    def _log_warning(self, name: str, text: str) -> None:
        self._log.warning("backend %s: %s", name, text)


def _remember(watch: _Watch, look: Look, findings: Findings, report: EngineReport) -> None:
    """Carries over to the next round what that one must know."""
    watch.ended = now = asyncio.get_running_loop().time()
    engine = findings.engine
    if look.full and watch.failures == 0 and not report.busy:
        watch.filled = now
    if look.weigh and engine is not None:
        watch.weighed = now
        watch.weigh_gap_s = _next_gap(watch.weigh_gap_s, engine, findings.failure)
    if report.state in (State.UP, State.SLEEPING):
        watch.known = merged(watch.known, report)
        watch.engine = engine if findings.certain else None
        return
    # A port may come back with another engine behind it, and another process forgot everything.
    watch.known = None
    watch.engine = None


def _is_another(findings: Findings, engine: Engine | None) -> bool:
    """True when the answers no longer fit the engine that was detected there: the port changed hands unseen."""
    return engine is not None and findings.failure is None and not engine.recognises(findings.seen)


def _next_gap(gap: float, engine: Engine, failure: Failure | None) -> float:
    """Twice as long after every round in which a question went unanswered: each leaves a task in the engine."""
    if failure is None:
        return engine.active_s
    return min(_LONGEST_WEIGH_S, max(gap, engine.active_s) * 2)
