"""What a new report changes in what was known of a backend.

Law of this file: what an engine did not say this time still stands; load figures do not outlive their round.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from gateway.engines.base import UNKNOWN, EngineReport, State

_LASTING: Final = (
    "version",
    "models",
    "slots",
    "context_per_slot",
    "kv_tokens",
    "max_loaded",
    "incarnation",
    "preemptions",
)
_GONE: Final = (State.DOWN, State.LOADING, State.SLEEPING)


def merged(before: EngineReport | None, report: EngineReport) -> EngineReport:
    """The newest word on everything that this engine ever said."""
    if before is None or report.engine not in (before.engine, UNKNOWN):
        return report
    lasting: dict[str, Any] = {
        name: getattr(before, name) for name in _LASTING if getattr(report, name) is None
    }
    if report.slots is None:
        lasting["slots_assumed"] = before.slots_assumed
        lasting["slots_inferred"] = before.slots_inferred
    if report.kv_tokens is None:
        lasting["kv_shared"] = before.kv_shared
    if not report.capabilities:
        lasting["capabilities"] = before.capabilities
    if before.documents:
        lasting["documents"] = {**before.documents, **report.documents}
    return replace(report, engine=before.engine, **lasting)


def restarted(before: EngineReport | None, report: EngineReport) -> bool:
    """Has it become another process, or lost its model in between? Then its cache is empty."""
    if before is None:
        return False
    return (
        (before.state in _GONE and report.state is State.UP)
        or before.incarnation not in (None, report.incarnation)
        or before.engine != report.engine
    )


def other_models(before: EngineReport | None, report: EngineReport) -> tuple[list[str], list[str]]:
    """Models that are new and models that are gone, by own id; ([], []) at the first report."""
    if before is None or before.models is None or report.models is None:
        return [], []
    old, new = ({model.id for model in one} for one in (before.models, report.models))
    return sorted(new - old), sorted(old - new)
