"""`slotgate loadtest`: the same requests at one, two, four… at once, and where more only adds latency."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import click
import httpx2
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)

from gateway.cli.loadtest_tables import changes, overview
from gateway.cli.ops import runs, work
from gateway.cli.ops.modelfile import NeedsPackage
from gateway.cli.ops.plot import draw, plotter
from gateway.cli.ops.steps import Trial, body_of, run_steps
from gateway.cli.ops.streamed import client_of, stream_chat
from gateway.cli.ops.tally import Step, advice
from gateway.cli.ops.watch import Watch

_REQUESTS: Final = 16
_MOST: Final = 4096  # at once, or a second
_STOPPED: Final = 130  # the status of what Ctrl-C ended
_WIDTH: Final = 150  # of the table in a file or a pipe


def _levels(
    _ctx: click.Context, _option: click.Parameter, value: str | None
) -> tuple[float, ...] | None:
    """1,2,4: positive numbers."""
    if value is None:
        return None
    try:
        found = tuple(float(one) for one in value.split(","))
    except ValueError:
        found = ()
    if not found or any(not 0 < one <= _MOST for one in found):
        raise click.BadParameter(f"{value!r}: write positive numbers with commas between: 1,2,4")
    return found


@click.command(
    short_help="The same requests at 1, 2, 4… at once.",
    epilog="It puts real load on what stands at BASE_URL. Run it against the engine, then against the gateway.",
)
@click.argument("base_url", envvar="SLOTGATE_URL")
@click.option("--concurrency", default="1,2,4,8", show_default=True, callback=_levels,
              metavar="1,2,4", help="Requests at once, a step each.")  # fmt: skip
@click.option("--rate", callback=_levels, metavar="0.5,1",
              help="Open loop instead: requests a second, whether answers come or not.")  # fmt: skip
@click.option("--requests", type=click.IntRange(min=1), metavar="N",
              help=f"In each step.  [default: {_REQUESTS}, or all of --prompts]")  # fmt: skip
@click.option("--duration", type=click.FloatRange(min=0, min_open=True), metavar="S",
              help="No request begins later than this in a step; without --requests, the set is repeated until then.")  # fmt: skip
@click.option("--prompts", type=click.Path(path_type=Path, dir_okay=False), metavar="F",
              help="One request a line: text, or JSON with `prompt` or `messages`.")  # fmt: skip
@click.option(
    "--agents", is_flag=True, help="Conversations of four turns with a common system prompt."
)
@click.option(
    "--max-tokens", default=64, show_default=True, type=click.IntRange(min=1), help="Of an answer."
)
@click.option("--model", help="Which model.  [default: the first that is listed]")
@click.option("--key", envvar="SLOTGATE_KEY", show_envvar=True, help="An API key.")
@click.option(
    "--keep-cache",
    is_flag=True,
    help="Do not mark prompts: later steps find what earlier ones left cached.",
)
@click.option(
    "--timeout", default=300.0, show_default=True, help="Seconds of silence that end a request."
)
@click.option("--target-ttft", type=click.FloatRange(min=0, min_open=True), metavar="S",
              help="p95 seconds to the first token that you can live with.")  # fmt: skip
@click.option("--target-itl", type=click.FloatRange(min=0, min_open=True), metavar="S",
              help="p95 seconds between tokens that you can live with.")  # fmt: skip
@click.option(
    "--save", type=click.Path(path_type=Path, dir_okay=False), help="Write the run to this file."
)
@click.option(
    "--compare",
    type=click.Path(path_type=Path, dir_okay=False),
    help="A saved run to compare with.",
)
@click.option("--plot", type=click.Path(path_type=Path, dir_okay=False), metavar="PNG",
              help="Draw it (needs matplotlib).")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="The figures as JSON on stdout.")
@click.pass_context
def loadtest(ctx: click.Context, /, **options: Any) -> None:
    """Send the same set of requests to BASE_URL at each step and say where the knee is.

    \b
      slotgate loadtest http://127.0.0.1:8080 --concurrency 1,2,4
      slotgate loadtest http://127.0.0.1:8088 --agents --target-ttft 2 --target-itl 0.1
      slotgate loadtest http://127.0.0.1:8088 --rate 0.5,1,2 --duration 60

    Exit status 1 when some request failed for another reason than a full queue, or nothing was served.
    """  # noqa: D301  (click's own mark for verbatim lines)
    wanted = Wanted(**options)
    try:
        before = runs.read_run(wanted.compare) if wanted.compare else ()
        pyplot = plotter() if wanted.plot else None
        steps, about = _run(wanted)
        if not steps:
            ctx.exit(_STOPPED)
        _tell(wanted, steps, about, before)
        if wanted.plot is not None:
            draw(pyplot, steps, wanted.plot)
    except (runs.BadRun, NeedsPackage, work.BadPrompts, httpx2.InvalidURL, OSError) as error:
        raise click.ClickException(str(error)) from error
    if "stopped" in about:
        ctx.exit(_STOPPED)
    if _failed(steps):
        ctx.exit(1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """The command line."""

    base_url: str
    concurrency: tuple[float, ...]
    rate: tuple[float, ...] | None
    requests: int | None
    duration: float | None
    prompts: Path | None
    agents: bool
    max_tokens: int
    model: str | None
    key: str | None
    keep_cache: bool
    timeout: float
    target_ttft: float | None
    target_itl: float | None
    save: Path | None
    compare: Path | None
    plot: Path | None
    as_json: bool

    def __post_init__(self) -> None:
        if self.prompts is not None and self.agents:
            raise click.UsageError("Give --prompts or --agents, not both.")

    def work(self) -> tuple[work.Conversation, ...]:
        """The request set."""
        if self.prompts is not None:
            found = work.from_file(self.prompts)
            return found if self.requests is None else work.cut(found, self.requests)
        count = self.requests or _REQUESTS
        return work.cut(work.agents(count) if self.agents else work.built_in(count), count)


def _run(wanted: Wanted) -> tuple[list[Step], dict[str, Any]]:
    """The steps that came to their end, and how they were run. Ctrl-C ends the run, not what is known already."""
    steps: list[Step] = []
    about: dict[str, Any] = {}
    try:
        asyncio.run(_measure(wanted, wanted.work(), steps, about))
    except KeyboardInterrupt:
        about["stopped"] = True
        click.echo("Stopped; the steps that ended:" if steps else "Stopped.", err=True)
    except BaseExceptionGroup as group:
        raise group.exceptions[0] from None
    return steps, about


async def _measure(
    wanted: Wanted,
    conversations: Sequence[work.Conversation],
    steps: list[Step],
    about: dict[str, Any],
) -> None:
    async with client_of(wanted.base_url, wanted.key, wanted.timeout) as client:
        trial = Trial(
            levels=wanted.rate or wanted.concurrency,
            work=conversations,
            model=wanted.model or await _first_model(client, wanted.base_url),
            max_tokens=wanted.max_tokens,
            open_loop=wanted.rate is not None,
            duration_s=wanted.duration,
            repeat=wanted.duration is not None and wanted.requests is None,
            run="" if wanted.keep_cache else secrets.token_hex(3),
        )
        watch = Watch(wanted.base_url, wanted.key)
        await watch.begin()
        about |= {"url": wanted.base_url, "what": watch.what, "model": trial.model}
        about |= {"max_tokens": trial.max_tokens, "open_loop": trial.open_loop}
        await _warm_up(client, trial)
        with _progress(trial, shown=not wanted.as_json) as (progress, task):
            async with aclosing(
                run_steps(client, trial, watch, lambda _: progress.advance(task))
            ) as running:
                async for step in running:
                    steps.append(step)  # noqa: PERF401 - what ended is kept when the rest is cut off


async def _warm_up(client: httpx2.AsyncClient, trial: Trial) -> None:
    """One short answer that is not counted: it loads the model and says early what is wrong."""
    body = body_of(trial, [{"role": "user", "content": "Say hello."}]) | {"max_tokens": 1}
    sample = await stream_chat(client, body)
    if sample.error is not None:
        words = f"{sample.error} {sample.detail}".strip()
        raise click.ClickException(f"the first request already failed: {words}")


async def _first_model(client: httpx2.AsyncClient, url: str) -> str:
    try:
        answer = await client.get("/v1/models")
        if answer.status_code in (401, 403):
            raise click.ClickException("it wants a key: give one with --key or SLOTGATE_KEY")
        return str(answer.raise_for_status().json()["data"][0]["id"])
    except (
        httpx2.HTTPError,
        httpx2.InvalidURL,
        ValueError,
        KeyError,
        IndexError,
        TypeError,
    ) as error:
        raise click.ClickException(
            f"{url} lists no model ({error}): is it running? Name one with --model"
        ) from error


@contextmanager
def _progress(trial: Trial, *, shown: bool) -> Iterator[tuple[Progress, TaskID]]:
    total = None if trial.repeat else len(trial.levels) * work.size(trial.work)
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    visible = shown and console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=not visible) as progress:
        yield progress, progress.add_task("requests", total=total)


def _tell(
    wanted: Wanted, steps: Sequence[Step], about: dict[str, Any], before: Sequence[Step]
) -> None:
    sentences = list(advice(steps, wanted.target_ttft, wanted.target_itl))
    document = runs.document_of(steps, about) | {"advice": sentences}
    if wanted.save is not None:
        wanted.save.write_text(json.dumps(document, indent=2) + "\n")
    if wanted.as_json:
        click.echo(json.dumps(document, indent=2))
        return
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=_WIDTH)
    console.print(f"{about['url']}, {about['what']}, model {about['model']}", markup=False)
    console.print(overview(steps))
    if before:
        console.print(changes(runs.pairs(before, steps), str(wanted.compare)))
    for sentence in sentences:
        console.print(sentence, markup=False, soft_wrap=True)


def _failed(steps: Sequence[Step]) -> bool:
    """Being refused is an answer; anything else that went wrong is not."""
    return any(set(step.errors) - {"refused"} for step in steps) or not any(
        step.served for step in steps
    )
