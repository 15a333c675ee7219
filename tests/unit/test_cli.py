"""The command line as a whole: wrong usage is one line that says what to do, and help teaches."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from gateway import __version__
from gateway.__main__ import main

DEAD = "http://127.0.0.1:1"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder without settings in the environment."""
    monkeypatch.chdir(tmp_path)
    for name in ("SLOTGATE_CONFIG", "SLOTGATE_URL", "SLOTGATE_KEY"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def run(*arguments: str, **env: str) -> Result:
    return CliRunner().invoke(main, arguments, env=env)


def leaves(command: click.Command, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    if not isinstance(command, click.Group):
        yield path
        return
    for name in command.list_commands(click.Context(command)):
        yield from leaves(sub_command(command, name), (*path, name))


def sub_command(command: click.Command, name: str) -> click.Command:
    assert isinstance(command, click.Group)
    found = command.get_command(click.Context(command), name)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("serv",), "Did you mean 'serve'?"),
        (("serve",), "slotgate serve --backend http://127.0.0.1:8080"),
        (("serve", "--bakend", "x"), "Did you mean '--backend'?"),
        (
            ("serve", "--backend", DEAD, "--config", "c.yaml"),
            "Give --config or --backend, not both.",
        ),
        (("serve", "--backend", DEAD, "--port", "x"), "'x' is not a valid integer"),
        (("serve", "--backend", DEAD, "--port", "65536"), "0<=x<=65535"),
        (("serve", "--backend", "localhost:8080"), "--backend: `localhost:8080` does not begin"),
        (("serve", "--backend", "http://h:99999", "--backend", "x"), "from 1 to 65535 --backend"),
        (("serve", "--backend", DEAD, "--host", "a/b"), "--host: `a/b` is not a host"),
        (("serve", "--config"), "--config"),
        (("check",), "Missing argument 'FILE'"),
        (("keys", "nw"), "Did you mean 'new'?"),
        (("keys", "new"), "Missing argument 'NAME'"),
        (("demo", "now"), "now"),
    ],
)
def test_wrong_usage_is_one_line_that_says_what_to_do(
    arguments: tuple[str, ...], says: str, folder: Path
) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("Error: ")
    assert says in line
    assert "--help` tells more" in line
    assert list(folder.iterdir()) == []


def test_without_a_command_the_help_is_shown_with_the_status_of_wrong_usage() -> None:
    result = run()
    assert result.exit_code == 2
    assert "slotgate serve --backend" in result.output


@pytest.mark.parametrize("path", list(leaves(main)), ids=" ".join)
def test_every_command_and_each_of_its_options_has_a_word_of_help(path: tuple[str, ...]) -> None:
    result = run(*path, "--help")
    assert result.exit_code == 0
    command: click.Command = main
    for name in path:
        command = sub_command(command, name)
    assert command.help
    silent = [p.name for p in command.params if isinstance(p, click.Option) and not p.help]
    assert silent == []


def test_the_help_of_all_commands_fits_on_a_line_each() -> None:
    listed = run("--help").output.partition("Commands:")[2]
    assert "..." not in "".join(
        line for line in listed.splitlines() if line.split()[:1] in (["serve"], ["demo"])
    )


def test_a_small_command_does_not_load_the_gateway() -> None:
    script = "import sys; from gateway.__main__ import main; main(['keys', 'list'], standalone_mode=False)"
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            f"{script}; print('uvicorn' in sys.modules, 'httpx2' in sys.modules)",
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.split() == ["False", "False"], done.stderr


def test_python_m_gateway_is_the_same_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "gateway", "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout == f"slotgate, version {__version__}\n"


def test_without_keys_it_refuses_to_serve_other_machines_and_says_how_to_make_one() -> None:
    result = run("serve", "--backend", DEAD, "--host", "0.0.0.0")
    assert result.exit_code == 1
    (line,) = result.stderr.splitlines()
    assert "slotgate keys new NAME" in line


def test_every_mistake_of_a_config_is_told_before_it_starts(folder: Path) -> None:
    (folder / "c.yaml").write_text("backends:\n  - ulr: x\nlisten: {port: 99999}\n")
    result = run("serve", "--config", "c.yaml")
    assert result.exit_code == 1
    lines = result.stderr.splitlines()
    assert len(lines) == 3
    assert all(line.startswith("c.yaml:") for line in lines)


def test_a_config_from_the_environment_is_used(folder: Path) -> None:
    (folder / "c.yaml").write_text("backends: 3\n")
    assert "c.yaml" in run("serve", SLOTGATE_CONFIG="c.yaml").stderr
    assert "c.yaml" in run("check", "--offline", SLOTGATE_CONFIG="c.yaml").output


def test_a_backend_on_the_command_line_wins_over_a_config_of_the_environment() -> None:
    result = run("serve", "--backend", "ftp://x", SLOTGATE_CONFIG="none.yaml")
    assert result.exit_code == 2
    assert "none.yaml" not in result.stderr
    assert "ftp://x" in result.stderr


def test_an_address_that_cannot_be_had_is_told_with_what_to_do(folder: Path) -> None:
    run("keys", "new", "alice")
    result = run("serve", "--backend", DEAD, "--host", "192.0.2.1", "--port", "0")
    assert result.exit_code == 1
    assert "this machine does not have that address" in result.stderr
    assert "Traceback" not in result.output
