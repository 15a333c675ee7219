"""What the documents tell a newcomer is true: links lead somewhere, commands and configs are accepted, names exist."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from gateway.__main__ import COMMANDS, main
from gateway.runtime.configfile import load

ROOT = Path(__file__).parents[2]
TOP = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]
DOCUMENTS = [*TOP, *sorted((ROOT / "docs").rglob("*.md"))]
TUTORIALS = [ROOT / "README.md", ROOT / "docs" / "quickstart.md"]
PLANNED: set[str] = set()  # commands that documents may speak of before they are there
DECISIONS = sorted((ROOT / "docs" / "decisions").glob("*.md"))


def named(path: Path) -> str:
    return str(path.relative_to(ROOT))


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def code(text: str) -> str:
    """Everything that is set as code, block or inline, one piece a line."""
    fenced = re.findall(r"^```\w*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    indented = re.findall(r"^    .+", text, re.MULTILINE)
    return "\n".join([*fenced, *indented, *re.findall(r"`([^`\n]+)`", text)])


def commands(text: str) -> Iterator[list[str]]:
    """The `slotgate …` command lines of a document, as argument lists, without variables before and comments behind."""
    for line in code(text).replace("\\\n", " ").splitlines():
        found = re.match(r"\s*(?:[A-Z_]+=\S* )*slotgate( .*)?$", line)
        if found is not None and not re.search(r"slotgate( [a-z]+)* (is|,)|…", line):
            yield shlex.split(found[1] or "", comments=True)


def accept(command: click.Command, arguments: list[str], parent: click.Context) -> None:
    """Parse a command line down to its last command, without running it. Raises UsageError."""
    if isinstance(command, click.Group):
        name, sub, rest = command.resolve_command(parent, arguments)
        assert sub is not None
        if not isinstance(sub, click.Group):
            sub.make_context(name, rest, parent=parent)
        elif rest:
            accept(sub, rest, click.Context(sub, info_name=name, parent=parent))


def all_commands(group: click.Group, path: str) -> Iterator[str]:
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if isinstance(command, click.Group):
            yield from all_commands(command, f"{path} {name}")
        else:
            yield f"{path} {name}"


def test_the_readme_can_be_read_in_a_few_minutes() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


@pytest.mark.parametrize("path", DOCUMENTS, ids=named)
def test_every_link_leads_somewhere(path: Path) -> None:
    text = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
    dead = []
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        target, _, anchor = link.partition("#")
        if "://" in target or target.startswith("mailto:"):
            continue
        file = path.parent / target if target else path
        if not file.exists() or (anchor and anchor not in anchors(file)):
            dead.append(link)
    assert dead == []


def anchors(file: Path) -> set[str]:
    titles = re.findall(r"^#+ (.+)$", file.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("path", DOCUMENTS, ids=named)
def test_every_command_line_in_the_documents_is_accepted(path: Path) -> None:
    wrong = []
    for arguments in commands(path.read_text()):
        if not arguments or arguments[0].startswith("-") or arguments[0] in PLANNED:
            continue
        try:
            accept(main, arguments, click.Context(main, info_name="slotgate"))
        except (click.MissingParameter, click.BadOptionUsage):
            pass  # `slotgate keys new` and `slotgate status --explain` only name them
        except click.UsageError as error:
            wrong.append(f"slotgate {shlex.join(arguments)}: {error.format_message()}")
    assert wrong == []


def test_what_is_planned_is_not_there_yet() -> None:
    assert PLANNED.isdisjoint(COMMANDS), "take it out of PLANNED"


def test_every_command_is_documented() -> None:
    told = "\n".join(path.read_text() for path in DOCUMENTS)
    assert [name for name in all_commands(main, "slotgate") if name not in told] == []


@pytest.mark.parametrize("path", TUTORIALS, ids=named)
def test_every_config_of_the_tutorials_is_correct(path: Path, tmp_path: Path) -> None:
    configs = blocks(path.read_text(), "yaml")
    assert configs
    for text in configs:
        file = tmp_path / "slotgate.yaml"
        file.write_text(text)
        assert load(file, environ={}).backends


@pytest.mark.parametrize("path", DOCUMENTS, ids=named)
def test_every_make_target_in_the_documents_exists(path: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    asked = set(re.findall(r"(?:^|\n|`)\s*make ([a-z-]+)", code(path.read_text())))
    assert asked <= targets


def test_the_design_names_modules_that_exist() -> None:
    text = (ROOT / "docs" / "design.md").read_text()
    assert len(text.splitlines()) <= 200
    for package, module in set(re.findall(r"`(core|runtime|api|engines)\.(\w+)", text)):
        where = ROOT / "gateway" / package / module
        assert where.is_dir() or where.with_suffix(".py").is_file(), f"{package}.{module}"


def test_decisions_are_short_numbered_and_say_context_decision_and_consequence() -> None:
    assert [int(path.name[:4]) for path in DECISIONS] == list(range(1, len(DECISIONS) + 1))
    for path in DECISIONS:
        text = path.read_text()
        assert len(text.splitlines()) <= 25, path.name
        assert text.startswith(f"# {path.name[:4]}: "), path.name
        assert re.findall(r"^\*\*(\w+)\.\*\*", text, re.MULTILINE) == [
            "Context",
            "Decision",
            "Consequence",
        ], path.name
