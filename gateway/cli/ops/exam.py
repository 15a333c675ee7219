"""What the doctor knows of one backend before it judges: its answers, what was timed, and who else can reach it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from gateway.cli.ops.reach import Opening
from gateway.cli.ops.timing import Timing
from gateway.core.config import Backend
from gateway.engines.base import EngineReport, Look, Seen, State
from gateway.runtime.probe import Findings, Probe, target_of

_SILENT: Final = "it answers, but not as an engine would; is the URL right?"


@dataclass(frozen=True, slots=True, kw_only=True)
class Exam:
    """One backend, looked at. `report` is None when it did not answer as an engine; `silence` then says why."""

    backend: Backend
    report: EngineReport | None
    seen: Seen = field(default_factory=dict)
    silence: str = ""
    timing: Timing | None = None  # None: not probed
    openings: tuple[Opening, ...] = ()

    @property
    def slots(self) -> int | None:
        """Requests that should run at once."""
        return self.backend.slots or (self.report.slots if self.report else None)


async def look_at(backend: Backend) -> Exam:
    """Ask all that its engine tells, once, its load included. Never raises for the backend's sake."""
    target = target_of(backend)
    findings = await Probe(target).ask_round(Look(weigh=True, full=True), None)
    report = findings.report(None)
    return Exam(backend=backend, report=report, seen=findings.seen, silence=_why(findings))


def model_of(exam: Exam) -> str | None:
    """The model to send a probe to: one that is loaded, if there is."""
    told = exam.report.models if exam.report else None
    wanted = exam.backend.models
    offered = [model for model in told or () if not wanted or model.id in wanted]
    loaded = next((model.id for model in offered if model.loaded), None)
    first = offered[0].id if offered else None
    return loaded or first or (wanted[0] if wanted else None)


def can_work(exam: Exam) -> bool:
    """Whether a request makes sense."""
    return exam.report is not None and exam.report.state in (State.UP, State.SLEEPING)


def _why(findings: Findings) -> str:
    return findings.failure.words if findings.failure else _SILENT
