"""`slotgate status`: the live state of a running gateway, from its `/status`."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

import click
import httpx2
from rich.console import Console, RenderableType
from rich.live import Live

from gateway.cli.status_tables import explanation, overview

EVERY_S: Final = 2.0
TIMEOUT_S: Final = 5.0
DEFAULT_URL: Final = "http://127.0.0.1:8088"

Document = dict[str, Any]


@click.command(
    short_help="See what a running gateway believes.",
    epilog="Asks for an admin key when the gateway has keys (`slotgate keys new NAME --admin`).",
)
@click.option("--url", default=DEFAULT_URL, show_default=True, envvar="SLOTGATE_URL",
              show_envvar=True, metavar="URL", help="Where the gateway is.")  # fmt: skip
@click.option("--key", envvar="SLOTGATE_KEY", show_envvar=True, help="An admin key.")
@click.option("--watch", is_flag=True, help="Keep showing it, every two seconds, until Ctrl-C.")
@click.option("--explain", metavar="REQUEST_ID",
              help="Why this request (the x-request-id of its answer) went where it went.")  # fmt: skip
def status(url: str, key: str | None, watch: bool, explain: str | None) -> None:
    """Backends with their slots, queue, p95s, what was refused, and in words what is wrong.

    \b
      slotgate status --watch
      slotgate status --explain req-0123456789abcdef
    """  # noqa: D301  (click's own mark for verbatim lines)
    if watch and explain is not None:
        raise click.UsageError("Give --watch or --explain, not both.")
    ask = _asker(url, key)
    console = Console()
    if explain is not None:
        console.print(_explained(ask(explain), explain))
    elif watch:
        _watch(console, lambda: overview(ask(None)))
    else:
        console.print(overview(ask(None)))


def _watch(console: Console, look: Callable[[], RenderableType]) -> None:
    """Until Ctrl-C. A gateway that does not answer for a while is waited for, and said so."""
    first = look()
    with suppress(KeyboardInterrupt), Live(first, console=console, auto_refresh=False) as live:
        while True:
            time.sleep(EVERY_S)
            try:
                live.update(look(), refresh=True)
            except click.ClickException as error:
                live.update(error.format_message(), refresh=True)


def _explained(document: Document, request_id: str) -> RenderableType:
    decision = document.get("decision")
    if decision is None:
        raise click.ClickException(
            f"{request_id} is not among the last 1,000 requests that were given to a backend; the log has a line of "
            "every request, refused ones too"
        )
    return explanation(decision)


def _asker(url: str, key: str | None) -> Callable[[str | None], Document]:
    """A function that fetches the document. It raises ClickException with what to do."""
    address = url.rstrip("/").removesuffix("/v1") + "/status"
    headers = {"Authorization": f"Bearer {key}"} if key else {}

    def ask(explain: str | None) -> Document:
        try:
            answer = httpx2.get(
                address,
                params={"explain": explain} if explain is not None else None,
                headers=headers,
                timeout=TIMEOUT_S,
                trust_env=False,
            )
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            raise click.ClickException(
                f"no gateway answers at {url} ({error}): is it running? Say where with --url or SLOTGATE_URL"
            ) from error
        return _document(answer, url)

    return ask


def _document(answer: httpx2.Response, url: str) -> Document:
    if answer.status_code == 401:
        raise click.ClickException(
            "the gateway wants an admin key: give one with --key or SLOTGATE_KEY"
        )
    if answer.status_code == 403:
        raise click.ClickException(
            "that key is not an admin key: `slotgate keys new NAME --admin` makes one"
        )
    try:
        document = answer.raise_for_status().json()
    except (httpx2.HTTPError, ValueError) as error:
        raise click.ClickException(f"what answers at {url} is no Slotgate: {error}") from error
    if not isinstance(document, dict) or "backends" not in document:
        raise click.ClickException(f"what answers at {url} is no Slotgate")
    return document
