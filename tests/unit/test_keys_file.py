"""The keys file: what it may say, and that no reader or second writer ever meets it half written."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.keys import Key, Refusal, hash_of
from gateway.core.settings import keyfile
from gateway.core.settings.nodes import ConfigErrors
from gateway.runtime import keystore
from gateway.runtime.keystore import KeyStore, add, new_secret, read_keys, revoke

NOW = datetime(2026, 11, 29, tzinfo=UTC)
HASH = "sha256:" + "ab" * 32


def key(name: str, **more: object) -> Key:
    return Key(name=name, hash=hash_of(f"sk-{name}"), **more)


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def test_an_entry_with_a_name_and_a_hash_has_no_limits(tmp_path: Path) -> None:
    file = write(tmp_path / "keys.yaml", f"- {{name: alice, hash: '{HASH}'}}\n")
    assert read_keys(file) == (Key(name="alice", hash=bytes.fromhex("ab" * 32)),)


def test_every_setting_of_a_key_is_read(tmp_path: Path) -> None:
    file = write(
        tmp_path / "keys.yaml",
        f"""
- name: bot-1
  hash: {HASH.upper().replace("SHA", "sha")}
  models: [coder, small]
  max_in_flight: 2
  rpm: 60
  tpm: 100000
  priority: batch
  weight: 0.5
  expires: 2027-12-31
  admin: true
""",
    )
    assert read_keys(file) == (
        Key(
            name="bot-1",
            hash=bytes.fromhex("ab" * 32),
            models=frozenset({"coder", "small"}),
            max_in_flight=2,
            rpm=60,
            tpm=100000,
            priority="batch",
            weight=0.5,
            expires=datetime(2028, 1, 1, tzinfo=UTC),
            admin=True,
        ),
    )


@pytest.mark.parametrize("text", ["", "[]\n", "# none yet\n", "---\n"])
def test_a_file_without_a_key_is_right_and_closes_the_gateway(tmp_path: Path, text: str) -> None:
    store = KeyStore(write(tmp_path / "keys.yaml", text))
    assert store.ring.find((hash_of("sk-alice"),), lambda: NOW) is Refusal.UNKNOWN


def test_a_missing_file_closes_the_gateway(tmp_path: Path) -> None:
    assert KeyStore(tmp_path / "keys.yaml").ring.keys == ()


@pytest.mark.parametrize(
    ("text", "line", "path", "fragment"),
    [
        ("alice: x\n", 1, "", "is not a list of keys"),
        ("- alice\n", 1, "[0]", "not a mapping"),
        (
            f"- name: a\n  hash: {HASH}\n- name: a\n  hash: {HASH[:-1]}c\n",
            3,
            "[1].name",
            "stands here twice",
        ),
        (
            f"- name: a\n  hash: {HASH}\n- name: b\n  hash: {HASH}\n",
            4,
            "[1].hash",
            "hash of another key",
        ),
        ("- name: a\n", 1, "[0]", "`hash` is missing"),
        (f"- hash: {HASH}\n", 1, "[0]", "`name` is missing"),
        ("- name: a\n  hash: sk-sg-canary\n", 2, "[0].hash", "never the key itself"),
        (f"- name: a b\n  hash: {HASH}\n", 1, "[0].name", "1 to 64"),
        (f"- name: {'x' * 65}\n  hash: {HASH}\n", 1, "[0].name", "1 to 64"),
        (f"- name: 12\n  hash: {HASH}\n", 1, "[0].name", 'in quotes: "12"'),
        (f"- name: a\n  hash: {HASH}\n  rpm: 0\n", 3, "[0].rpm", "revoke it"),
        (f"- name: a\n  hash: {HASH}\n  rmp: 5\n", 3, "[0].rmp", "did you mean `rpm`?"),
        (f"- name: a\n  hash: {HASH}\n  tpm: 10k\n", 3, "[0].tpm", ": 10000"),
        (f"- name: a\n  hash: {HASH}\n  models: coder\n", 3, "[0].models", "[coder]"),
        (f"- name: a\n  hash: {HASH}\n  models: []\n", 3, "[0].models", "empty list"),
        (f"- name: a\n  hash: {HASH}\n  priority: high\n", 3, "[0].priority", "interactive, batch"),
        (f"- name: a\n  hash: {HASH}\n  weight: 0\n", 3, "[0].weight", "from 0.001"),
        (f"- name: a\n  hash: {HASH}\n  expires: soon\n", 3, "[0].expires", "2027-12-31"),
        (f"- name: a\n  hash: {HASH}\n  admin: 1\n", 3, "[0].admin", "true or false"),
        (f"- name: a\n  hash: {HASH}\n  name: b\n", 3, "[0].name", "set twice"),
        ("- name: a\n\thash: x\n", 2, "", "tab"),
    ],
)
def test_a_wrong_keys_file_says_where_and_what_to_write(
    tmp_path: Path, text: str, line: int, path: str, fragment: str
) -> None:
    file = write(tmp_path / "keys.yaml", text)
    with pytest.raises(ConfigErrors) as caught:
        read_keys(file)
    assert [(one.line, one.path) for one in caught.value.mistakes] == [(line, path)]
    assert fragment in caught.value.mistakes[0].message
    assert "canary" not in str(caught.value)


def test_environment_variables_are_not_expanded_in_the_keys_file(
    tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setenv("NAME", "alice")
    file = write(tmp_path / "keys.yaml", f"- {{name: '${{NAME}}', hash: '{HASH}'}}\n")
    with pytest.raises(ConfigErrors, match="is not a name"):
        read_keys(file)


# -- writing


def test_a_new_secret_is_one_url_safe_word_with_enough_chance() -> None:
    secrets = {new_secret() for _ in range(200)}
    assert len(secrets) == 200
    for secret in secrets:
        body = secret.removeprefix("sk-sg-")
        assert len(body) == 32  # 32 of 62 characters are 190 bits
        assert body.isalnum()
        assert body.isascii()


def test_a_key_is_added_and_revoked(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    add(file, key("alice"))
    add(file, key("bob", rpm=5))
    assert [one.name for one in read_keys(file)] == ["alice", "bob"]
    revoke(file, "alice")
    assert read_keys(file) == (key("bob", rpm=5),)
    revoke(file, "bob")
    assert read_keys(file) == ()
    assert yaml.safe_load(file.read_text()) == []


def test_a_taken_name_and_an_unknown_name_change_nothing(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    add(file, key("alice"))
    before = file.read_bytes()
    with pytest.raises(keystore.NameTakenError):
        add(file, Key(name="alice", hash=b"x" * 32))
    with pytest.raises(keystore.UnknownNameError):
        revoke(file, "bob")
    assert file.read_bytes() == before


def test_a_wrong_file_is_never_written_over(tmp_path: Path) -> None:
    file = write(tmp_path / "keys.yaml", "- name: a\n  hash: mine\n")
    with pytest.raises(ConfigErrors):
        add(file, key("alice"))
    assert file.read_text() == "- name: a\n  hash: mine\n"


def test_the_file_is_0600_whatever_it_was_and_nothing_is_left_beside_it(tmp_path: Path) -> None:
    file = write(tmp_path / "keys.yaml", "[]")
    file.chmod(0o644)
    add(file, key("alice"))
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert [one.name for one in tmp_path.iterdir()] == ["keys.yaml"]


def test_a_write_that_fails_leaves_the_old_file_and_no_litter(tmp_path: Path, monkeypatch) -> None:
    file = tmp_path / "keys.yaml"
    add(file, key("alice"))
    before = file.read_bytes()

    def full(_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        add(file, key("bob"))
    assert file.read_bytes() == before
    assert [one.name for one in tmp_path.iterdir()] == ["keys.yaml"]


def test_a_symbolic_link_stays_one(tmp_path: Path) -> None:
    real = tmp_path / "real" / "keys.yaml"
    real.parent.mkdir()
    link = tmp_path / "keys.yaml"
    link.symlink_to(real)
    add(link, key("alice"))
    assert link.is_symlink()
    assert [one.name for one in read_keys(real)] == ["alice"]


def test_commands_at_the_same_time_lose_no_key(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    script = (
        "import sys; from pathlib import Path; from gateway.core.keys import Key, hash_of\n"
        "from gateway.runtime.keystore import add\n"
        "for n in range(5): name = f'{sys.argv[2]}.{n}'; add(Path(sys.argv[1]), Key(name=name, hash=hash_of(name)))\n"
    )
    root = Path(__file__).parents[2]
    writers = [
        subprocess.Popen([sys.executable, "-c", script, str(file), f"writer{number}"], cwd=root)
        for number in range(4)
    ]
    seen = 0
    while any(
        writer.poll() is None for writer in writers
    ):  # a reader never meets a half-written file
        count = len(read_keys(file))
        assert count >= seen
        seen = count
    assert [writer.wait() for writer in writers] == [0, 0, 0, 0]
    names = {one.name for one in read_keys(file)}
    assert names == {f"writer{number}.{n}" for number in range(4) for n in range(5)}


names = st.text("ABCxyz019._-", min_size=1, max_size=64)
moments = st.datetimes(datetime(2020, 1, 1), datetime(2090, 1, 1), timezones=st.just(UTC))  # noqa: DTZ001
keys = st.builds(
    Key,
    name=names,
    hash=st.binary(min_size=32, max_size=32),
    models=st.none()
    | st.frozensets(st.sampled_from(["a", "1", "yes", "x:7b", "ü", "~", "0x1", "a b"]), min_size=1),
    max_in_flight=st.none() | st.integers(1, 10**6),
    rpm=st.none() | st.integers(1, 10**6),
    tpm=st.none() | st.integers(1, 10**9),
    priority=st.sampled_from(["interactive", "batch"]),
    weight=st.floats(0.001, 1000),
    expires=st.none()
    | moments
    | moments.map(lambda moment: moment.replace(hour=0, minute=0, second=0, microsecond=0)),
    admin=st.booleans(),
)


@given(st.lists(keys, max_size=4, unique_by=(lambda one: one.name, lambda one: one.hash)))
def test_what_is_written_is_read_back_equal(tmp_path_factory, written: list[Key]) -> None:
    file = tmp_path_factory.mktemp("keys") / "keys.yaml"
    for one in written:
        add(file, one)
    assert list(read_keys(file)) == written


def test_a_record_of_the_file_holds_what_the_contract_names() -> None:
    assert list(keyfile.KEY.names) == [
        "name",
        "hash",
        "models",
        "max_in_flight",
        "rpm",
        "tpm",
        "priority",
        "weight",
        "expires",
        "admin",
    ]
