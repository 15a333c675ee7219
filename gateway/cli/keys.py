"""`slotgate keys`: make, list and revoke keys.

They are in the keys file, or, where the config names a Redis, there: then all gateways share them.
Law of this file: a secret is printed once, by `new`, alone on stdout; hints go to stderr.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, TypeVar

import click
from click.core import ParameterSource
from rich.console import Console
from rich.table import Table

from gateway.cli.keys_places import FleetKeys, KeysFile
from gateway.core.keys import Key, hash_of
from gateway.core.settings import checks
from gateway.core.settings.keyfile import expiry_text, parse_expiry
from gateway.core.settings.kinds import Wrong
from gateway.core.settings.nodes import ConfigErrors
from gateway.runtime import keystore
from gateway.runtime.cluster_keystore import RedisKeysError, redis_of
from gateway.runtime.configfile import KEYS_FILE, keys_file_of

_COUNT: Final = click.IntRange(min=1, max=10**12)
_Command = TypeVar("_Command", bound=Callable[..., Any])


@click.group()
def keys() -> None:
    """Make, list and revoke API keys."""


def _keys_file_options(command: _Command) -> _Command:
    of_config = click.option(
        "--config",
        type=click.Path(dir_okay=False, path_type=Path),
        envvar="SLOTGATE_CONFIG",
        help="The config whose keys file, or Redis, is meant.",
    )
    direct = click.option(
        "--keys-file",
        type=click.Path(dir_okay=False, path_type=Path),
        help=f"The keys file itself.  [default: ./{KEYS_FILE}]",
    )
    return of_config(direct(command))


@keys.command()
@click.argument("name")
@click.option("--models", metavar="A,B", help="Models and aliases it may use.  [default: all]")
@click.option("--max-in-flight", type=_COUNT, help="Most requests at once.")
@click.option("--rpm", type=_COUNT, help="Requests a minute.")
@click.option("--tpm", type=_COUNT, help="Tokens a minute.")
@click.option(
    "--priority",
    type=click.Choice(["interactive", "batch"]),
    default="interactive",
    show_default=True,
    help="Interactive goes before batch.",
)
@click.option(
    "--weight",
    type=click.FloatRange(min=0.001, max=1000),
    callback=lambda _context, _option, value: _finite(value),
    default=1,
    show_default=True,
    help="Its share against other keys.",
)
@click.option("--expires", metavar="DATE", help="Last valid day, UTC: 2027-12-31.")
@click.option("--admin", is_flag=True, help="It may read /status, /metrics and the dashboard.")
@_keys_file_options
def new(
    name: str,
    models: str | None,
    expires: str | None,
    config: Path | None,
    keys_file: Path | None,
    **limits: Any,
) -> None:
    """Make a key called NAME and print it once; only its hash is kept."""
    secret = keystore.new_secret()
    key = Key(
        name=_name(name),
        hash=hash_of(secret),
        models=_models(models),
        expires=_expires(expires),
        **limits,
    )
    with _told():
        store = _store(config, keys_file)
        is_first = not store.has_been_used
        store.add(key)
    click.echo(secret)
    click.echo(
        f"Shown only this once. Its hash is in {store.place}; a running gateway takes it by itself.",
        err=True,
    )
    click.echo("Clients send it as `Authorization: Bearer KEY` or `x-api-key: KEY`.", err=True)
    if is_first:
        click.echo("A gateway that runs without keys asks for them from its next start.", err=True)


@keys.command("list")
@click.option("--json", "as_json", is_flag=True, help="A JSON list instead of a table.")
@_keys_file_options
def list_keys(as_json: bool, config: Path | None, keys_file: Path | None) -> None:
    """Show the keys and what each may do; never the keys themselves."""
    with _told():
        store = _store(config, keys_file)
        found = store.read()
    now = datetime.now(UTC)
    if as_json:
        click.echo(json.dumps([_as_json(key, now) for key in found], indent=2))
    elif not found:
        click.echo(f"No keys in {store.place}; make one with `slotgate keys new NAME`.", err=True)
    else:
        _print_table(found, now)


@keys.command()
@click.argument("name")
@_keys_file_options
def revoke(name: str, config: Path | None, keys_file: Path | None) -> None:
    """Remove the key called NAME."""
    with _told():
        store = _store(config, keys_file)
        store.revoke(name)
        left = len(store.read())
    click.echo(f"Revoked {name}; {store.next_look}.", err=True)
    if not left:
        click.echo(
            f"{store.place} holds no key now, which closes the gateway to everybody.", err=True
        )


def _store(config: Path | None, keys_file: Path | None) -> KeysFile | FleetKeys:
    """Where the keys are that are meant: with --config, the Redis it names; else a file."""
    path = _path(config, keys_file)
    if config is not None and keys_file is None and (url := redis_of(config)) is not None:
        store = FleetKeys(url, path)
        click.get_current_context().call_on_close(store.close)
        return store
    return KeysFile(path)


def _path(config: Path | None, keys_file: Path | None) -> Path:
    """The file that is meant: --keys-file, else that of the config, else keys.yaml here."""
    if config is not None and keys_file is not None:
        source = click.get_current_context().get_parameter_source("config")
        if source is ParameterSource.COMMANDLINE:
            raise click.UsageError("Give --config or --keys-file, not both.")
    if keys_file is not None:
        return keys_file
    return Path(KEYS_FILE) if config is None else keys_file_of(config)


@contextmanager
def _told() -> Iterator[None]:
    """What goes wrong with the file, as one line that says what to do."""
    try:
        yield
    except ConfigErrors as errors:
        raise click.ClickException(str(errors)) from errors
    except keystore.NameTakenError as error:
        raise click.ClickException(
            f"a key called {error} exists; choose another name, or revoke it first: slotgate keys revoke {error}"
        ) from error
    except keystore.UnknownNameError as error:
        raise click.ClickException(
            f"there is no key called {error}; see `slotgate keys list`"
        ) from error
    except RedisKeysError as error:
        raise click.ClickException(
            f"cannot use the Redis of the config: {error}; start it, or check redis.url"
        ) from error
    except OSError as error:
        raise click.ClickException(
            f"cannot use {error.filename}: {error.strerror}; check the folder and its permissions"
        ) from error


def _name(text: str) -> str:
    try:
        return checks.key_name(text)
    except Wrong as wrong:
        raise click.BadParameter(f"`{text}` {wrong}", param_hint="NAME") from wrong


def _finite(weight: float) -> float:
    if not math.isfinite(weight):  # nan passes every comparison of the range
        raise click.BadParameter("write a number from 0.001 to 1000")
    return weight


def _models(text: str | None) -> frozenset[str] | None:
    if text is None:
        return None
    names = [one.strip() for one in text.split(",")]
    try:
        return frozenset(checks.model_id(one) for one in names)
    except Wrong as wrong:
        raise click.BadParameter(f"a model {wrong}", param_hint="--models") from wrong


def _expires(text: str | None) -> datetime | None:
    if text is None:
        return None
    try:
        moment = parse_expiry(text)
    except Wrong as wrong:
        raise click.BadParameter(f"`{text}` {wrong}", param_hint="--expires") from wrong
    if moment <= datetime.now(UTC):
        raise click.BadParameter(
            f"`{text}` is over already; write a later day", param_hint="--expires"
        )
    return moment


def _as_json(key: Key, now: datetime) -> dict[str, object]:
    return {
        "name": key.name,
        "models": None if key.models is None else sorted(key.models),
        "max_in_flight": key.max_in_flight,
        "rpm": key.rpm,
        "tpm": key.tpm,
        "priority": key.priority,
        "weight": key.weight,
        "expires": None if key.expires is None else str(expiry_text(key.expires)),
        "expired": not key.is_valid(now),
        "admin": key.admin,
    }


def _print_table(found: tuple[Key, ...], now: datetime) -> None:
    table = Table()
    for title in (
        "name",
        "models",
        "at once",
        "rpm",
        "tpm",
        "priority",
        "weight",
        "expires",
        "admin",
    ):
        table.add_column(title, overflow="fold")
    for key in found:
        table.add_row(*_row(key, now))
    # Piped output must not be cut to the 80 columns that are assumed where there is no terminal.
    Console(width=None if sys.stdout.isatty() else 10_000).print(table)


def _row(key: Key, now: datetime) -> list[str]:
    expires = "never" if key.expires is None else str(expiry_text(key.expires))
    return [
        key.name,
        "all" if key.models is None else ", ".join(sorted(key.models)),
        *(
            "no limit" if limit is None else str(limit)
            for limit in (key.max_in_flight, key.rpm, key.tpm)
        ),
        key.priority,
        f"{key.weight:g}",
        expires if key.is_valid(now) else f"{expires} (expired)",
        "yes" if key.admin else "",
    ]
