"""`slotgate doctor`: why is it slow?"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import click
from click.core import ParameterSource
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn
from rich.table import Table

from gateway.cli.ops import timing
from gateway.cli.ops.exam import Exam, can_work, look_at, model_of
from gateway.cli.ops.finding import Finding
from gateway.cli.ops.host import VMSTAT, judge_host, swapped_pages
from gateway.cli.ops.judge_engine import judge_engine
from gateway.cli.ops.judge_timing import Targets, figures, judge_timing
from gateway.cli.ops.reach import openings
from gateway.cli.ops.streamed import client_of
from gateway.core.config import Backend, Config, is_loopback
from gateway.core.settings.nodes import ConfigErrors
from gateway.runtime.configfile import from_backends, load

_USUAL: Final = Targets()
_PATIENCE_S: Final = 120.0  # for one silence of a probe


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What was looked at and what was found, wrong things first."""

    exams: tuple[Exam, ...]
    findings: tuple[Finding, ...]

    @property
    def wrong(self) -> int:
        return sum(one.wrong for one in self.findings)


@click.command(
    short_help="Find out why it is slow.",
    epilog="Exit status 1 when something is wrong. Without --probe no request is sent that could generate anything.",
)
@click.option("--config", "config_file", type=click.Path(path_type=Path), envvar="SLOTGATE_CONFIG",
              show_envvar=True, help="The gateway's configuration: all its backends.")  # fmt: skip
@click.option("--backend", "backends", multiple=True, metavar="URL",
              help="An engine, when there is no configuration. May be repeated.")  # fmt: skip
@click.option("--probe", is_flag=True,
              help=f"Also time at most {timing.MOST_REQUESTS} small requests to each, one backend after the other.")  # fmt: skip
@click.option("--target-ttft", default=_USUAL.ttft_s, show_default=True, metavar="S",
              type=click.FloatRange(min=0, min_open=True),
              help="Seconds to the first token of a prompt of 500 tokens that you can live with.")  # fmt: skip
@click.option("--target-itl", default=_USUAL.itl_s, show_default=True, metavar="S",
              type=click.FloatRange(min=0, min_open=True),
              help="Seconds between tokens that you can live with.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="The findings as JSON on stdout.")
@click.pass_context
def doctor(
    ctx: click.Context,
    *,
    config_file: Path | None,
    backends: tuple[str, ...],
    probe: bool,
    target_ttft: float,
    target_itl: float,
    as_json: bool,
) -> None:
    """Read what the engines report, time a few requests, and say what to change.

    \b
      slotgate doctor --backend http://127.0.0.1:8080 --probe
      slotgate doctor --config slotgate.yaml
    """  # noqa: D301  (click's own mark for verbatim lines)
    config = _config(ctx, config_file, backends)
    if probe:
        click.echo(_announcement(len(config.backends)), err=True)
    targets = Targets(target_ttft, target_itl)
    with _spinner(shown=not as_json) as spinner:
        task = spinner.add_task("looking", total=None)
        diagnosis = asyncio.run(
            diagnose(
                config.backends,
                targets,
                probe=probe,
                say=lambda words: spinner.update(task, description=words),
            )
        )
    if as_json:
        click.echo(json.dumps(document(diagnosis), indent=2))
    else:
        _show(diagnosis, probed=probe)
    if diagnosis.wrong:
        ctx.exit(1)


async def diagnose(
    backends: Sequence[Backend],
    targets: Targets,
    *,
    probe: bool = False,
    addresses: Sequence[str] | None = None,
    vmstat: Path = VMSTAT,
    say: Any = lambda _: None,
) -> Diagnosis:
    """Look at every backend and judge. `addresses`: of this machine, found out unless given; `say` is told what is at work."""
    async with asyncio.TaskGroup() as group:
        swapped = group.create_task(_swapped(backends, vmstat))
        looks = await asyncio.gather(*(look_at(backend) for backend in backends))
        exams = []
        for look in looks:
            say(f"who can reach {look.backend.name}")
            exam = replace(look, openings=await openings(look.backend.url, addresses))
            if probe and can_work(exam):
                say(f"timing requests to {look.backend.name}")
                exam = replace(exam, timing=await _timed(exam))
            exams.append(exam)
    found = [one for exam in exams for one in (*judge_engine(exam), *judge_timing(exam, targets))]
    found += judge_host(swapped.result())
    return Diagnosis(tuple(exams), tuple(sorted(found, key=lambda one: not one.wrong)))


async def _swapped(backends: Sequence[Backend], vmstat: Path) -> float | None:
    """Of this machine, if an engine runs on it."""
    if not any(is_loopback(urlsplit(one.url).hostname or "") for one in backends):
        return None
    return await swapped_pages(vmstat)


def document(diagnosis: Diagnosis) -> dict[str, Any]:
    """What --json prints."""
    return {
        "wrong": diagnosis.wrong,
        "findings": [asdict(one) for one in diagnosis.findings],
        "backends": [
            {
                "name": exam.backend.name,
                "url": exam.backend.url,
                "engine": exam.report.engine if exam.report else None,
                "slots": exam.slots,
                "measured": figures(exam.timing) if exam.timing else None,
            }
            for exam in diagnosis.exams
        ],
    }


async def _timed(exam: Exam) -> timing.Timing:
    backend, report = exam.backend, exam.report
    key = backend.api_key.reveal() if backend.api_key else None
    async with client_of(backend.url, key, _PATIENCE_S, ca=backend.ca) as client:
        return await timing.take_times(
            client,
            model_of(exam),
            report.engine if report else "unknown",
            report.context_per_slot if report else None,
        )


def _config(ctx: click.Context, file: Path | None, backends: tuple[str, ...]) -> Config:
    if backends and file is not None:
        if ctx.get_parameter_source("config_file") is ParameterSource.COMMANDLINE:
            raise click.UsageError("Give --config or --backend, not both.")
        file = None  # what was typed wins over the environment
    if file is None and not backends:
        raise click.UsageError(
            "Say which engines: `slotgate doctor --backend http://127.0.0.1:8080`, or --config FILE."
        )
    try:
        return load(file) if file is not None else from_backends(backends)
    except ConfigErrors as errors:
        for mistake in errors.mistakes:
            click.echo(str(mistake), err=True)
        raise click.ClickException("the configuration is not correct: see above") from errors


def _announcement(backends: int) -> str:
    where = "the backend" if backends == 1 else f"each of {backends} backends, one after the other"
    return (
        f"Sending at most {timing.MOST_REQUESTS} requests of at most {timing.TOKENS} tokens to {where}, never more than "
        "two at once."
    )


def _spinner(*, shown: bool) -> Progress:
    console = Console(stderr=True)
    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        console=console,
        transient=True,
        disable=not (shown and console.is_terminal),
    )


def _show(diagnosis: Diagnosis, *, probed: bool) -> None:
    console = Console(highlight=False)
    for exam in diagnosis.exams:
        console.print(_line(exam), markup=False, soft_wrap=True)
    for finding in diagnosis.findings:
        console.print()
        console.print(_block(finding))
    notes = len(diagnosis.findings) - diagnosis.wrong
    also = f"; {notes} worth knowing" if notes else ""
    summary = (
        f"{diagnosis.wrong} wrong{also}." if diagnosis.wrong else f"Nothing wrong found{also}."
    )
    more = "" if probed else " `--probe` also times a few small requests."
    console.print(f"\n{summary}{more}", markup=False, soft_wrap=True)


def _line(exam: Exam) -> str:
    if exam.report is None:
        return f"{exam.backend.name}: {exam.backend.url}: {exam.silence}"
    slots = f", {exam.slots} slot{'' if exam.slots == 1 else 's'}" if exam.slots else ""
    measured = figures(exam.timing) if exam.timing else ""
    return f"{exam.backend.name}: {exam.report.engine}, {exam.report.state.value}{slots}" + (
        f"; {measured}" if measured else ""
    )


def _block(finding: Finding) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    style, word = ("bold red", "wrong") if finding.wrong else ("bold yellow", "note")
    table.add_row(f"[{style}]{word}[/]", f"[bold]{finding.about}: {finding.code}[/]")
    for label in ("seen", "means", "change", "then"):
        text = str(getattr(finding, label))
        table.add_row(label, text.replace("[", "\\["))
    return table
