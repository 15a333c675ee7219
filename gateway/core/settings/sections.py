"""Mappings: one whose keys are known settings, and one whose keys are names that people choose.

Law of this file: an unknown key is a mistake, a broken setting falls back to its default so that the
rules between settings still see the rest, and a section without a required setting is not built at all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any

from gateway.core.settings.kinds import Kind, Schema, Wrong, is_blank, read_at
from gateway.core.settings.nodes import BROKEN, Entries, Node, Notes, Scalar


@dataclass(frozen=True, slots=True)
class Setting:
    """One key: its kind, and its line in the documentation (a meaning, with the unit)."""

    name: str
    kind: Kind
    meaning: str


@dataclass(frozen=True, slots=True)
class Section:
    """A mapping with known keys, read into the frozen dataclass `shape`, which owns the defaults."""

    shape: type[Any]
    settings: tuple[Setting, ...]
    build: Callable[..., object] | None = None
    required: frozenset[str] | None = None  # None: the fields of `shape` that have no default

    def read(self, node: Node, path: str, notes: Notes) -> object:
        if not isinstance(node, Entries):
            known = ", ".join(self.names)
            return notes.wrong(path, f"is not a mapping; write its settings below it: {known}")
        values = {
            name: self._one(name, value, path, notes)
            for name, value in self._known(node, path, notes)
        }
        lacking = self._lacking(node, path, notes)
        good = {name: value for name, value in values.items() if value is not BROKEN}
        if lacking or any(name not in good for name in self.needed):
            return BROKEN
        built = (self.build or self.shape)(**good)
        notes.built(path, built)
        return built

    def schema(self) -> Schema:
        properties: Schema = {}
        for setting in self.settings:
            extra: Schema = {"description": setting.meaning}
            if isinstance(default := self.default(setting.name), bool | int | float | str):
                extra["default"] = default
            properties[setting.name] = {**setting.kind.schema(), **extra}
        return {
            "type": "object",
            "properties": properties,
            "additionalProperties": False,
            **({"required": sorted(self.needed)} if self.needed else {}),
        }

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(setting.name for setting in self.settings)

    @property
    def needed(self) -> frozenset[str]:
        """The settings without which the section is not built."""
        if self.required is not None:
            return self.required
        lone = (one for one in fields(self.shape) if one.default is MISSING)
        return frozenset(one.name for one in lone if one.default_factory is MISSING)

    def default(self, name: str) -> object:
        """The default of a setting; None where there is none or where it is `auto`."""
        default = {one.name: one.default for one in fields(self.shape)}[name]
        return None if default is MISSING else default

    def _known(self, node: Entries, path: str, notes: Notes) -> Iterator[tuple[str, Node]]:
        first: dict[str, int] = {}
        for name, value in node.entries:
            at = join(path, name.text)
            if name.text not in self.names:
                notes.unknown(name, at, self.names)
            elif name.text in first:
                notes.wrong(
                    at, f"is set twice, first in line {first[name.text]}; keep one", name.line
                )
            else:
                first[name.text] = name.line
                notes.seen(at, name.line)
                if not is_blank(value):
                    yield name.text, value

    def _one(self, name: str, node: Node, path: str, notes: Notes) -> object:
        kind = next(setting.kind for setting in self.settings if setting.name == name)
        return read_at(kind, node, join(path, name), notes)

    def _lacking(self, node: Entries, path: str, notes: Notes) -> bool:
        there = {name.text for name, value in node.entries if not is_blank(value)}
        lacking = sorted(self.needed - there)
        for name in lacking:
            kind = next(setting.kind for setting in self.settings if setting.name == name)
            example = getattr(kind, "example", "")
            shown = f", for example `{name}: {example}`" if example else ""
            notes.wrong(path, f"`{name}` is missing; write one{shown}", node.line)
        return bool(lacking)


@dataclass(frozen=True, slots=True)
class MapOf:
    """A mapping from names that people choose to values of one kind."""

    kind: Kind
    check_name: Callable[[str], object]
    example: str

    def read(self, node: Node, path: str, notes: Notes) -> object:
        if not isinstance(node, Entries):
            return notes.wrong(path, f"is not a mapping of names; write it as {self.example}")
        values: dict[str, object] = {}
        for name, inner in node.entries:
            at = join(path, name.text)
            if self._is_name(name, at, notes) and name.text not in values:
                notes.seen(at, name.line)
                values[name.text] = read_at(self.kind, inner, at, notes)
            elif name.text in values:
                notes.wrong(at, "is set twice; keep one", name.line)
        return {name: value for name, value in values.items() if value is not BROKEN}

    def schema(self) -> Schema:
        return {"type": "object", "additionalProperties": self.kind.schema()}

    def _is_name(self, name: Scalar, path: str, notes: Notes) -> bool:
        if not isinstance(name.value, str):
            notes.wrong(
                path,
                f'the name is not a text to YAML; write it in quotes: "{name.text}"',
                name.line,
            )
            return False
        try:
            self.check_name(name.text)
        except Wrong as wrong:
            notes.wrong(path, f"the name `{name.text}` {wrong}", name.line)
            return False
        return True


def join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def homes(section: Section, path: str = "") -> Mapping[str, str]:
    """Where each setting of the sections below belongs: for those that were put elsewhere."""
    found: dict[str, str] = {}
    for setting in section.settings:
        at = join(path, setting.name)
        found.setdefault(setting.name, at)
        if isinstance(setting.kind, Section):
            for name, home in homes(setting.kind, at).items():
                found.setdefault(name, home)
    return found
