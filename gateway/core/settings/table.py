"""The one table of settings: it reads the file, makes the JSON schema, and is held against the docs.

Law of this file: a setting exists only as a row here (those of one backend and of one alias in
`backends`). Its default is in `core/config.py`.
"""

from __future__ import annotations

from typing import Any, Final

from gateway.core import config as values
from gateway.core.settings import checks
from gateway.core.settings.backends import ALIAS, BACKEND, MODEL
from gateway.core.settings.kinds import Choice, Flag, ListOf, Number, Text
from gateway.core.settings.sections import MapOf, Section, Setting

_DAY_S: Final = 86_400.0
_PATH: Final = Text(checks.file_path, "keys.yaml")


def _config(*, backends: tuple[values.Backend, ...] = (), **rest: Any) -> values.Config:
    """Built even without backends (`rules` notes that), so that the other rules find their mistakes too."""
    return values.Config(backends=backends, **rest)


def _seconds(example: str, zero: str = "") -> Number:
    return Number("seconds", 0, _DAY_S, example, zero=zero)


LISTEN: Final = Section(
    values.Listen,
    (
        Setting(
            "host",
            Text(checks.host, "127.0.0.1"),
            "Address or name to listen on; `0.0.0.0` is every IPv4 address. Not changed by a reload.",
        ),
        Setting(
            "port",
            Number("", 0, 65535, "8088", whole=True, zero="any free port"),
            "TCP port; 0 takes any free one. Not changed by a reload.",
        ),
        Setting(
            "tls",
            Section(
                values.Tls,
                (
                    Setting(
                        "cert", Text(checks.file_path, "server.pem"), "Certificate chain, PEM."
                    ),
                    Setting(
                        "key",
                        Text(checks.file_path, "server.key"),
                        "Its private key, PEM, no password.",
                    ),
                ),
            ),
            "HTTPS: paths relative to the config file.",
        ),
    ),
)

AUTH: Final = Section(
    values.Auth,
    (
        Setting(
            "keys_file",
            _PATH,
            "File of the keys, relative to the config file, written by `slotgate keys`. Not set: `keys.yaml` "
            "beside the config if there is one, else keyless (on a loopback address only).",
        ),
        Setting(
            "anonymous", Flag(), "True: no key is needed. Only accepted on a loopback address."
        ),
        Setting(
            "metrics", Choice(("admin", "open")), "Who may read `/metrics`: admin keys, or anybody."
        ),
        Setting(
            "key_in_path",
            Flag(),
            "True: `/k/KEY/v1/…` works too, for clients that cannot send a header.",
        ),
    ),
)

TIMEOUTS: Final = Section(
    values.Timeouts,
    (
        Setting("connect_s", _seconds("5", "off"), "Seconds to connect to a backend. 0: off."),
        Setting(
            "first_byte_s",
            _seconds("1800", "off"),
            "Seconds from sending a request to a backend to the first byte of the answer's body. 0: off.",
        ),
        Setting(
            "between_bytes_s",
            _seconds("600", "off"),
            "Seconds between later bytes from a backend. 0: off.",
        ),
        Setting(
            "write_stall_s",
            _seconds("300", "off"),
            "Seconds that a client may leave its answer unread. 0: off.",
        ),
        Setting(
            "early_headers_s",
            _seconds("240", "off"),
            "Seconds of silence after which a waiting stream is begun with `: keep-alive` comments. 0: off.",
        ),
    ),
)

ROOT: Final = Section(
    values.Config,
    (
        Setting("listen", LISTEN, "Where clients connect."),
        Setting("auth", AUTH, "Who may use the gateway."),
        Setting(
            "backends",
            ListOf(BACKEND, "[{url: http://127.0.0.1:8080}]", lowest=1),
            "The running engines.",
        ),
        Setting(
            "models",
            MapOf(ALIAS, checks.model_id, "coder: {ids: [qwen3-coder-30b]}"),
            "Aliases: names that clients use, each for a pool of backends.",
        ),
        Setting(
            "default_model",
            MODEL,
            "Model or alias for requests that name none. Not set: the only model, if there is only one.",
        ),
        Setting(
            "admission",
            Section(
                values.Admission,
                (
                    Setting(
                        "queue",
                        Number(
                            "requests",
                            0,
                            1_000_000,
                            "16",
                            whole=True,
                            auto=True,
                            zero="nobody waits",
                        ),
                        "Most requests that wait for the backends they could use; `auto`: as many as those have slots. "
                        "0: nobody waits.",
                    ),
                    Setting(
                        "max_wait_s",
                        _seconds("30"),
                        "Longest wait for a slot in seconds; then, or when it is expected to be longer, a 503.",
                    ),
                ),
            ),
            "The queue.",
        ),
        Setting(
            "routing",
            Section(
                values.Routing,
                (
                    Setting(
                        "affinity",
                        Flag(),
                        "Send a conversation to the backend that has its prefix cached.",
                    ),
                    Setting(
                        "keep_id_slot",
                        Flag(),
                        "True: a request's top-level `id_slot` reaches the engine. False: it is cut out.",
                    ),
                ),
            ),
            "Choice of the backend.",
        ),
        Setting("timeouts", TIMEOUTS, "How long each phase may take."),
        Setting(
            "limits",
            Section(
                values.Limits,
                (
                    Setting(
                        "body_mib",
                        Number("MiB", 0.001, 4096, "64"),
                        "Largest request body in MiB, after decoding.",
                    ),
                    Setting(
                        "header_kib", Number("KiB", 1, 1024, "64"), "Largest request head in KiB."
                    ),
                ),
            ),
            "Sizes of requests.",
        ),
        Setting(
            "redis",
            Section(
                values.Redis,
                (
                    Setting(
                        "url",
                        Text(checks.redis_url, "redis://127.0.0.1:6379/0", secret=True),
                        "redis://, rediss:// or unix:// URL. Not changed by a reload.",
                    ),
                ),
            ),
            "Several gateways share keys, limits, slots and figures.",
        ),
        Setting(
            "drain_s",
            _seconds("60"),
            "Seconds that running requests have to finish after a TERM signal.",
        ),
        Setting(
            "keepalive_s", _seconds("75"), "Seconds that an idle client connection stays open."
        ),
        Setting(
            "trusted_proxies",
            ListOf(Text(checks.network, "10.0.0.0/8"), "[10.0.0.0/8]"),
            "Addresses or networks whose `X-Forwarded-For` is believed.",
        ),
        Setting(
            "cors",
            Section(
                values.Cors,
                (
                    Setting(
                        "origins",
                        ListOf(
                            Text(checks.origin, "https://chat.example.org"),
                            "[https://chat.example.org]",
                        ),
                        "Web origins whose pages may call the gateway; `*` is all (only with keys).",
                    ),
                ),
            ),
            "Calls from web pages.",
        ),
        Setting(
            "log",
            Section(
                values.Log,
                (
                    Setting(
                        "level",
                        Choice(("debug", "info", "warning", "error")),
                        "Least important line written.",
                    ),
                    Setting(
                        "format",
                        Choice(("auto", "console", "json")),
                        "`auto`: console on a terminal, else JSON lines.",
                    ),
                ),
            ),
            "The log.",
        ),
    ),
    build=_config,
    required=frozenset(),
)
