"""The kinds of value that a setting can have: each reads a node, and describes itself as JSON schema.

Law of this file: a kind either returns a value that is right, or notes what to write instead and returns
BROKEN. It never raises, and never repeats a value that came from the environment or is a secret.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Final, Protocol

from gateway.core.config import Secret
from gateway.core.settings.nodes import BROKEN, Items, Node, Notes, Scalar, Unreadable

Schema = dict[str, object]


class Wrong(ValueError):  # noqa: N818 - not an error of the program
    """Raised by a check of a text: what is wrong, which never repeats the text, and an advice, which may."""

    def __init__(self, what: str, advice: str = "") -> None:
        super().__init__(f"{what}; {advice}" if advice else what)
        self.what = what


class Kind(Protocol):
    """What a setting may be."""

    def read(self, node: Node, path: str, notes: Notes) -> object: ...

    def schema(self) -> Schema: ...


@dataclass(frozen=True, slots=True)
class Text:
    """A text, given to `check`, which returns it in its final form or raises Wrong."""

    check: Callable[[str], object]
    example: str
    secret: bool = False  # wrapped in Secret, and never shown
    quiet: bool = False  # never shown

    def read(self, node: Node, path: str, notes: Notes) -> object:
        text = _text(node)
        if text is None:
            return notes.wrong(path, self._not_text(node))
        try:
            value = self.check(text)
        except Wrong as wrong:
            return notes.wrong(path, self._wrong(node, text, wrong))
        return Secret(str(value)) if self.secret else value

    def schema(self) -> Schema:
        return {"type": "string", "examples": [self.example]}

    def _wrong(self, node: Node, text: str, wrong: Wrong) -> str:
        """With the text as people wrote it, unless it may hold a secret (user:password@host, ?key=…)."""
        if self.secret or self.quiet or not text or "@" in text or "?" in text:
            return wrong.what
        if not isinstance(node, Scalar) or node.expanded:
            return f"the value from the environment {wrong.what}"
        return f"{node.shown} {wrong}"

    def _not_text(self, node: Node) -> str:
        if not isinstance(node, Scalar):
            return f"is a {_shape(node)}; write one text, for example `{self.example}`"
        quoted = "it in quotes" if self.secret or self.quiet else f'it in quotes: "{node.text}"'
        return f"is read by YAML as {_yaml_type(node.value)}; write {quoted}"


@dataclass(frozen=True, slots=True)
class Flag:
    """True or false."""

    def read(self, node: Node, path: str, notes: Notes) -> object:
        if isinstance(node, Scalar):
            if isinstance(node.value, bool):
                return node.value
            if node.expanded and node.text.lower() in {"true", "false"}:
                return node.text.lower() == "true"
        bare = " without quotes" if _is_quoted(node, "true", "false") else ""
        return notes.wrong(path, f"{_found(node)}; write true or false{bare}")

    def schema(self) -> Schema:
        return _or_variable({"type": "boolean"})


@dataclass(frozen=True, slots=True)
class Number:
    """A plain number in `unit`. `zero` says what 0 means, where it has a meaning of its own."""

    unit: str
    low: float
    high: float
    example: str
    whole: bool = False
    zero: str = ""
    instead_of_zero: str = ""
    auto: bool = False  # `auto` is accepted too, and read as None

    def read(self, node: Node, path: str, notes: Notes) -> object:
        if self.auto and _is_auto(node):
            return None
        value = _number(node)
        if value is None or (self.whole and value != int(value)):
            return notes.wrong(
                path, f"{_found(node)}; write {self._wanted()}{self._unit_slip(node)}"
            )
        if not self.low <= value <= self.high:
            extra = f" ({self.instead_of_zero})" if value == 0 and self.instead_of_zero else ""
            return notes.wrong(path, f"{_found(node)}; write {self._wanted()}{extra}")
        return int(value) if self.whole or value == int(value) else value

    def schema(self) -> Schema:
        kind = "integer" if self.whole else "number"
        plain: Schema = {"type": kind, "minimum": self.low, "maximum": self.high}
        return _or_variable(plain, auto=self.auto)

    def _wanted(self) -> str:
        form = "a whole number" if self.whole else "a plain number"
        unit = f" of {self.unit}" if self.unit else ""
        zero = f" (0: {self.zero})" if self.zero else ""
        auto = "auto or " if self.auto else ""
        return f"{auto}{form}{unit} from {self.low:.15g} to {self.high:.15g}{zero}"

    def _unit_slip(self, node: Node) -> str:
        """`30s` and `"30"` are what people write first: say the very text that is right."""
        if not isinstance(node, Scalar) or node.expanded:
            return f", for example {self.example}"
        match = _AMOUNT.fullmatch(node.text)
        factor = _UNITS.get(self.unit, {}).get(match[2].lower()) if match else None
        if match is None or factor is None:
            return f", for example {self.example}"
        amount = float(match[1]) * factor
        if not self.low <= amount <= self.high or (self.whole and amount != int(amount)):
            return f", for example {self.example}"
        return f": {amount:.15g}"


@dataclass(frozen=True, slots=True)
class Choice:
    """One of a few words."""

    words: tuple[str, ...]

    def read(self, node: Node, path: str, notes: Notes) -> object:
        text = node.text if isinstance(node, Scalar) else ""
        if text in self.words:
            return text
        near = get_close_matches(text.lower(), self.words, n=1)
        hint = f"; did you mean `{near[0]}`?" if near else ""
        return notes.wrong(path, f"{_found(node)}; write one of {', '.join(self.words)}{hint}")

    def schema(self) -> Schema:
        return _or_variable({"enum": list(self.words)})


@dataclass(frozen=True, slots=True)
class ListOf:
    """A list of `kind` without repetitions."""

    kind: Kind
    example: str
    lowest: int = 0
    auto: bool = False  # `auto` is accepted too, and read as None

    def read(self, node: Node, path: str, notes: Notes) -> object:
        if self.auto and _is_auto(node):
            return None
        if not isinstance(node, Items):
            auto = "auto or " if self.auto else ""
            return notes.wrong(path, f"{_found(node)}; write {auto}a list: {self._as_list(node)}")
        if len(node.items) < self.lowest:
            return notes.wrong(
                path, f"is an empty list; write at least {self.lowest}: {self.example}"
            )
        values: list[object] = []
        for index, item in enumerate(node.items):
            at = f"{path}[{index}]"
            value = read_at(self.kind, item, at, notes)
            if value is BROKEN:
                continue
            if value in values:
                notes.wrong(at, f"stands here twice, first as number {values.index(value) + 1}")
            values.append(value)
        return tuple(values)

    def schema(self) -> Schema:
        extra: Schema = {"minItems": self.lowest} if self.lowest else {}
        array: Schema = {"type": "array", "items": self.kind.schema(), **extra}
        return {"anyOf": [{"const": "auto"}, array]} if self.auto else array

    def _as_list(self, node: Node) -> str:
        if isinstance(node, Scalar) and node.text and not node.expanded:
            return f"[{node.text}]"
        return self.example


_AMOUNT: Final = re.compile(r"\s*(\d+(?:\.\d+)?(?:[eE]\d+)?)\s*([a-zA-Z]*)\s*")
_UNITS: Final[Mapping[str, Mapping[str, float]]] = {
    "seconds": {
        **dict.fromkeys(("", "s", "sec", "secs", "second", "seconds"), 1),
        **dict.fromkeys(("ms", "milliseconds"), 0.001),
        **dict.fromkeys(("m", "min", "mins", "minute", "minutes"), 60),
        **dict.fromkeys(("h", "hour", "hours"), 3600),
    },
    "MiB": {
        **dict.fromkeys(("", "m", "mb", "mib"), 1),
        **dict.fromkeys(("g", "gb", "gib"), 1024),
        **dict.fromkeys(("k", "kb", "kib"), 1 / 1024),
    },
    "KiB": {
        **dict.fromkeys(("", "k", "kb", "kib"), 1),
        **dict.fromkeys(("m", "mb", "mib"), 1024),
    },
    "tokens": {"": 1, "k": 1000, "m": 1_000_000},
    "requests": {"": 1, "k": 1000},
}


def read_at(kind: Kind, node: Node, path: str, notes: Notes) -> object:
    """Read what stands at `path`, remembering its line; silent about what was noted before."""
    notes.seen(path, node.line)
    return BROKEN if isinstance(node, Unreadable) else kind.read(node, path, notes)


def is_blank(node: Node) -> bool:
    """`key:` with nothing after it, or an environment variable that is set but empty: the default."""
    return isinstance(node, Scalar) and (
        not node.text.strip() if node.expanded else node.value is None
    )


def _is_auto(node: Node) -> bool:
    return isinstance(node, Scalar) and node.text == "auto"


def _is_quoted(node: Node, *words: str) -> bool:
    return isinstance(node, Scalar) and isinstance(node.value, str) and node.text.lower() in words


def _or_variable(plain: Schema, *, auto: bool = False) -> Schema:
    """What an editor may find there: the value itself, `auto`, or an environment variable."""
    choices = [plain, {"type": "string", "pattern": "^\\$\\{.+\\}$"}]
    return {"anyOf": [{"const": "auto"}, *choices] if auto else choices}


def _text(node: Node) -> str | None:
    if not isinstance(node, Scalar) or not isinstance(node.value, str):
        return None
    return node.text.strip() if node.expanded else node.text


def _number(node: Node) -> float | None:
    """The finite number that the node is; None for anything else, a quoted number too."""
    if not isinstance(node, Scalar) or isinstance(node.value, bool):
        return None
    if not node.expanded and not isinstance(node.value, int | float):
        return None
    try:
        value = float(node.text if node.expanded else str(node.value))
    except (ValueError, OverflowError):
        return None
    return value if math.isfinite(value) else None


def _found(node: Node) -> str:
    if not isinstance(node, Scalar):
        return f"is a {_shape(node)}"
    if node.text == "" and not node.expanded:
        return "is empty"
    quoted = isinstance(node.value, str) and not node.expanded and _AMOUNT.fullmatch(node.text)
    return f'is the text "{node.text}"' if quoted else f"is {node.shown}"


def _shape(node: Node) -> str:
    return "list" if isinstance(node, Items) else "mapping"


def _yaml_type(value: object) -> str:
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return "true or false"
    return "a number" if isinstance(value, int | float) else "a date"
