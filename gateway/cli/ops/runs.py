"""Saved load tests: one JSON file a run, and what changed between two of them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from gateway.cli.ops.percentile import Spread
from gateway.cli.ops.tally import Load, Step

FORMAT: Final = 1


class BadRun(Exception):  # noqa: N818 - a fact about a file
    """The file is no saved run, and why."""


def document_of(steps: Sequence[Step], about: Mapping[str, Any]) -> dict[str, Any]:
    """A run as it is saved and as --json prints it. `about`: how it was run."""
    return {"format": FORMAT, **about, "steps": [asdict(step) for step in steps]}


def steps_of(document: Any) -> tuple[Step, ...]:
    """The steps of a saved run. Raises BadRun."""
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise BadRun("it is not a run saved by this version of `slotgate loadtest --save`")
    try:
        return tuple(_step(row) for row in document["steps"])
    except (KeyError, TypeError) as error:
        raise BadRun(f"it is damaged ({error})") from error


def read_run(path: Path) -> tuple[Step, ...]:
    """Raises BadRun."""
    try:
        return steps_of(json.loads(path.read_bytes()))
    except (OSError, ValueError) as error:
        raise BadRun(f"{path} cannot be read: {error}") from error
    except BadRun as bad:
        raise BadRun(f"{path}: {bad}") from bad


def pairs(before: Sequence[Step], after: Sequence[Step]) -> list[tuple[Step, Step]]:
    """The steps that both runs have."""
    old = {(step.level, step.open_loop): step for step in before}
    return [(old[key], step) for step in after if (key := (step.level, step.open_loop)) in old]


def _step(row: dict[str, Any]) -> Step:
    spreads = {
        name: None if row[name] is None else Spread(**row[name])
        for name in ("ttft", "itl", "refusal")
    }
    return Step(**{**row, **spreads, "load": Load(**row["load"])})
