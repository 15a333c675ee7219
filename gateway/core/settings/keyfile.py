"""The keys file: its table, its rules, and its records as plain values for writing.

Law of this file: what `as_record` writes, `read` reads back as an equal key.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from typing import Any, Final

from gateway.core.keys import Key, end_of_day
from gateway.core.settings import checks
from gateway.core.settings.kinds import Choice, Flag, ListOf, Number, Schema, Text, Wrong, read_at
from gateway.core.settings.nodes import Items, Node, Notes, Scalar
from gateway.core.settings.sections import Section, Setting

_HASH: Final = re.compile(r"sha256:([0-9a-fA-F]{64})")
_DATE: Final = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}")
_MOMENT: Final = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}[T ][0-9]{2}:")
_LIST_EXAMPLE: Final = "[{name: alice, hash: sha256:…}]"


@dataclass(frozen=True, slots=True)
class Expiry:
    """A date, which lasts until the end of that day UTC, or a moment (UTC unless it says otherwise)."""

    def read(self, node: Node, path: str, notes: Notes) -> object:
        text = node.text if isinstance(node, Scalar) else ""
        try:
            return parse_expiry(text)
        except Wrong as wrong:
            return notes.wrong(path, f"`{text[:40]}` {wrong}")

    def schema(self) -> Schema:
        return {"type": "string", "format": "date"}


def parse_expiry(text: str) -> datetime:
    """The first instant at which the key is invalid. Raises Wrong."""
    try:
        moment = _moment(text.strip())
    except (ValueError, OverflowError):
        moment = None
    if moment is None:
        raise Wrong(
            "is not a date; write for example 2027-12-31 (valid until that day is over, UTC)"
        )
    return moment


def _moment(text: str) -> datetime | None:
    if _DATE.fullmatch(text):
        return end_of_day(date.fromisoformat(text))
    if not _MOMENT.match(text):
        return None  # Python reads more forms, such as weeks, than people expect here
    moment = datetime.fromisoformat(text)
    return moment.astimezone(UTC) if moment.tzinfo else moment.replace(tzinfo=UTC)


def read_hash(text: str) -> bytes:
    """The digest in `sha256:<hex>`. Raises Wrong, which never repeats the text: it might be a key."""
    match = _HASH.fullmatch(text)
    if match is None:
        raise Wrong(
            "it is not sha256: and 64 hex digits; write the hash, never the key itself "
            "(`slotgate keys new NAME` makes both)"
        )
    return bytes.fromhex(match[1])


def _key(*, models: tuple[str, ...] | None = None, **rest: Any) -> Key:
    return Key(models=None if models is None else frozenset(models), **rest)


def _count(example: str, what: str) -> Number:
    return Number(what, 1, 1e12, example, whole=True, instead_of_zero="to refuse a key, revoke it")


KEY: Final = Section(
    Key,
    (
        Setting(
            "name", Text(checks.key_name, "alice"), "Unique name: it stands in metrics and logs."
        ),
        Setting(
            "hash",
            Text(read_hash, "sha256:…", quiet=True),
            "`sha256:` and the hex digest of the key.",
        ),
        Setting(
            "models",
            ListOf(Text(checks.model_id, "coder"), "[coder]", lowest=1),
            "Models and aliases that it may use. Not set: all.",
        ),
        Setting(
            "max_in_flight", _count("4", "requests"), "Most requests at once. Not set: no limit."
        ),
        Setting("rpm", _count("60", "requests"), "Requests a minute. Not set: no limit."),
        Setting("tpm", _count("100000", "tokens"), "Tokens a minute. Not set: no limit."),
        Setting("priority", Choice(("interactive", "batch")), "Interactive goes before batch."),
        Setting("weight", Number("", 0.001, 1000, "2"), "Its share against other keys."),
        Setting("expires", Expiry(), "A date (valid until that day is over, UTC) or a moment."),
        Setting("admin", Flag(), "True: may read `/status`, `/metrics` and the dashboard."),
    ),
    build=_key,
    required=frozenset({"name", "hash"}),
)


def read(node: Node | None, notes: Notes) -> tuple[Key, ...]:
    """The keys of a composed file; none for an empty one. What is wrong is in `notes`."""
    if node is None:
        return ()
    if not isinstance(node, Items):
        notes.wrong("", f"is not a list of keys; write {_LIST_EXAMPLE}", node.line)
        return ()
    for index, item in enumerate(node.items):
        read_at(KEY, item, f"[{index}]", notes)
    found = notes.all_of(Key)
    _check_unique(found, notes)
    return tuple(key for _, key in found)


def as_record(key: Key) -> dict[str, object]:
    """A key as the mapping that the file holds: defaults are left out."""
    record: dict[str, object] = {"name": key.name, "hash": f"sha256:{key.hash.hex()}"}
    if key.models is not None:
        record["models"] = sorted(key.models)
    for name in ("max_in_flight", "rpm", "tpm", "priority", "weight", "admin"):
        if getattr(key, name) != KEY.default(name):
            record[name] = getattr(key, name)
    if key.expires is not None:
        record["expires"] = expiry_text(key.expires)
    return record


def expiry_text(expires: datetime) -> date | str:
    """The last valid day, where the key ends with one; else the moment."""
    if expires.timetz() == datetime.min.replace(tzinfo=UTC).timetz():
        return (expires - timedelta(days=1)).date()
    return expires.isoformat()


def _check_unique(found: list[tuple[str, Key]], notes: Notes) -> None:
    names: dict[str, str] = {}
    hashes: dict[bytes, str] = {}
    for path, key in found:
        if names.setdefault(key.name, path) != path:
            notes.wrong(
                f"{path}.name", f"`{key.name}` stands here twice; give each key its own name"
            )
        if hashes.setdefault(key.hash, path) != path:
            notes.wrong(f"{path}.hash", "is also the hash of another key; make a key of its own")
