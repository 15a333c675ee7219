"""YAML files as nodes with lines. Errors of files, encodings and YAML are put into plain words here.

Law of this file: nothing leaves it but nodes and noted mistakes; a value from the environment is marked.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import yaml

from gateway.core.settings.nodes import (
    ConfigErrors,
    Entries,
    Items,
    Node,
    Notes,
    Scalar,
    Unreadable,
)
from gateway.core.settings.sections import join

_MAX_BYTES: Final = 16 * 1024 * 1024
_LOADER: Final[Any] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # C: 2,000 keys in 20 ms
_REFERENCE: Final = re.compile(r"\$\$\{|\$\{([^}]*)(\}?)")
_VARIABLE: Final = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)(?::-(.*))?", re.DOTALL)
_NULL: Final = "tag:yaml.org,2002:null"
_MERGE: Final = "tag:yaml.org,2002:merge"
_PLAIN_WORDS: Final = (
    ("variable", "between { } or [ ] a ${NAME} must be in quotes"),
    ("nesting depth", "it is nested too deep; is it the right file?"),
    ("tab", "there is a tab in the indentation; use spaces"),
    (
        "mapping values are not allowed",
        "a `:` too many: put the value in quotes, or mend the indentation",
    ),
    ("block mapping", "the indentation does not fit the lines above, or a `:` is missing"),
    ("block collection", "the indentation does not fit the lines above, or a `-` is missing"),
    ("quoted scalar", "a quote is not closed"),
    ("flow node", "between { } or [ ] a value is missing, or the bracket is not closed"),
    ("flow sequence", "a `[` is not closed, or a comma is missing"),
    ("flow mapping", "a `{` is not closed, or a comma is missing"),
    ("simple key", "a `:` is missing after the key"),
    ("undefined alias", "a `*name` refers to nothing; put a text that begins with * in quotes"),
    ("alias", "put a text that begins with * in quotes"),
    ("anchor", "put a text that begins with & in quotes"),
    ("cannot start any token", "put a text that begins with @, % or ` in quotes"),
)


def compose(path: Path, notes: Notes, environ: Mapping[str, str] | None = None) -> Node | None:
    """The file as a node; None when it holds nothing. Without `environ`, ${NAME} is plain text.

    Raises ConfigErrors when there is no tree to speak of: no file, no text, no YAML.
    """
    text = _text(path, notes)
    try:
        return _composed(text, notes, environ)
    except yaml.MarkedYAMLError as error:
        lines = text.splitlines()
        line = min(_line_of(error), len(lines))  # libyaml counts one more at the end of a file
        notes.wrong("", f"is not YAML: {_plainly(error, lines, line)}", line)
    except RecursionError:
        notes.wrong("", "is not YAML: it is nested too deep; is it the right file?", 0)
    raise ConfigErrors(notes.mistakes)


def _composed(text: str, notes: Notes, environ: Mapping[str, str] | None) -> Node | None:
    documents = list(yaml.compose_all(text, Loader=_LOADER))
    if all(document.tag == _NULL for document in documents):
        return None  # nothing, or nothing but `---`
    if len(documents) > 1:
        line = documents[1].start_mark.line + 1
        notes.wrong("", "a second document begins here; keep one, without `---` between", line)
    return _Reading(notes, environ).node(documents[0], "")


def _text(path: Path, notes: Notes) -> str:
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_BYTES + 1)
    except OSError as error:
        notes.wrong("", f"cannot be read: {error.strerror}; check its name and permissions", 0)
        raise ConfigErrors(notes.mistakes) from error
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        notes.wrong("", "is not UTF-8; save the file as UTF-8 text", line)
        text = ""
    if len(data) > _MAX_BYTES:
        notes.wrong("", f"is larger than {_MAX_BYTES >> 20} MiB; is it the right file?", 0)
    if odd := yaml.reader.Reader.NON_PRINTABLE.search(text):
        line = text.count("\n", 0, odd.start()) + 1
        notes.wrong("", f"there is a control character (U+{ord(odd[0]):04X}); remove it", line)
    notes.raise_mistakes()
    return text


def _line_of(error: yaml.MarkedYAMLError) -> int:
    """Where the trouble shows; for quotes and brackets that are not closed, where they begin."""
    mark = error.problem_mark or error.context_mark
    if error.context and ("quoted" in error.context or "flow" in error.context):
        mark = error.context_mark or mark
    return mark.line + 1 if mark else 0


def _plainly(error: yaml.MarkedYAMLError, lines: list[str], line: int) -> str:
    said = f"{error.context or ''} {error.problem or ''}"
    here = lines[line - 1] if line else ""
    if "\t" in here[: len(here) - len(here.lstrip())]:
        said = "tab"
    elif "flow" in said and "${" in here:
        said = "variable"
    return next((words for sign, words in _PLAIN_WORDS if sign in said), said.strip())


class _Reading:
    """One conversion of a YAML tree. Owns what it has converted, since anchors use a node many times."""

    def __init__(self, notes: Notes, environ: Mapping[str, str] | None) -> None:
        self._notes = notes
        self._environ = environ
        self._done: dict[int, Node | None] = {}
        self._constructor = yaml.constructor.SafeConstructor()

    def node(self, node: Any, path: str) -> Node:
        line = node.start_mark.line + 1
        if id(node) in self._done:
            done = self._done[id(node)]
            return done or self._unreadable(path, "refers to itself; write it out", line)
        self._done[id(node)] = None
        self._done[id(node)] = made = self._make(node, path, line)
        return made

    def _make(self, node: Any, path: str, line: int) -> Node:
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node, path, line)
        if isinstance(node, yaml.SequenceNode):
            return Items(
                line, tuple(self.node(one, f"{path}[{i}]") for i, one in enumerate(node.value))
            )
        return Entries(line, tuple(self._pairs(node, path)))

    def _pairs(self, node: Any, path: str) -> Iterator[tuple[Scalar, Node]]:
        """The entries in order; those of a merge (`<<: *defaults`) only where the mapping has no own."""
        merged: list[tuple[Scalar, Node]] = []
        own: set[str] = set()
        for key, value in node.value:
            if key.tag == _MERGE:
                merged += self._merged(value, path)
                continue
            name = self._key(key, path)
            if name is not None:
                own.add(name.text)
                yield name, self.node(value, join(path, name.text))
        for name, inner in merged:
            if name.text not in own:
                own.add(name.text)
                yield name, inner

    def _merged(self, value: Any, path: str) -> list[tuple[Scalar, Node]]:
        found: list[tuple[Scalar, Node]] = []
        for one in value.value if isinstance(value, yaml.SequenceNode) else [value]:
            entries = self.node(one, path)
            if isinstance(entries, Entries):
                found += entries.entries
            elif not isinstance(entries, Unreadable):
                self._notes.wrong(join(path, "<<"), "takes mappings only", one.start_mark.line + 1)
        return found

    def _key(self, key: Any, path: str) -> Scalar | None:
        line = key.start_mark.line + 1
        if isinstance(key, yaml.ScalarNode):
            return Scalar(line, key.value, self._value(key, path, line))
        self._notes.wrong(path, "a key is a list or mapping; keys are plain words", line)
        return None

    def _scalar(self, node: Any, path: str, line: int) -> Node:
        known = len(self._notes.mistakes)
        value = self._value(node, path, line)
        if len(self._notes.mistakes) > known:
            return Unreadable(line)
        if self._environ is None or not isinstance(value, str) or "${" not in value:
            return Scalar(line, node.value, value)
        text = _REFERENCE.sub(lambda match: self._expand(match, path, line), value)
        if len(self._notes.mistakes) > known:
            return Unreadable(line)
        return Scalar(line, text, text, expanded=True)

    def _expand(self, match: re.Match[str], path: str, line: int) -> str:
        if match[0] == "$${":
            return "${"
        variable = _VARIABLE.fullmatch(match[1]) if match[2] else None
        if variable is None:
            self._notes.wrong(
                path,
                "holds a `${` that is no variable; write ${NAME}, or $${ for the text itself",
                line,
            )
            return ""
        default: str | None = variable[2]
        found = (self._environ or {}).get(variable[1], default)
        if found is None:
            self._notes.wrong(
                path,
                f"the environment variable {variable[1]} is not set; set it, or write ${{{variable[1]}:-default}}",
                line,
            )
        return found or ""

    def _value(self, node: Any, path: str, line: int) -> object:
        try:
            return self._constructor.construct_object(node)
        except yaml.YAMLError:
            self._notes.wrong(path, f"the tag {node.tag} is not known; remove it", line)
        except (ValueError, OverflowError):
            pass  # looked like a date or number to YAML and is none: a text then
        return str(node.value)

    def _unreadable(self, path: str, message: str, line: int) -> Unreadable:
        self._notes.wrong(path, message, line)
        return Unreadable(line)
