"""The backends of the configuration, alive: connections, probes, what each last said, and the catalog of models.

Owner of the Upstreams, the Poller and the Catalog. Reports go to `core.dispatch` as advice with an age (law 5).
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import replace

from gateway.core.catalog import Catalog
from gateway.core.config import Backend as Settings
from gateway.core.config import Config
from gateway.core.dispatch import Decision
from gateway.core.fleet import Advice, Fitness
from gateway.core.residence import Memory
from gateway.engines.base import UNKNOWN, EngineReport, State
from gateway.engines.changes import merged, other_models, restarted
from gateway.engines.liveness import Activity
from gateway.runtime.dispatcher import Dispatcher
from gateway.runtime.known import Known, address_of, listing_of, upstream_of
from gateway.runtime.log import LineLog
from gateway.runtime.poller import Poller
from gateway.runtime.probe import target_of
from gateway.runtime.upstream import Upstream, UpstreamError
from gateway.runtime.upstream_error import TIMEOUTS

SETTLING_ENGINES = ("llama-server", "ollama")  # a cancelled slot is not free at once
POOLED_ENGINES = ("vllm", "sglang")  # one pool of cache blocks, shared by all requests
UNKNOWN_SLOTS = 1  # until the engine has said; nothing starts before that
EXHAUSTED = "no descriptor, memory or local port for one more connection: raise `ulimit -n`"
TELL_AGAIN_S = 60.0  # of what every request meets
UNHEARD = EngineReport(engine=UNKNOWN, state=State.DOWN)


class Backends:
    """All of them, by name."""

    def __init__(
        self,
        config: Config,
        dispatcher: Dispatcher,
        log: LineLog,
        last_byte_at: Callable[[str], float | None],
    ) -> None:
        self._config = config
        self._dispatcher = dispatcher
        self._log = log
        self._last_byte_at = last_byte_at
        self._clock = asyncio.get_running_loop().time
        self.known: dict[str, Known] = {}
        self.catalog = Catalog()
        self._exhausted_at = -math.inf  # when that was told last
        # Where there are several gateways, `Cluster` sets these two.
        self.may_weigh: Callable[[str], bool] = lambda _name: True
        self.used_elsewhere: Callable[[str], int] = lambda _name: 0
        for settings in config.backends:
            self._add(settings)
        self._rebuild()
        self.poller = Poller(
            [target_of(one) for one in config.backends],
            self.on_report,
            self.activity,
            on_warning=self._warn,
            may_weigh=self._may_weigh,
        )
        # A slot is lent again when a report shows it idle: after a cancel the next one should come soon.
        dispatcher.on_settling = self.poller.stir

    async def start(self, first_round_s: float) -> None:
        """Begin probing; returns when every backend has answered, or after `first_round_s`."""
        await self.poller.start()
        await self.poller.first_round(first_round_s)

    async def stop(self) -> None:
        await self.poller.stop()
        for known in self.known.values():
            await known.upstream.aclose()

    async def take_up(self, config: Config) -> None:
        """A changed configuration: backends that stay keep their streams, caches and figures."""
        wanted = {settings.name: settings for settings in config.backends}
        for name in [name for name in self.known if name not in wanted]:
            await self._remove(name)
        self._config = config
        decisions: list[Decision] = []
        for name, settings in wanted.items():
            known = self.known.get(name)
            if known is None:
                self._add(settings)
            elif known.settings != settings:
                decisions += await self._change(known, settings)
            elif settings.ca:  # the same file, perhaps with another content
                known.upstream.trust_anew()
        self._rebuild()
        self._dispatcher.apply(decisions)
        await self.poller.update([target_of(one) for one in config.backends])

    def is_up(self, pool: frozenset[str]) -> bool:
        """Can any backend of this pool take work, now or soon?"""
        backends = self._dispatcher.dispatch.backends
        return any(name in backends and backends[name].is_hopeful for name in pool)

    @property
    def ready(self) -> bool:
        return any(one.takes_work for one in self._dispatcher.dispatch.backends.values())

    def on_report(self, name: str, report: EngineReport) -> None:
        """A probe round ended."""
        known = self.known.get(name)
        if known is None:
            return
        before = known.report
        known.report = report = merged(before, report)
        known.reported_at = now = self._clock()
        self._tell(name, before, report)
        if restarted(before, report):
            self._dispatcher.dispatch.forget_cache(name)
        self._hold(name, report, now)
        decisions = self._resize(now, known)
        advice = None
        if report.running is not None and not report.busy:
            running = max(0, report.running - self.used_elsewhere(name))
            advice = Advice(now, running, report.waiting, report.kv_used_ratio)
        decisions += self._dispatcher.dispatch.report(
            now, name, Fitness(report.state.value), advice, asked_at=now - (report.age_s or 0.0)
        )
        if before is None or before.models != report.models or before.engine != report.engine:
            self._rebuild()
        self._dispatcher.apply(decisions)

    def on_fault(self, name: str, fault: UpstreamError | int) -> None:
        """A request of ours broke there, or met a 5xx. Slowness is not a fault (law 7)."""
        if isinstance(fault, UpstreamError) and fault.kind in TIMEOUTS:
            self.poller.poke(name)
            return
        if isinstance(fault, UpstreamError) and fault.kind == "exhausted":
            self._say_exhausted(self._clock())
            return
        refused = isinstance(fault, UpstreamError) and fault.kind in (
            "refused",
            "unreachable",
            "connect_timeout",
        )
        backend = self._dispatcher.dispatch.backends.get(name)
        was_open = backend is not None and backend.breaker.is_open
        decisions = self._dispatcher.dispatch.failed(
            self._clock(), name, at_once=refused, alone=self._is_alone(name)
        )
        if backend is not None and backend.breaker.is_open and not was_open:
            kind = fault.kind if isinstance(fault, UpstreamError) else f"status {fault}"
            self._log.event("warning", "backend", backend=name, state="failing", reason=kind)
        self._dispatcher.apply(decisions)
        self.poller.poke(name)

    def _say_exhausted(self, now: float) -> None:
        if now - self._exhausted_at >= TELL_AGAIN_S:
            self._log.event("error", "gateway", reason="exhausted", note=EXHAUSTED)
            self._exhausted_at = now

    def on_loading(self, name: str) -> None:
        """It refused a request because its model is not loaded yet. No fault: requests may wait for it (B048)."""
        known = self.known.get(name)
        if known is not None and known.report is not None:
            loading = replace(known.report, state=State.LOADING, running=None, waiting=None)
            self.on_report(name, loading)
        self.poller.poke(name)

    def on_cache_full(self, name: str) -> None:
        """A stream died there because all slots together had outgrown one KV cache: they share it (engines.md 0.4)."""
        known = self.known.get(name)
        backend = self._dispatcher.dispatch.backends.get(name)
        if known is None or known.report is None or backend is None:
            return
        if known.kv_limit is not None or backend.in_flight < 2:
            return
        known.overflowed = known.shape
        self._log.event(
            "warning",
            "backend",
            backend=name,
            warning="its slots share one KV cache, which was full; what runs there is kept within it from now on",
            kv_tokens=known.kv_limit,
        )
        self._dispatcher.apply(self._resize(self._clock(), known))

    def engine_of(self, name: str) -> str | None:
        """Which engine this backend said it is."""
        known = self.known.get(name)
        return known.report.engine if known is not None and known.report is not None else None

    def upstream(self, name: str) -> Upstream:
        """The way there. Raises UpstreamError when a reload has removed it since it was chosen."""
        known = self.known.get(name)
        if known is None:
            raise UpstreamError("unreachable", f"{name} is gone from the configuration")
        return known.upstream

    def _may_weigh(self, name: str) -> bool:
        return self.may_weigh(name)

    def _is_alone(self, name: str) -> bool:
        """Would nobody serve any of its models in its place?"""
        pools = [pool.backends for pool in self.catalog.pools.values() if name in pool.backends]
        return not any(self.is_up(pool - {name}) for pool in pools)

    def touch(self, name: str) -> None:
        """It was sent a request."""
        known = self.known.get(name)
        if known is not None:
            known.last_traffic = self._clock()

    def activity(self, name: str) -> Activity:
        """What the poller may know: how busy we keep this backend."""
        now = self._clock()
        backend = self._dispatcher.dispatch.backends.get(name)
        busy = backend.in_flight + backend.settling_permits if backend is not None else 0
        known = self.known.get(name)
        traffic = known.last_traffic if known is not None else None
        last_byte = self._last_byte_at(name)
        return Activity(
            in_flight=busy,
            last_traffic_age_s=None if traffic is None else now - traffic,
            bytes_age_s=None if last_byte is None else now - last_byte,
        )

    def _add(self, settings: Settings) -> None:
        known = self.known[settings.name] = Known(settings, upstream_of(settings))
        self._resize(self._clock(), known)

    async def _remove(self, name: str) -> None:
        """It takes no new work; what it has in flight goes on to its end."""
        known = self.known.pop(name)
        self._dispatcher.apply(self._dispatcher.dispatch.remove(name))
        await known.upstream.aclose()
        self._log.event("info", "backend", backend=name, state="removed")

    async def _change(self, known: Known, settings: Settings) -> list[Decision]:
        """Other settings for a backend that stays. At another address there is another engine."""
        before, known.settings = known.settings, settings
        if address_of(before) != address_of(settings):
            old, known.upstream = known.upstream, upstream_of(settings)
            known.report = known.reported_at = None
            self._dispatcher.dispatch.forget_cache(settings.name)
            await old.aclose()
        return self._resize(self._clock(), known)

    def _resize(self, now: float, known: Known) -> list[Decision]:
        settings, report = known.settings, known.report or UNHEARD
        return self._dispatcher.dispatch.put(
            now,
            settings.name,
            slots=settings.slots or report.slots or UNKNOWN_SLOTS,
            draining=settings.drain,
            settles=report.engine in SETTLING_ENGINES,
            pooled=report.engine in POOLED_ENGINES,
            kv_tokens=settings.kv_tokens or report.kv_tokens,
            kv_limit=known.kv_limit,
            assumed=settings.slots is None and (report.slots_assumed or report.slots_inferred),
        )

    def _hold(self, name: str, report: EngineReport, now: float) -> None:
        """Which models it has in memory, if it has more than it keeps there."""
        models = report.models or ()
        if not report.swaps or not models or any(model.loaded is None for model in models):
            return
        memory = Memory(
            frozenset(model.id for model in models if model.loaded),
            {alias: model.id for model in models for alias in model.aliases},
            report.max_loaded,
            report.swap_waits,
        )
        self._dispatcher.dispatch.hold(name, memory, asked_at=now - report.age_s)

    def _rebuild(self) -> None:
        config = self._config
        listings = {name: listing_of(known) for name, known in self.known.items()}
        self.catalog = Catalog.build(listings, config.models, config.default_model)

    def _tell(self, name: str, before: EngineReport | None, report: EngineReport) -> None:
        """One line for each change that an operator may wonder about later."""
        new, gone = other_models(before, report)
        if new or gone:
            self._log.event("info", "backend", backend=name, models_new=new, models_gone=gone)
        if before is not None and (before.state, before.engine) == (report.state, report.engine):
            if restarted(before, report):
                self._log.event("info", "backend", backend=name, restarted=True)
            return
        level = "warning" if report.state is State.DOWN else "info"
        self._log.event(
            level,
            "backend",
            backend=name,
            state=report.state,
            engine=report.engine,
            slots=self.known[name].settings.slots or report.slots,
        )

    def _warn(self, name: str, text: str) -> None:
        self._log.event("warning", "backend", backend=name, warning=text)
