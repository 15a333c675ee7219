"""`slotgate`, and `python -m gateway`: the same command.

Law of this file: whatever is wrong with a command line is told in one line on stderr that says what to do, with status 2.

A command is imported when it is wanted: the small ones start at once, and a Ctrl-C meanwhile is click's to answer.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from importlib import import_module
from typing import Any, ClassVar, Final, cast

import click
from click.exceptions import NoArgsIsHelpError

from gateway import __version__

COMMANDS: Final = (
    "serve",
    "demo",
    "check",
    "keys",
    "status",
    "doctor",
    "loadtest",
    "plan",
)  # each is gateway.cli.NAME.NAME


class WrongUsage(click.ClickException):
    """A usage error in one line; click's own form takes four."""

    exit_code: ClassVar[int] = 2


class Commands(click.Group):
    """The group of all commands, in the order in which a person meets them."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002  (click's signature)
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        if cmd_name not in COMMANDS:
            return None
        return cast("click.Command", getattr(import_module(f"gateway.cli.{cmd_name}"), cmd_name))

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] not in COMMANDS and not args[0].startswith("-"):
            close = get_close_matches(args[0], COMMANDS)
            hint = f"Did you mean '{close[0]}'?" if close else f"There are {', '.join(COMMANDS)}."
            ctx.fail(f"No such command '{args[0]}'. {hint}")
        return super().resolve_command(ctx, args)

    def make_context(self, *args: Any, **extra: Any) -> click.Context:
        with _one_line():
            return super().make_context(*args, **extra)

    def invoke(self, ctx: click.Context) -> Any:
        with _one_line():
            return super().invoke(ctx)


@contextmanager
def _one_line() -> Iterator[None]:
    try:
        yield
    except NoArgsIsHelpError:
        raise
    except click.UsageError as error:
        name = error.ctx.command_path if error.ctx is not None else "slotgate"
        raise WrongUsage(f"{error.format_message()} (`{name} --help` tells more)") from error


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="slotgate")
def main() -> None:
    """One OpenAI-compatible address in front of several self-hosted LLM engines.

    \b
    See it work on a small real model:   slotgate demo
    Start in front of your own engine:   slotgate serve --backend http://127.0.0.1:8080
    Make a key for a person or a tool:   slotgate keys new NAME
    Look a config and its engines over:  slotgate check slotgate.yaml
    See what a running gateway is at:    slotgate status --watch

    \b
    SLOTGATE_CONFIG, SLOTGATE_URL and SLOTGATE_KEY stand for --config, --url and --key.
    """  # noqa: D301  (click's own mark for verbatim lines)


if __name__ == "__main__":
    main(prog_name="slotgate")
