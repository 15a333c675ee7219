"""The composition root: builds every part once and starts and stops them. The only place that knows all parts."""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import fields, replace
from pathlib import Path
from random import SystemRandom
from typing import TYPE_CHECKING, Any, Self

from gateway import __version__
from gateway.api.dashboard.page import DashboardPage
from gateway.api.edge import EdgeSettings
from gateway.api.facts import Sources
from gateway.api.front import Front
from gateway.api.local import LocalPages
from gateway.api.models import ModelPages
from gateway.api.ollama import OllamaPages
from gateway.api.server import Server
from gateway.api.status import Status
from gateway.core.catalog import NONE
from gateway.core.config import Config
from gateway.core.dispatch import Dispatch, Limits
from gateway.core.errors import GatewayError
from gateway.core.keys import KeyRing
from gateway.core.lease_dispatch import LeasedDispatch
from gateway.core.lease_homes import chain_for_fleet
from gateway.core.prefix import chain_of
from gateway.core.settings.nodes import ConfigErrors
from gateway.pipeline import Pipeline
from gateway.runtime import gauges, tables
from gateway.runtime.backends import Backends
from gateway.runtime.configfile import KEYS_FILE
from gateway.runtime.dispatcher import Dispatcher
from gateway.runtime.drain import Drain
from gateway.runtime.exposition import Exposition
from gateway.runtime.found import in_words
from gateway.runtime.heartbeat import Heartbeat
from gateway.runtime.history import History
from gateway.runtime.keystore import KeyStore
from gateway.runtime.log import LineLog
from gateway.runtime.metrics import Metrics
from gateway.runtime.notify import ServiceManager
from gateway.runtime.proxies import TrustedProxies
from gateway.runtime.quota import Quota
from gateway.runtime.reload import Watcher
from gateway.runtime.reload_reading import Fresh, Source, read_again

if TYPE_CHECKING:
    from gateway.runtime.cluster import Cluster

__all__ = ["Gateway", "Source", "new_loop", "serve_forever"]

_log = logging.getLogger("slotgate.reload")
FIRST_ANSWER_S = 0.3  # of Redis; nobody waits longer for it
FIRST_ROUND_S = 0.6  # a dead backend must not keep the others from serving
EFFECTIVE = {section.name for section in fields(Config)}


class Gateway:
    """All parts of one running gateway. Made inside a running loop by `serving` or `serve_forever`."""

    def __init__(self, config: Config, source: Source | None = None) -> None:
        self.config = config
        self._source = source
        self.log = LineLog(config.log.level, config.log.format)
        self.metrics = Metrics(asyncio.get_running_loop().time)
        limits = Limits(config.admission.queue, config.admission.max_wait_s)
        dispatch = LeasedDispatch(limits) if config.redis else Dispatch(limits)
        self.dispatcher = Dispatcher(dispatch, SystemRandom())
        self.backends = Backends(config, self.dispatcher, self.log, self.metrics.last_event_at)
        self.keystore = None if config.keyless else KeyStore(str(config.auth.keys_file))
        self.pipeline = Pipeline(
            config=config,
            keys=self._ring,
            quota=Quota(),
            backends=self.backends,
            dispatcher=self.dispatcher,
            metrics=self.metrics,
            log=self.log,
            chain_of=chain_for_fleet if config.redis else chain_of,
        )
        self.cluster = self._cluster(dispatch)
        history = History(self.metrics, self.dispatcher, self.backends)
        self._heartbeat = Heartbeat(history.sample)
        gauges.register(self.metrics, self.dispatcher, self.backends, self._heartbeat, __version__)
        if self.cluster is not None:
            gauges.register_redis(self.metrics, self._redis_up)
        told = tables.families(self.metrics)
        self.exposition = Exposition(lambda: [*told, *self.metrics.others])
        self._watcher = Watcher(self._files, self.reload)
        self._reloading = (
            asyncio.Lock()
        )  # a reload that a test or a signal asks for beside the watcher's
        self._mistakes: list[str] = []  # of the last reload
        self.manager = ServiceManager()
        self._status = Status(
            __version__,
            Sources(
                self.backends,
                self.dispatcher,
                self.metrics,
                history,
                self._heartbeat,
                self.log,
                self._redis_up if self.cluster is not None else lambda: None,
            ),
        )
        pages = LocalPages(
            self.backends,
            self.exposition,
            self.status,
            lambda: self.pipeline.draining,
            metrics_open=lambda: self.config.auth.metrics == "open",
        )
        models, ollama = ModelPages(self.backends), OllamaPages(self.backends)
        dashboard = DashboardPage(lambda: self.keystore is not None)
        self.front = Front(
            self.pipeline,
            {**pages.table(), **dashboard.table(), **models.table(), **ollama.table()},
            TrustedProxies(config.trusted_proxies),
        )
        self._drain = Drain(lambda: self.front.active, self.front.idle)
        self.server = Server(
            self.front,
            _edge_settings(config),
            host=config.listen.host,
            port=config.listen.port,
            tls=config.listen.tls,
            on_refused=self._refused_at_the_edge,
        )
        self._library_log: Callable[[], None] = lambda: None  # how to stop taking it over

    @classmethod
    @asynccontextmanager
    async def serving(cls, config: Config) -> AsyncIterator[Self]:
        """A gateway that listens while the block runs, in the caller's loop."""
        gateway = cls(config)
        await gateway.start()
        try:
            yield gateway
        finally:
            await gateway.stop()

    @property
    def base_url(self) -> str:
        scheme = "https" if self.config.listen.tls else "http"
        host = self.config.listen.host
        return f"{scheme}://{f'[{host}]' if ':' in host else host}:{self.server.port}"

    async def start(self) -> None:
        """Listen, and learn what the backends are. Raises OSError when the port is taken."""
        for setting in self.config.unused(EFFECTIVE):
            self.log.event("warning", "config", setting=setting, note="has no effect yet")
        await self.server.start()
        self._library_log = self.log.take_over("slotgate")
        if self.cluster is not None:
            await self.cluster.start(FIRST_ANSWER_S)
            self._ask_for_shared_keys(self.cluster)
        await self.backends.start(FIRST_ROUND_S)
        self._watcher.start()
        self._heartbeat.start()

    async def reload(self) -> None:
        """Read the configuration and the keys again. What cannot be used changes nothing and is told once."""
        async with self._reloading:
            self.manager.reloading()
            mistakes = await self._reload()
            self.metrics.config_ok = not mistakes
            if mistakes and mistakes == self._mistakes:
                self.log.event("info", "reload", note="still wrong, as told before")
            else:
                for mistake in mistakes:
                    self.log.event("error", "reload", failed=mistake)
            self._mistakes = mistakes
            self.manager.ready("the last reload failed; see the log" if mistakes else "serving")

    def reload_soon(self) -> None:
        """For a signal handler."""
        self._watcher.ask()

    async def _reload(self) -> list[str]:
        """What is wrong, if anything is; then nothing has changed."""
        try:
            fresh = await asyncio.to_thread(read_again, self.config, self._source)
            await self._take_up(fresh)
        except ConfigErrors as errors:
            return [str(mistake) for mistake in errors.mistakes]
        except OSError as error:  # a file that is named and went away meanwhile
            return [f"{error.filename or 'a file'}: {error.strerror or error}"]
        except Exception as error:  # noqa: BLE001
            # Noticed by: the operator, in the log and in the metric. The next reload is tried all the same.
            _log.exception("a bug in taking up the configuration")
            return [f"a bug in the gateway: {type(error).__name__}"]
        self.log.event("info", "reload", backends=len(fresh.config.backends))
        for setting in fresh.kept:
            self.log.event("warning", "config", setting=setting, note="takes effect by a restart")
        return []

    async def _take_up(self, fresh: Fresh) -> None:
        """All but the address and Redis, which need a restart."""
        config = self.config = self.pipeline.config = fresh.config
        self.keystore = fresh.keystore
        limits = self.dispatcher.dispatch.limits
        limits.queue, limits.max_wait_s = config.admission.queue, config.admission.max_wait_s
        self.log.apply(config.log.level, config.log.format)
        self.server.apply(_edge_settings(config), fresh.tls)
        self.front.proxies = TrustedProxies(config.trusted_proxies)
        await self.backends.take_up(config)
        ring = self._ring()
        names = [key.name for key in ring.keys] if ring is not None else []
        self.metrics.keep(self.backends.catalog.pools, self.backends.known, names)
        self.exposition.forget()

    def _files(self) -> list[str]:
        """The files whose change calls for a reload."""
        own = [self._source.file] if self._source is not None else []
        return [*own, *self.config.files]

    async def drain(self) -> None:
        """Take no new work; return when what is in flight has ended, or after `drain_s`."""
        self.pipeline.draining = True
        active = len(self.front.active)
        self.log.event("info", "drain", active=active, drain_s=self.config.drain_s)
        self.manager.stopping(f"draining: {active} requests may finish", self.config.drain_s)
        await self._drain.within(self.config.drain_s)

    async def stop(self) -> None:
        """Close everything."""
        self.pipeline.draining = True
        self._drain.cut()
        await self._watcher.stop()
        self._heartbeat.stop()
        await self.server.stop()
        if self.cluster is not None:
            await self.cluster.stop()
        await self.backends.stop()
        self.dispatcher.close()
        self._library_log()
        self.log.close()

    def status(self, explain: str | None = None) -> dict[str, Any]:
        return self._status.document(draining=self.pipeline.draining, explain=explain)

    def metrics_text(self) -> str:
        return self.exposition.text()

    def ready_line(self) -> str:
        """One line for people: where it is, and what it found."""
        found = in_words(self.dispatcher.dispatch.backends, self.backends.known)
        return " | ".join([f"Slotgate is ready at {self.base_url}/v1", *found])

    def _refused_at_the_edge(self, error: GatewayError) -> None:
        """A request so broken that the line never saw it: counted, and told in the log."""
        row = error.situation
        self.metrics.ended(NONE, NONE, row.outcome, counts=False)
        self.log.event(
            "info", "request", key=NONE, outcome=row.outcome, status=row.status, error=row.code
        )

    def _ring(self) -> KeyRing | None:
        if self.keystore is None:
            return None
        ring = self.keystore.ring
        return ring if self.cluster is None else self.cluster.keys.ring(ring)

    def _cluster(self, dispatch: Dispatch) -> Cluster | None:
        """The other gateways, where there is a Redis."""
        if self.config.redis is None or not isinstance(dispatch, LeasedDispatch):
            return None
        from gateway.runtime.cluster import Cluster  # noqa: PLC0415  (redis-py is a fifth of the start)

        return Cluster(
            self.config.redis.url.reveal(),
            self.dispatcher,
            dispatch,
            backends=self.backends,
            limits=self.pipeline.quota.limits,
            log=self.log,
            draining=lambda: self.pipeline.draining,
            rng=SystemRandom(),
        )

    def _redis_up(self) -> bool:
        return self.cluster is not None and self.cluster.is_up

    def _ask_for_shared_keys(self, cluster: Cluster) -> None:
        """With keys in Redis at the start, a gateway without a keys file is not keyless."""
        if self.keystore is None and cluster.keys.some:
            folder = Path(self._source.file).parent if self._source is not None else Path()
            file = str(folder / KEYS_FILE)
            self.config = replace(self.config, auth=replace(self.config.auth, keys_file=file))
            self.pipeline.config, self.keystore = self.config, KeyStore(file)


def _edge_settings(config: Config) -> EdgeSettings:
    return EdgeSettings(
        header_kib=int(config.limits.header_kib),
        keepalive_s=config.keepalive_s,
        write_stall_s=config.timeouts.write_stall_s,
        origins=tuple(config.cors.origins),
    )


def serve_forever(
    config: Config, on_ready: Callable[[Gateway], None], source: Source | None = None
) -> None:
    """Run until a signal: the first TERM or INT drains while still listening, the second exits now; HUP reloads."""

    async def run() -> None:
        gateway = Gateway(config, source)
        gateway.server.catch_signals()  # from here on a signal ends in a drain, not in a death
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, gateway.reload_soon)
        await gateway.start()
        gc.collect()
        gc.freeze()  # what is there now stays: a tenth of a request's cost was the collector looking at it
        on_ready(gateway)
        gateway.manager.ready("serving")
        try:
            await gateway.server.until_signalled(gateway.drain)
        finally:
            await gateway.stop()

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(run())


def new_loop() -> asyncio.AbstractEventLoop:
    """Uvloop where there is one."""
    try:
        import uvloop  # noqa: PLC0415  (not on every platform)
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()
