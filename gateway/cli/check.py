"""`slotgate check`: is this config right, and are the engines what it says they are?

Law of this file: every mistake is a line on stdout, and the exit status is 1 if there is any; a warning
alone leaves it 0.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

import click

from gateway.cli import probing
from gateway.core.config import Config
from gateway.core.keys import Key
from gateway.core.settings.nodes import ConfigErrors, Mistake
from gateway.core.settings.rules import doubts, unconfirmed
from gateway.runtime.configfile import load
from gateway.runtime.keystore import read_keys


@click.command()
@click.argument("file", type=click.Path(path_type=Path), envvar="SLOTGATE_CONFIG")
@click.option("--offline", is_flag=True, help="Do not ask the backends.")
@click.pass_context
def check(context: click.Context, file: Path, offline: bool) -> None:
    """Validate the config FILE, then ask each backend what it is."""
    config, keys, mistakes = _read(file)
    for mistake in mistakes:
        click.echo(str(mistake))
    if config is not None:
        named = unconfirmed(config) if offline else ()
        _tell(file, "warning: ", [*doubts(config), *named, *_key_doubts(config, keys, file)])
    if config is None or mistakes:
        _end(context, len(mistakes))
        return
    click.echo(f"{file}: correct: {_summary(config, keys)}")
    if not offline:
        _end(context, _ask_backends(config, file))


def _ask_backends(config: Config, file: Path) -> int:
    """Print what the backends say; how many things are wrong."""
    answers = asyncio.run(probing.ask_all(config))
    for line in probing.lines(answers):
        click.echo(line)
    _tell(file, "warning: ", probing.warnings(answers))
    return _tell(file, "", probing.wrongs(config, answers))


def _tell(file: Path, kind: str, found: Iterable[str]) -> int:
    count = 0
    for words in found:
        click.echo(f"{file}: {kind}{words}")
        count += 1
    return count


def _end(context: click.Context, wrong: int) -> None:
    if wrong:
        click.echo(f"{_count(wrong, 'thing')} to mend.", err=True)
        context.exit(1)


def _read(file: Path) -> tuple[Config | None, Sequence[Key], Sequence[Mistake]]:
    """The config and its keys, with the mistakes of both files."""
    try:
        config = load(file)
    except ConfigErrors as errors:
        return None, (), errors.mistakes
    if config.auth.keys_file is None:
        return config, (), ()
    try:
        return config, read_keys(Path(config.auth.keys_file)), ()
    except ConfigErrors as errors:
        return config, (), errors.mistakes


def _key_doubts(config: Config, keys: Sequence[Key], file: Path) -> Iterator[str]:
    now = datetime.now(UTC)
    if config.auth.keys_file is None:
        yield "auth: there are no keys, so everybody on this machine may use the gateway"
    elif not any(key.is_valid(now) for key in keys) and not config.auth.anonymous:
        yield (
            f"auth.keys_file: {config.auth.keys_file} has no valid key, so everybody is refused; "
            f"make one: slotgate keys new NAME --config {file}"
        )
    for key in keys:
        if not key.is_valid(now):
            yield f"auth.keys_file: the key {key.name} has expired; revoke it or make a new one"


def _summary(config: Config, keys: Sequence[Key]) -> str:
    found = [_count(len(config.backends), "backend")]
    if config.models:
        found.append(_count(len(config.models), "alias", "aliases"))
    found.append(_count(len(keys), "key"))
    return ", ".join(found)


def _count(number: int, one: str, many: str | None = None) -> str:
    return f"{number} {one if number == 1 else many or one + 's'}"
