"""The table seen from outside: as JSON schema for editors, and as the list that the docs must hold."""

from __future__ import annotations

from collections.abc import Iterator

from gateway.core.settings.kinds import Kind, ListOf, Schema
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


def documented() -> Iterator[tuple[str, Setting, object]]:
    """Every setting that holds a value: dotted path (`backends[].url`), row and default."""
    yield from _leaves(ROOT, "")


def _leaves(section: Section, path: str) -> Iterator[tuple[str, Setting, object]]:
    for setting in section.settings:
        at = join(path, setting.name)
        inner, suffix = _inside(setting.kind)
        if inner is None:
            yield at, setting, section.default(setting.name)
        else:
            yield from _leaves(inner, at + suffix)


def _inside(kind: Kind) -> tuple[Section | None, str]:
    if isinstance(kind, Section):
        return kind, ""
    if isinstance(kind, ListOf) and isinstance(kind.kind, Section):
        return kind.kind, "[]"
    if isinstance(kind, MapOf) and isinstance(kind.kind, Section):
        return kind.kind, ".NAME"
    return None, ""
