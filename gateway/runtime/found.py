"""What was found behind each backend's address, in words for the ready line."""

from __future__ import annotations

from collections.abc import Iterator

from gateway.core.fleet import Backend
from gateway.runtime.known import Known


def in_words(backends: dict[str, Backend], known: dict[str, Known]) -> Iterator[str]:
    """Of each backend: engine, slots and models, and what of it is assumed; or that it is down."""
    for name, one in known.items():
        report = one.report
        if report is None or report.state.value == "down":
            yield f"{name}: down"
            continue
        slots = backends[name].slots
        assumed = " (assumed)" if one.settings.slots is None and report.slots_assumed else ""
        models = ", ".join(model.id for model in report.models or ()) or "no models"
        word = "slot" if slots == 1 else "slots"
        yield f"{name}: {report.engine}, {slots} {word}{assumed}, {models}"
