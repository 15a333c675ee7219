"""`slotgate serve`: run the gateway."""

from __future__ import annotations

import errno
import socket
import sys
from typing import Final

import click
from click.core import ParameterSource

from gateway.api.server import StartupError
from gateway.app import Gateway, Source, serve_forever
from gateway.core.config import Config
from gateway.core.settings.nodes import ConfigErrors, Mistake
from gateway.runtime.configfile import from_backends, load

_ADVICE: Final = {
    errno.EADDRINUSE: "something listens there already; stop it, or choose another port with --port",
    errno.EACCES: "this user may not use that port; choose one above 1023 with --port",
    socket.EAI_NONAME: "that name has no address here; name an address of this machine with --host",
    errno.EADDRNOTAVAIL: "this machine does not have that address; choose one that it has with --host",
}


@click.command(
    short_help="Run the gateway.",
    epilog="With keys in ./keys.yaml (`slotgate keys new NAME`), or in the file that the configuration names, clients "
    "need one. Without any, it serves this machine only.",
)
@click.option("--config", "config_file", type=click.Path(dir_okay=False), envvar="SLOTGATE_CONFIG",
              show_envvar=True, help="The YAML configuration.")  # fmt: skip
@click.option("--backend", "backends", multiple=True, metavar="URL",
              help="An engine to serve, when there is no configuration. May be repeated.")  # fmt: skip
@click.option("--host", help="Address to listen on.  [default: 127.0.0.1]")
@click.option("--port", type=click.IntRange(0, 65535), metavar="PORT",
              help="Port to listen on; 0 takes any free one.  [default: 8088]")  # fmt: skip
@click.pass_context
def serve(
    context: click.Context,
    config_file: str | None,
    backends: tuple[str, ...],
    host: str | None,
    port: int | None,
) -> None:
    """Run the gateway, from a configuration or in front of the engines named by --backend.

    \b
      slotgate serve --backend http://127.0.0.1:8080
      slotgate serve --config slotgate.yaml

    The first SIGTERM or Ctrl-C drains: no new work, streams finish. The second exits now.
    """  # noqa: D301  (click's own mark for verbatim lines)
    if backends and config_file is not None:
        if context.get_parameter_source("config_file") is ParameterSource.COMMANDLINE:
            raise click.UsageError("Give --config or --backend, not both.")
        config_file = None  # what was typed wins over the environment
    if config_file is None and not backends:
        raise click.UsageError(
            "Say which engines: `slotgate serve --backend http://127.0.0.1:8080`, or --config FILE; "
            "`slotgate demo` brings engines of its own."
        )
    try:
        config = _read(config_file, backends, host, port)
    except ConfigErrors as errors:
        wrong = [_of_option(mistake) for mistake in errors.mistakes]
        if config_file is None and all(wrong):
            raise click.UsageError(" ".join(wrong)) from errors
        for mistake in errors.mistakes:
            click.echo(_in_words(mistake, config_file), err=True)
        sys.exit(1)
    try:
        serve_forever(config, on_ready=_tell, source=_source(config_file, host, port))
    except StartupError as error:
        raise click.ClickException(_why(error, config)) from error


def _source(config_file: str | None, host: str | None, port: int | None) -> Source | None:
    """Where to read again when a file changes, or at SIGHUP."""
    if config_file is None:
        return None
    return Source(lambda: load(config_file, host=host, port=port), config_file)


def _read(
    config_file: str | None, backends: tuple[str, ...], host: str | None, port: int | None
) -> Config:
    if config_file is None:
        return from_backends(backends, host=host, port=port)
    return load(config_file, host=host, port=port)


def _of_option(mistake: Mistake) -> str:
    """A mistake in what an option says, in words; "" for one that is none."""
    setting = mistake.path.partition("[")[0]
    option = {"backends": "--backend", "listen.host": "--host"}.get(setting)
    return f"{option}: {mistake.message}" if option else ""


def _in_words(mistake: Mistake, config_file: str | None) -> str:
    """A mistake as it is told; without a config file there is none to write `auth.keys_file` in."""
    if config_file is None and mistake.path == "auth.keys_file":
        return (
            "Error: other machines can reach that address, so clients need a key: make one with "
            "`slotgate keys new NAME` in this folder, then start again."
        )
    return str(mistake)


def _tell(gateway: Gateway) -> None:
    """The one ready line; and at a terminal, where a person is, how to end it."""
    click.echo(gateway.ready_line(), err=True)
    if sys.stderr.isatty():
        click.echo("Ctrl-C: let what runs finish, then end. Twice: end at once.", err=True)


def _why(error: StartupError, config: Config) -> str:
    """One line with what to do, where the system's own words do not say it."""
    cause = error.__cause__
    advice = _ADVICE.get(cause.errno or 0) if isinstance(cause, OSError) else None
    if advice is None:
        return str(error)
    return f"cannot listen on {config.listen.host}:{config.listen.port}: {advice}"
