"""The settings of one backend and of one alias: rows of the table that `table` is the root of."""

from __future__ import annotations

from typing import Any, Final

from gateway.core import config as values
from gateway.core.settings import checks
from gateway.core.settings.kinds import Choice, Flag, ListOf, Number, Text
from gateway.core.settings.sections import Section, Setting

MODEL: Final = Text(checks.model_id, "qwen3-coder-30b")


def _backend(*, url: str, name: str | None = None, **rest: Any) -> values.Backend:
    """A backend is called after its address when it has no name."""
    return values.Backend(name=name or checks.authority(url), url=url, **rest)


BACKEND: Final = Section(
    values.Backend,
    (
        Setting(
            "name",
            Text(checks.backend_name, "gpu1"),
            "Name in metrics, logs and headers; unique. Not set: host:port of the URL.",
        ),
        Setting(
            "url",
            Text(checks.backend_url, "http://127.0.0.1:8080"),
            "Base URL of the engine, with or without `/v1`.",
        ),
        Setting("engine", Choice(values.ENGINES), "What runs there; `auto` finds out by asking."),
        Setting(
            "api_key",
            Text(checks.api_key, "${GPU1_KEY}", secret=True),
            "Key sent to this backend. Clients' own keys never reach it.",
        ),
        Setting(
            "slots",
            Number(
                "requests",
                1,
                65536,
                "4",
                whole=True,
                auto=True,
                instead_of_zero="to give a backend no work, write drain: true",
            ),
            "Most requests in flight there; a number wins over what the engine says.",
        ),
        Setting(
            "kv_tokens",
            Number("tokens", 1, 1e12, "65536", whole=True, auto=True),
            "Tokens that its KV cache holds.",
        ),
        Setting(
            "models",
            ListOf(MODEL, "[qwen3-coder-30b]", lowest=1, auto=True),
            "Model ids that it serves; `auto` takes the engine's own list.",
        ),
        Setting(
            "drain", Flag(), "True: it takes no new work and finishes what it has (maintenance)."
        ),
        Setting(
            "ca",
            Text(checks.file_path, "internal-ca.pem"),
            "PEM file of the authority that signed its certificate, relative to the config file. Not set: the system's.",
        ),
    ),
    build=_backend,
    required=frozenset({"url"}),
)

ALIAS: Final = Section(
    values.ModelAlias,
    (
        Setting(
            "ids",
            ListOf(MODEL, "[qwen3-coder-30b]", lowest=1),
            "The model ids behind the name; its pool is all backends that serve any of them.",
        ),
        Setting(
            "fallback", MODEL, "Model or alias that takes over when no backend of the ids is up."
        ),
    ),
)
