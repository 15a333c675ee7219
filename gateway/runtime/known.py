"""What is known of one backend: its settings, its connections, and what it said."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gateway.core.catalog import Listing
from gateway.core.config import Backend as Settings
from gateway.engines.base import EngineReport
from gateway.runtime.upstream import Target, Upstream


@dataclass(slots=True, eq=False)
class Known:
    """What is known of one backend. `report` holds the newest word on everything it ever said."""

    settings: Settings
    upstream: Upstream
    report: EngineReport | None = None
    reported_at: float | None = None
    last_traffic: float | None = None
    overflowed: tuple[int, int] | None = None  # its shape when its slots outgrew one KV cache

    @property
    def kv_limit(self) -> int | None:
        """Tokens that its running requests may need together; None: each slot has a cache of its own."""
        report = self.report
        if self.settings.kv_tokens is not None or report is None:
            return self.settings.kv_tokens
        if report.kv_shared:
            return report.kv_tokens
        return report.context_per_slot if self.overflowed == self.shape else None

    @property
    def shape(self) -> tuple[int, int]:
        """Slots and context: an engine that was started with others may not share its cache."""
        report = self.report
        return (report.slots or 0, report.context_per_slot or 0) if report else (0, 0)


def upstream_of(settings: Settings) -> Upstream:
    key = settings.api_key.reveal() if settings.api_key else None
    return Upstream(Target.parse(settings.name, settings.url, key, settings.ca))


def address_of(settings: Settings) -> tuple[object, ...]:
    return settings.url, settings.api_key, settings.ca, settings.engine


def listing_of(known: Known) -> Listing:
    """The models of one backend: as configured, else as it said."""
    settings, report = known.settings, known.report
    documents: dict[str, Mapping[str, Any]] = {}
    for model in (report.models or ()) if report else ():
        for name in (model.id, *model.aliases):
            documents[name] = model.document
    if settings.models is not None:
        documents = {name: documents.get(name, {}) for name in settings.models}
    paths = report.capabilities if report and report.capabilities else None
    latest = report is not None and report.engine == "ollama"
    return Listing(settings.name, documents, paths, latest)
