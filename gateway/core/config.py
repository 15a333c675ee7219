"""What an operator has decided, as frozen values.

Law of this file: a `Config` that exists is valid. Attribute names are the YAML names, every default is
written here and nowhere else, and a bare number carries its unit in its name. How the values are read
from a file, and every rule they obey, is in `core/settings/`.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Final

ENGINES: Final = ("auto", "llama-server", "ollama", "vllm", "sglang", "openai")


class Secret:
    """A text that neither `repr` nor `str` shows; `reveal()` gives it to the one place that sends it."""

    __slots__ = ("_text",)

    def __init__(self, text: str) -> None:
        self._text = text

    def reveal(self) -> str:
        return self._text

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and other._text == self._text

    def __hash__(self) -> int:
        return hash(self._text)

    def __repr__(self) -> str:
        return "Secret(…)"


@dataclass(frozen=True, slots=True)
class Tls:
    """PEM files; their paths are absolute once a config has been read."""

    cert: str
    key: str


@dataclass(frozen=True, slots=True)
class Listen:
    host: str = "127.0.0.1"
    port: int = 8088  # 0: any free port
    tls: Tls | None = None


@dataclass(frozen=True, slots=True)
class Auth:
    """`keys_file` is None only if none was set and no keys.yaml lay beside the config when it was read."""

    keys_file: str | None = None
    anonymous: bool = False
    metrics: str = "admin"
    key_in_path: bool = False


@dataclass(frozen=True, slots=True)
class Backend:
    """One running engine. None means `auto`: the engine is asked."""

    name: str
    url: str
    engine: str = "auto"
    api_key: Secret | None = None
    slots: int | None = None
    kv_tokens: int | None = None
    models: tuple[str, ...] | None = None
    drain: bool = False
    ca: str | None = None


@dataclass(frozen=True, slots=True)
class ModelAlias:
    ids: tuple[str, ...]
    fallback: str | None = None


@dataclass(frozen=True, slots=True)
class Admission:
    queue: int | None = None  # None is `auto`: as many as the pool has slots
    max_wait_s: float = 30


@dataclass(frozen=True, slots=True)
class Routing:
    affinity: bool = True
    keep_id_slot: bool = False


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Seconds; 0 switches one off."""

    connect_s: float = 5
    first_byte_s: float = 1800
    between_bytes_s: float = 600
    write_stall_s: float = 300
    early_headers_s: float = 240


@dataclass(frozen=True, slots=True)
class Limits:
    body_mib: float = 64
    header_kib: float = 64

    @property
    def body_bytes(self) -> int:
        return int(self.body_mib * 1024 * 1024)


@dataclass(frozen=True, slots=True)
class Redis:
    url: Secret  # it may hold a password


@dataclass(frozen=True, slots=True)
class Cors:
    origins: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Log:
    level: str = "info"
    format: str = "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """The whole file. Its properties are the questions that several parts ask of it."""

    backends: tuple[Backend, ...]
    listen: Listen = Listen()
    auth: Auth = Auth()
    models: Mapping[str, ModelAlias] = field(default_factory=dict)
    default_model: str | None = None
    admission: Admission = Admission()
    routing: Routing = Routing()
    timeouts: Timeouts = Timeouts()
    limits: Limits = Limits()
    redis: Redis | None = None
    drain_s: float = 60
    keepalive_s: float = 75
    trusted_proxies: tuple[str, ...] = ()
    cors: Cors = Cors()
    log: Log = Log()

    @property
    def keyless(self) -> bool:
        """No keys are configured at all, so nobody is asked for one: only on a loopback address."""
        return self.auth.keys_file is None

    @property
    def needs_key(self) -> bool:
        """Whether a request without a key is refused. False only ever on a loopback address."""
        return not self.keyless and not self.auth.anonymous

    @property
    def files(self) -> tuple[str, ...]:
        """The files beside the config whose change calls for a reload."""
        tls = self.listen.tls
        named = [self.auth.keys_file, *((tls.cert, tls.key) if tls else ())]
        named += [backend.ca for backend in self.backends]
        return tuple(dict.fromkeys(name for name in named if name))

    def unused(self, effective: Collection[str]) -> tuple[str, ...]:
        """The settings (`cors.origins`) that were changed from their default but have no effect yet.

        `effective` holds dotted names or whole sections (`timeouts`) that the running version obeys.
        """
        return tuple(
            path
            for path in _changed(self)
            if path not in effective and path.partition(".")[0] not in effective
        )


def is_loopback(host: str) -> bool:
    """Whether a listener on this host can be reached from the same machine only."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False  # a name that may resolve to anything


def _changed(config: Config) -> Iterator[str]:
    plain = Config(backends=config.backends)
    for section in fields(config):
        value, default = getattr(config, section.name), getattr(plain, section.name)
        if value == default:
            continue
        if is_dataclass(value) and is_dataclass(default):
            for setting in fields(value):
                if getattr(value, setting.name) != getattr(default, setting.name):
                    yield f"{section.name}.{setting.name}"
        else:
            yield section.name
