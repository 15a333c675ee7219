"""The page of settings, the schema for editors and the examples keep up with the table of settings."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from gateway.core.settings.keyfile import KEY
from gateway.core.settings.schema import Row, documented, schema
from gateway.runtime.configfile import load

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
EXAMPLES = sorted((ROOT / "config").glob("*.yaml"))
ROWS = [*documented(), *documented(KEY, "[]")]


def cells() -> dict[str, list[str]]:
    """The table rows of the page by setting: default, unit, meaning."""
    found: dict[str, list[str]] = {}
    for line in PAGE.splitlines():
        if match := re.match(r"\| `([^`]+)` \|(.*)\|$", line):
            found[match[1]] = [cell.strip() for cell in re.split(r"(?<!\\)\|", match[2])]
    return found


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.path)
def test_the_page_gives_default_unit_and_meaning_of_every_setting(row: Row) -> None:
    default, unit, meaning = cells()[row.path]
    assert default.strip("`") == row.default
    assert unit == row.unit
    assert len(meaning) > 20


def test_the_page_names_no_setting_that_does_not_exist() -> None:
    known = {row.path for row in ROWS}
    assert {name for name in cells() if not name.startswith("SLOTGATE_")} == known


def test_the_schema_file_is_what_the_table_makes() -> None:
    text = (ROOT / "config" / "schema.json").read_text(encoding="utf-8")
    assert text == json.dumps(schema(), indent=2, ensure_ascii=False) + "\n", (
        "write it anew from gateway.core.settings.schema.schema()"
    )


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.stem)
def test_every_example_loads_without_any_environment(file: Path) -> None:
    config = load(file, environ={})
    assert config.backends


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.stem)
def test_every_example_satisfies_the_schema(file: Path) -> None:
    document = yaml.safe_load(file.read_text(encoding="utf-8"))
    assert list(violations(document, schema(), "")) == []


def test_the_schema_finds_what_is_wrong() -> None:
    document = {"backends": [{"url": 1, "slots": 0, "engin": "vllm"}], "listen": {"port": "x"}}
    found = dict(violations(document, schema(), ""))
    assert set(found) == {
        ".backends[0].url",
        ".backends[0].slots",
        ".backends[0].engin",
        ".listen.port",
    }


def test_the_four_promised_examples_are_there() -> None:
    assert {file.name for file in EXAMPLES} >= {
        "minimal.yaml",
        "team.yaml",
        "mixed-engines.yaml",
        "replicas.yaml",
    }


def violations(value: object, rule: dict, path: str) -> Iterator[tuple[str, str]]:
    """The part of JSON schema that our table uses, which is less than a dependency is worth."""
    if "anyOf" in rule:
        if all(list(violations(value, one, path)) for one in rule["anyOf"]):
            yield path, f"fits none of {rule['anyOf']}"
    elif "const" in rule or "enum" in rule:
        if value not in rule.get("enum", [rule.get("const")]):
            yield path, "is another word"
    elif rule["type"] == "object":
        yield from object_violations(value, rule, path)
    elif rule["type"] == "array":
        if not isinstance(value, list) or len(value) < rule.get("minItems", 0):
            yield path, "is no such list"
        else:
            for index, item in enumerate(value):
                yield from violations(item, rule["items"], f"{path}[{index}]")
    elif not leaf_fits(value, rule):
        yield path, f"is not {rule}"


def object_violations(value: object, rule: dict, path: str) -> Iterator[tuple[str, str]]:
    if not isinstance(value, dict):
        yield path, "is no mapping"
        return
    for name in rule.get("required", []):
        if name not in value:
            yield f"{path}.{name}", "is missing"
    for name, inner in value.items():
        known = rule.get("properties", {}).get(name) or rule.get("additionalProperties")
        if not known:
            yield f"{path}.{name}", "is unknown"
        else:
            yield from violations(inner, known, f"{path}.{name}")


def leaf_fits(value: object, rule: dict) -> bool:
    if rule["type"] == "string":
        return isinstance(value, str) and re.search(rule.get("pattern", ""), value) is not None
    if rule["type"] == "boolean":
        return isinstance(value, bool)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    whole = rule["type"] == "number" or isinstance(value, int)
    return whole and rule["minimum"] <= value <= rule["maximum"]
