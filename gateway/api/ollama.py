"""Ollama's lists, `/api/tags`, `/api/ps` and `/api/version`, merged over the Ollama backends from what they last said.

Law of this file: from memory, so they answer at once however busy the engines are; and a key sees in them the models
that it may use, under the names that it may use.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from gateway.api.front import Local
from gateway.api.local import JSON
from gateway.core.catalog import Pool, nothing_known
from gateway.core.errors import GatewayError
from gateway.engines.base import EngineReport, State
from gateway.runtime.backends import Backends
from gateway.runtime.exchange import Exchange

OLLAMA: Final = "ollama"
TAGS: Final = "/api/tags"
PS: Final = "/api/ps"
VERSION: Final = "/api/version"

Entry = Mapping[str, Any]


class OllamaPages:
    """The handlers. Reads the reports; holds nothing itself."""

    def __init__(self, backends: Backends) -> None:
        self._backends = backends

    def table(self) -> dict[str, Local]:
        return {
            TAGS: Local(self.tags, "key"),
            PS: Local(self.ps, "key"),
            VERSION: Local(self.version, "key"),
        }

    async def tags(self, exchange: Exchange) -> None:
        """What is installed. Raises GatewayError(no_backend) while nothing is known."""
        await self._merged(exchange, TAGS)

    async def ps(self, exchange: Exchange) -> None:
        """What is loaded."""
        await self._merged(exchange, PS)

    async def version(self, exchange: Exchange) -> None:
        """The oldest version: clients conclude from it what they may ask for."""
        versions = [report.version for report in self._reports().values() if report.version]
        if not versions:
            if self._may_have_ollama():
                raise nothing_known()
            raise GatewayError("not_found", "There is no Ollama backend here.")
        oldest = min(versions, key=_parts)
        await exchange.respond(200, JSON, json.dumps({"version": oldest}).encode())

    async def _merged(self, exchange: Exchange, path: str) -> None:
        if not self._reports() and self._may_have_ollama():
            raise nothing_known()
        allowed = exchange.key.models if exchange.key else None
        entries = list(self._entries(path, allowed))
        await exchange.respond(200, JSON, json.dumps({"models": entries}).encode())

    def _entries(self, path: str, allowed: frozenset[str] | None) -> Iterator[Entry]:
        """One for each name that may be used; of the first backend of the configuration that has it."""
        told = {name: _by_name(report, path) for name, report in self._reports().items()}
        catalog = self._backends.catalog
        for name in catalog.listed(allowed):
            entry = _entry_of(catalog.pools[name], told)
            if entry is not None:
                yield {**entry, "name": name, "model": name}

    def _reports(self) -> dict[str, EngineReport]:
        return {
            name: known.report
            for name, known in self._backends.known.items()
            if known.report is not None and known.report.engine == OLLAMA
        }

    def _may_have_ollama(self) -> bool:
        """A backend has not been heard of yet, and may be one."""
        catalog = self._backends.catalog
        return any(
            known.settings.engine in ("auto", OLLAMA) and catalog.listings[name].paths is None
            for name, known in self._backends.known.items()
            if name in catalog.listings
        )


def _entry_of(pool: Pool, told: Mapping[str, Mapping[str, Entry]]) -> Entry | None:
    for backend, entries in told.items():
        own = pool.ids.get(backend)
        if own is None:
            continue
        entry = entries.get(own) or entries.get(own + ":latest")
        if entry is not None:
            return entry
    return None


def _by_name(report: EngineReport, path: str) -> dict[str, Entry]:
    """The entries of a native list. What is loaded is not known of an engine that does not answer."""
    if path == PS and report.state is State.DOWN:
        return {}
    listed = report.documents.get(path, {}).get("models")
    rows = [row for row in listed if isinstance(row, dict)] if isinstance(listed, list) else []
    return {str(row.get("model") or row.get("name")): row for row in rows}


def _parts(version: str) -> tuple[int, ...]:
    """`0.12.3-rc1` as numbers; what is no number counts for nothing."""
    return tuple(int(part) for part in re.findall(r"\d{1,9}", version)[:3])
