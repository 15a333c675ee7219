"""The real app on a real port, in front of scripted engines, with the invariants checked when it ends.

    async with FakeEngine() as engine, running_gateway(engine, admission={"queue": 2}) as slotgate:
        answer = await slotgate.chat(stream=True)

Law of this file: the app is started as `slotgate serve` would, from a config file; nothing inside it is replaced.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import logging
import secrets
import ssl
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2

from gateway.app import Gateway
from gateway.runtime import configfile
from tests.fakes import invariants
from tests.fakes.engine import FakeEngine
from tests.fakes.running import eventually

ADMIN = "admin"  # the name of the key that may read metrics

TRUST = ssl.create_default_context()  # to make one takes up to 0.1 s of whatever loop is running


@dataclass(slots=True)
class Running:
    """A gateway in the middle of a test."""

    gateway: Gateway
    engines: Sequence[FakeEngine]
    keys: Mapping[str, str]  # name -> secret
    client: httpx2.AsyncClient  # with the first key, no timeout, the gateway as its base
    names: Sequence[str]  # of the backends
    log: io.StringIO
    lag: invariants.Lag | None = None
    models: set[str] = field(default_factory=set)  # beyond those of the engines: aliases
    sent: int | None = None  # set it to have outcomes counted against it

    @property
    def base_url(self) -> str:
        return self.gateway.base_url

    @property
    def port(self) -> int:
        return httpx2.URL(self.base_url).port or 80

    def header(self, name: str | None = None) -> dict[str, str]:
        """The header that presents a key (the first one)."""
        if not self.keys:
            return {}
        return {"Authorization": f"Bearer {self.keys[name or next(iter(self.keys))]}"}

    async def metrics(self) -> invariants.Series:
        return invariants.series_of(await self.metrics_text())

    async def metrics_text(self) -> str:
        return self.gateway.metrics_text()

    async def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric over the series with these labels; `slotgate_` may be left out."""
        name = name if name.startswith("slotgate_") else f"slotgate_{name}"
        return invariants.total(await self.metrics(), name, **labels)

    async def status(self) -> Any:
        return self.gateway.status()

    async def chat(self, path: str = "/v1/chat/completions", **body: Any) -> httpx2.Response:
        """One request, answered whole."""
        body = {"model": self.engines[0].models[0], "messages": _HELLO} | body
        return await self.client.post(path, json=body)

    async def outcomes(self) -> dict[str, float]:
        """How many requests ended in which outcome."""
        out: dict[str, float] = {}
        for (name, labels), value in (await self.metrics()).items():
            if name == "slotgate_requests_total" and value:
                outcome = dict(labels)["outcome"]
                out[outcome] = out.get(outcome, 0) + value
        return out


@contextlib.asynccontextmanager
async def running_gateway(
    *backends: FakeEngine | str | Mapping[str, Any],
    keys: Sequence[str | Mapping[str, Any]] | None = None,
    config: Mapping[str, Any] | None = None,
    wait: bool = True,
    check: bool = True,
    lag_limit_s: float = 0.1,
    canaries: Sequence[str] = (),
    **overrides: Any,
) -> AsyncIterator[Running]:
    """Starts the app, waits until it can take work, and checks the invariants at the end.

    backends: engines, URLs, or backend sections; named b1, b2, ... if nameless. keys: names, or key records with
    `name`; None: keyless. A key named `admin` may read metrics and is made in any case when there are keys. config,
    overrides: sections of the config, merged over the defaults of a test (any free port, plain JSON log). check=False,
    or `running.sent`, for tests that know better.
    """
    sections = [_backend(number, one) for number, one in enumerate(backends, 1)]
    engines = [one for one in backends if isinstance(one, FakeEngine)]
    with tempfile.TemporaryDirectory(prefix="slotgate-test-") as folder, _listening_log() as log:
        secret_of = _write_keys(Path(folder), keys)
        document = _config(sections, bool(keys), {**(config or {}), **overrides})
        file = Path(folder) / "slotgate.yaml"
        file.write_text(json.dumps(document))
        async with (
            invariants.loop_is_never_blocked(lag_limit_s if check else 60) as lag,
            Gateway.serving(configfile.load(file)) as gateway,
            httpx2.AsyncClient(
                base_url=gateway.base_url, trust_env=False, timeout=None, verify=TRUST
            ) as client,
        ):
            names = [section["name"] for section in sections]
            running = Running(gateway, engines, secret_of, client, names, log, lag)
            client.headers.update(running.header())
            running.models |= set(document.get("models", {}))
            if wait:
                await _until_ready(running)
            yield running
            if check:
                await _check(running, canaries)
        if check:
            _check_log(running, canaries)


async def _check(running: Running, canaries: Sequence[str]) -> None:
    """The invariants that need the gateway alive."""
    await invariants.gauges_return_to_zero(running.metrics_text, running.engines)
    text = await running.metrics_text()
    series = invariants.series_of(text)
    invariants.no_more_runs_than_requests(series, running.engines)
    await invariants.one_outcome_per_request(
        running.metrics_text, running.log.getvalue, running.sent
    )
    served = {model for engine in running.engines for model in engine.models}
    invariants.labels_come_from_the_configuration(
        series,
        {
            "backend": [*running.names, "all", "none"],
            "key": [*running.keys, "none", "anonymous"],
            "model": served | running.models | {"all", "other", "none"},
        },
    )
    told = json.dumps(await running.status(), default=str)
    invariants.no_secret_in(_secrets(running, canaries), metrics=text, status=told)


def _check_log(running: Running, canaries: Sequence[str]) -> None:
    """Those that can only be told when it has ended."""
    log = running.log.getvalue()
    invariants.log_is_clean(log)
    invariants.no_secret_in(_secrets(running, canaries), log=log)


def _secrets(running: Running, canaries: Sequence[str]) -> list[str]:
    own = [engine.behaviour.api_key for engine in running.engines if engine.behaviour.api_key]
    return [*running.keys.values(), *own, *canaries]


async def _until_ready(running: Running) -> None:
    async def ready() -> bool:
        answer = await running.client.get("/readyz")
        if answer.status_code != 200:
            return False
        up = await running.metric("backend_up")
        return up >= len(running.names)

    await eventually(ready, why=f"not ready: {running.engines}")


def _backend(number: int, one: FakeEngine | str | Mapping[str, Any]) -> dict[str, Any]:
    if isinstance(one, FakeEngine):
        key = one.behaviour.api_key
        return {"name": f"b{number}", "url": one.url} | ({"api_key": key} if key else {})
    if isinstance(one, str):
        return {"name": f"b{number}", "url": one}
    return {"name": f"b{number}", **one}


def _config(
    backends: list[dict[str, Any]], with_keys: bool, sections: Mapping[str, Any]
) -> dict[str, Any]:
    document: dict[str, Any] = {
        "listen": {"host": "127.0.0.1", "port": 0},
        "backends": backends,
        "log": {"level": "info", "format": "json"},
        "drain_s": 5,
    }
    if with_keys:
        document["auth"] = {"keys_file": "keys.yaml"}
    for name, section in sections.items():
        old = document.get(name)
        both = isinstance(old, dict) and isinstance(section, Mapping)
        document[name] = {**old, **section} if both and old is not None else section
    return document


def _write_keys(folder: Path, keys: Sequence[str | Mapping[str, Any]] | None) -> dict[str, str]:
    if not keys:
        return {}
    records = [dict(key) if isinstance(key, Mapping) else {"name": key} for key in keys]
    if not any(record["name"] == ADMIN for record in records):
        records.append({"name": ADMIN, "admin": True})
    secret_of = {record["name"]: f"sk-sg-{secrets.token_urlsafe(24)}" for record in records}
    for record in records:
        digest = hashlib.sha256(secret_of[record["name"]].encode()).hexdigest()
        record["hash"] = f"sha256:{digest}"
    file = folder / "keys.yaml"
    file.write_text(json.dumps(records))
    file.chmod(0o600)
    return secret_of


@contextlib.contextmanager
def _listening_log() -> Iterator[io.StringIO]:
    """What is written to stderr meanwhile (the gateway's own log), and what libraries log."""
    log = io.StringIO()
    handler = logging.StreamHandler(log)
    handler.addFilter(lambda record: not record.name.startswith(("gateway", "slotgate")))
    root = logging.getLogger()
    root.addHandler(handler)
    stderr = sys.stderr
    sys.stderr = _Both(stderr, log)
    try:
        yield log
    finally:
        sys.stderr = stderr
        root.removeHandler(handler)


class _Both(io.TextIOBase):
    """Writes to the stream that was there, and to the log."""

    def __init__(self, stream: Any, log: io.StringIO) -> None:
        self._stream = stream
        self._log = log
        self.buffer = _Bytes(self)

    def write(self, text: str) -> int:
        self._log.write(text)
        return int(self._stream.write(text))

    def flush(self) -> None:
        self._stream.flush()

    def fileno(self) -> int:
        return int(self._stream.fileno())

    def isatty(self) -> bool:
        return False


class _Bytes(io.RawIOBase):
    """The same for who writes bytes."""

    def __init__(self, text: _Both) -> None:
        self._text = text

    def write(self, data: Any) -> int:
        self._text.write(bytes(data).decode(errors="replace"))
        return len(data)

    def flush(self) -> None:
        self._text.flush()


_HELLO = [{"role": "user", "content": "hello"}]
