"""The table seen from outside: as JSON schema for editors, and as the list that the docs must hold."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from gateway.core.settings.kinds import Kind, ListOf, Number, Schema
from gateway.core.settings.sections import MapOf, Section, Setting, join
from gateway.core.settings.table import ROOT


def schema() -> Schema:
    """The whole table as JSON schema (draft 2020-12), for editors."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Slotgate configuration",
        **ROOT.schema(),
        "required": ["backends"],
    }


@dataclass(frozen=True, slots=True)
class Row:
    """What the docs must say of one setting: path (`backends[].url`), default, unit and meaning."""

    path: str
    default: str
    unit: str
    meaning: str


def documented(section: Section = ROOT, path: str = "") -> Iterator[Row]:
    """A row for every setting that holds a value."""
    for setting in section.settings:
        at = join(path, setting.name)
        inner, suffix = _inside(setting.kind)
        if inner is None:
            unit = setting.kind.unit if isinstance(setting.kind, Number) else ""
            yield Row(at, _default_text(section, setting), unit, setting.meaning)
        else:
            yield from documented(inner, at + suffix)


def _default_text(section: Section, setting: Setting) -> str:
    if setting.name in section.needed:
        return "required"
    if isinstance(setting.kind, Number | ListOf) and setting.kind.auto:
        return "auto"
    default = section.default(setting.name)
    if default is None:
        return "not set"
    if isinstance(default, bool):
        return str(default).lower()
    return "[]" if default == () else str(default)


def _inside(kind: Kind) -> tuple[Section | None, str]:
    """The section that a kind leads to, and how its path goes on."""
    if isinstance(kind, Section):
        return kind, ""
    if isinstance(kind, ListOf) and isinstance(kind.kind, Section):
        return kind.kind, "[]"
    if isinstance(kind, MapOf) and isinstance(kind.kind, Section):
        return kind.kind, ".NAME"
    return None, ""
