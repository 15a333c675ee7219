"""`slotgate serve`: run the gateway."""

from __future__ import annotations

import sys

import click

from gateway.api.server import StartupError
from gateway.app import Gateway, serve_forever
from gateway.core.config import Config
from gateway.core.settings.nodes import ConfigErrors
from gateway.runtime.configfile import from_backends, load


@click.command()
@click.option("--config", "config_file", type=click.Path(dir_okay=False), envvar="SLOTGATE_CONFIG",
              help="The YAML configuration.")  # fmt: skip
@click.option("--backend", "backends", multiple=True, metavar="URL",
              help="An engine to serve, when there is no configuration. May be repeated.")  # fmt: skip
@click.option("--host", help="Address to listen on. [default: 127.0.0.1]")
@click.option("--port", type=click.IntRange(0, 65535), help="Port to listen on. [default: 8088]")
def serve(
    config_file: str | None, backends: tuple[str, ...], host: str | None, port: int | None
) -> None:
    """Run the gateway, from a configuration or in front of the engines named by --backend.

    The first SIGTERM or Ctrl-C drains: no new work, streams finish. The second exits now.
    """
    if config_file is not None and backends:
        raise click.UsageError("Give --config or --backend, not both.")
    if config_file is None and not backends:
        raise click.UsageError(
            "Say which engines: `slotgate serve --backend http://127.0.0.1:8080`, or --config FILE."
        )
    try:
        config = _read(config_file, backends, host, port)
    except ConfigErrors as errors:
        for mistake in errors.mistakes:
            click.echo(str(mistake), err=True)
        sys.exit(1)
    try:
        serve_forever(config, on_ready=_tell)
    except StartupError as error:
        click.echo(f"slotgate: {error}", err=True)
        sys.exit(1)


def _read(
    config_file: str | None, backends: tuple[str, ...], host: str | None, port: int | None
) -> Config:
    if config_file is None:
        return from_backends(backends, host=host, port=port)
    return load(config_file, host=host, port=port)


def _tell(gateway: Gateway) -> None:
    """The one ready line."""
    click.echo(gateway.ready_line(), err=True)
