"""A settings file as a tree that remembers its lines, and the list of what is wrong with it.

Law of this file: a mistake has a file, a line, a path such as `backends[1].slots`, and says what to write
instead; reading goes on after each one, so that a person sees all of them at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from enum import Enum
from typing import Final, TypeAlias, TypeVar

T = TypeVar("T")

_MOST: Final = 200  # mistakes of one file: a wrong file altogether must not take minutes to say so

_SHOWN: Final = 80  # characters of a wrong value: enough to know it again


@dataclass(frozen=True, slots=True)
class Scalar:
    """One leaf. `value` is what YAML makes of `text`; after expansion of ${NAME} it is always text."""

    line: int
    text: str
    value: object
    expanded: bool = False  # came from the environment: never shown, and its type is what is wanted

    @property
    def shown(self) -> str:
        """The value for a message to people; never one that came from the environment."""
        if self.expanded:
            return "the value from the environment"
        return f"`{self.text}`" if len(self.text) <= _SHOWN else f"`{self.text[:_SHOWN]}…`"


@dataclass(frozen=True, slots=True)
class Items:
    line: int
    items: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Entries:
    line: int
    entries: tuple[tuple[Scalar, Node], ...]


@dataclass(frozen=True, slots=True)
class Unreadable:
    """A node whose mistake has been noted already; nobody complains about it twice."""

    line: int


Node: TypeAlias = Scalar | Items | Entries | Unreadable


def child(node: Node | None, name: str) -> Node | None:
    """The value of this name in a mapping; None where there is no such name, or no mapping."""
    if not isinstance(node, Entries):
        return None
    return next((value for key, value in node.entries if key.text == name), None)


class Broken(Enum):
    """What a reader returns after it noted a mistake; never a legal value of any setting."""

    BROKEN = "broken"


BROKEN: Final = Broken.BROKEN


@dataclass(frozen=True, slots=True)
class Mistake:
    """`line` counts from 1; 0 when the mistake has no line (a missing file, the command line)."""

    file: str
    line: int
    path: str
    message: str

    def __str__(self) -> str:
        where = f"{self.file}:{self.line}" if self.line else self.file
        return f"{where}: {self.path}: {self.message}" if self.path else f"{where}: {self.message}"


class ConfigErrors(Exception):  # noqa: N818 - it holds all of them, and its name says so
    """A settings file that cannot be used, with every mistake in it, in the order of its lines."""

    def __init__(self, mistakes: Sequence[Mistake]) -> None:
        self.mistakes = tuple(sorted(mistakes, key=lambda mistake: mistake.line))
        super().__init__("\n".join(str(mistake) for mistake in self.mistakes))


class Notes:
    """What one reading of one file found out. Owned by that reading alone, dropped after it."""

    def __init__(self, file: str, homes: Mapping[str, str] | None = None) -> None:
        self.file = file
        self.mistakes: list[Mistake] = []
        self._homes = homes or {}  # setting -> its place, for those put in a wrong one
        self._lines: dict[str, int] = {}
        self._values: list[tuple[str, object]] = []

    def wrong(self, path: str, message: str, line: int | None = None) -> Broken:
        """Note a mistake; without a line it is where `path`, or the nearest thing above it, stands."""
        at = self.line_of(path) if line is None else line
        if len(self.mistakes) < _MOST:
            self.mistakes.append(Mistake(self.file, at, _one_line(path), _one_line(message)))
        elif len(self.mistakes) == _MOST:
            self.mistakes.append(
                Mistake(self.file, at, "", "there are more mistakes; mend these first")
            )
        return BROKEN

    def unknown(self, name: Scalar, path: str, known: Sequence[str]) -> None:
        """Note an unknown key, with the nearest known one."""
        if len(self.mistakes) > _MOST:
            return
        near = get_close_matches(name.text[:_SHOWN], known, n=1)
        home = self._homes.get(name.text)
        if near:
            advice = f"did you mean `{near[0]}`?"
        elif home and home != path:
            advice = f"it is written as `{home}`"
        else:
            advice = f"known here: {', '.join(known)}"
        self.wrong(path, f"unknown key {name.shown}; {advice}", name.line)

    def seen(self, path: str, line: int) -> None:
        """Remember where a path stands."""
        self._lines.setdefault(path, line)

    def built(self, path: str, value: object) -> None:
        """Remember a whole section, so that rules between sections can find it."""
        self._values.append((path, value))

    def all_of(self, kind: type[T]) -> list[tuple[str, T]]:
        """Every section of this type that could be built, with its path."""
        return [(path, value) for path, value in self._values if isinstance(value, kind)]

    def any_below(self, *paths: str) -> bool:
        """Whether anything was noted against one of these sections: then rules about it stay silent."""
        return any(mistake.path.startswith(paths) for mistake in self.mistakes)

    def line_of(self, path: str) -> int:
        while path and path not in self._lines:
            path = path[: max(path.rfind("."), path.rfind("["), 0)]
        return self._lines.get(path, 0)

    def raise_mistakes(self) -> None:
        """Raise ConfigErrors if anything was noted."""
        if self.mistakes:
            raise ConfigErrors(self.mistakes)


def _one_line(text: str) -> str:
    """What a file holds must neither break the line of a message nor reach a terminal as commands."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
