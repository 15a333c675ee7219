"""`slotgate`, and `python -m gateway`: the same command."""

from __future__ import annotations

import click

from gateway import __version__
from gateway.cli.check import check
from gateway.cli.demo import demo
from gateway.cli.keys import keys
from gateway.cli.serve import serve


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="slotgate")
def main() -> None:
    """One OpenAI-compatible address in front of several self-hosted LLM engines.

    \b
    Start in front of your own engine:   slotgate serve --backend http://127.0.0.1:8080
    See it work on a small real model:   slotgate demo
    Make a key for a person or a tool:   slotgate keys new NAME
    """  # noqa: D301  (click's own mark for verbatim lines)


for command in (serve, demo, check, keys):
    main.add_command(command)

if __name__ == "__main__":
    main(prog_name="slotgate")
