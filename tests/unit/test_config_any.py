"""Law: whatever a file holds, reading it gives a config or a list of mistakes, and nothing else."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.config import Config
from gateway.core.settings.nodes import ConfigErrors, Mistake
from gateway.core.settings.schema import documented
from gateway.runtime.configfile import load

EXAMPLES = [
    file.read_text(encoding="utf-8")
    for file in sorted((Path(__file__).parents[2] / "config").glob("*.yaml"))
]
leaves = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.dates()
    | st.text(max_size=8)
    | st.sampled_from(["auto", "http://127.0.0.1:1", "${NOT_SET}", "0.0.0.0", "*", "30s", "coder"])
)
names = st.sampled_from(
    sorted({part for row in documented() for part in row.path.split(".")})
) | st.text(max_size=5)
trees = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(names | leaves.filter(lambda x: x == x), inner, max_size=4)
    ),
    max_leaves=12,
)


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("any") / "c.yaml"


def read(file: Path, data: bytes) -> None:
    file.write_bytes(data)
    found = mistakes_in(file)
    lines = len(re.findall("\r\n|[\r\n\x85\u2028\u2029]", data.decode("utf-8", "replace"))) + 1
    for one in found:
        assert 0 <= one.line <= lines
        assert one.message
        assert str(one).isprintable()


def mistakes_in(file: Path) -> tuple[Mistake, ...]:
    try:
        assert isinstance(load(file, environ={}), Config)
    except ConfigErrors as errors:
        return errors.mistakes
    return ()


@given(st.binary(max_size=200))
def test_any_bytes(file: Path, data: bytes) -> None:
    read(file, data)


@given(trees)
def test_any_tree_of_known_and_unknown_settings(file: Path, tree: object) -> None:
    read(file, yaml.safe_dump(tree, allow_unicode=True).encode("utf-8", "replace"))


@given(st.sampled_from(EXAMPLES), st.integers(0), st.integers(0, 6), st.text(max_size=6))
def test_any_slip_of_the_fingers_in_an_example(
    file: Path, example: str, place: int, cut: int, typed: str
) -> None:
    place %= len(example)
    slipped = example[:place] + typed + example[place + cut :]
    read(file, slipped.encode("utf-8", "replace"))
