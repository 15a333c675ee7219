"""What a reload reads, and what of it counts.

Law of this file: all of it can be used, or nothing is taken. A reload lets nobody in whom a start would not, and what
a running gateway cannot change stays as it is, and is named.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

from gateway.core.config import Config, is_loopback
from gateway.core.settings.nodes import ConfigErrors, Mistake
from gateway.runtime.certificate import context_of
from gateway.runtime.keystore import KeyStore
from gateway.runtime.known import upstream_of

NEED_RESTART: Final = ("listen.host", "listen.port", "listen.tls", "redis")


@dataclass(frozen=True, slots=True)
class Source:
    """Where a configuration came from, so that it can be read again."""

    load: Callable[[], Config]
    file: str


@dataclass(frozen=True, slots=True)
class Fresh:
    """A configuration and the files it names, all read and all usable."""

    config: Config
    keystore: KeyStore | None  # None: keyless
    tls: ssl.SSLContext | None
    kept: tuple[str, ...]  # settings that are others in the file and need a restart


def read_again(running: Config, source: Source | None) -> Fresh:
    """Read everything. Takes its time: for a thread. Raises ConfigErrors or OSError."""
    read = source.load() if source is not None else running
    config = _guarded(_as_it_listens(read, running), running, source)
    keystore = None if config.keyless else KeyStore(str(config.auth.keys_file))
    for backend in config.backends:
        upstream_of(backend)  # raises now what it would raise half-way through taking up
    tls = config.listen.tls
    kept = [name for name in NEED_RESTART if _value(read, name) != _value(config, name)]
    return Fresh(config, keystore, context_of(tls) if tls else None, tuple(kept))


def _as_it_listens(read: Config, running: Config) -> Config:
    """With the address of the socket that is open, which speaks TLS or does not."""
    tls = read.listen.tls
    if (tls is None) is not (running.listen.tls is None):
        tls = running.listen.tls
    listen = replace(read.listen, host=running.listen.host, port=running.listen.port, tls=tls)
    return replace(read, listen=listen, redis=running.redis)


def _guarded(config: Config, running: Config, source: Source | None) -> Config:
    """A gateway that asks for keys never stops to; that others reach it, it knows better than the file."""
    if config.keyless and not running.keyless:
        config = replace(config, auth=replace(config.auth, keys_file=running.auth.keys_file))
    if config.auth.anonymous and not is_loopback(config.listen.host):
        text = f"the gateway listens on {config.listen.host}, so clients need a key; set it to false, or restart"
        raise ConfigErrors([Mistake(source.file if source else "", 0, "auth.anonymous", text)])
    return config


def _value(config: Config, name: str) -> object:
    value: object = config
    for part in name.split("."):
        value = getattr(value, part)
    return value
