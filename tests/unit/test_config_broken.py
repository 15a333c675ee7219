"""Every kind of slip in a config, as a file with what must be said about it.

The expectations stand in the file's leading comments (`# expect: LINE | PATH | FRAGMENT`), or beside it in
a `.expect` file where comments would spoil the case.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.core.settings.nodes import ConfigErrors
from gateway.runtime.configfile import load

FOLDER = Path(__file__).parents[1] / "data" / "broken_configs"
FILES = sorted(FOLDER.glob("*.yaml"))
SECRETS = ("hunter2", "123456", "X-Evil")


def expectations(file: Path) -> list[tuple[int, str, str]]:
    sidecar = file.with_suffix(".expect")
    text = (sidecar if sidecar.exists() else file).read_text(encoding="utf-8")
    found = []
    for line in text.splitlines():
        if line.startswith("# expect: "):
            number, path, fragment = line.removeprefix("# expect: ").split("|", 2)
            found.append((int(number), path.strip(), fragment.strip()))
    return found


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_broken_config_says_where_and_what_to_write_instead(file: Path) -> None:
    with pytest.raises(ConfigErrors) as caught:
        load(file, environ={})
    mistakes = caught.value.mistakes
    expected = expectations(file)
    assert {(one.line, one.path) for one in mistakes} == {
        (line, path) for line, path, _ in expected
    }
    for line, path, fragment in expected:
        messages = [one.message for one in mistakes if (one.line, one.path) == (line, path)]
        assert any(fragment in message for message in messages), messages
    assert all(str(one).startswith(str(file)) for one in mistakes)
    assert not any(secret in str(caught.value) for secret in SECRETS)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_each_mistake_is_one_line(file: Path) -> None:
    with pytest.raises(ConfigErrors) as caught:
        load(file, environ={})
    assert len(str(caught.value).splitlines()) == len(caught.value.mistakes)


def test_the_collection_is_large_and_complete() -> None:
    assert len(FILES) >= 50
    assert all(expectations(file) for file in FILES)
