"""`slotgate keys` and `slotgate check` as a person at a terminal, or a script, meets them."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from gateway.cli.check import check
from gateway.cli.keys import keys
from gateway.core.keys import Key, hash_of
from gateway.runtime.keystore import KeyStore, add, read_keys


@pytest.fixture
def folder(tmp_path: Path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SLOTGATE_CONFIG", raising=False)
    return tmp_path


def run(*arguments: str, env: dict[str, str] | None = None) -> Result:
    return CliRunner().invoke(keys, arguments, env=env)


def test_new_prints_the_key_alone_on_stdout_and_stores_its_hash(folder: Path) -> None:
    result = run("new", "alice")
    assert result.exit_code == 0
    assert result.stdout.count("\n") == 1
    secret = result.stdout.strip()
    assert secret.startswith("sk-sg-")
    assert secret not in result.stderr
    assert secret not in (folder / "keys.yaml").read_text()
    found = KeyStore(folder / "keys.yaml").ring.find((hash_of(secret),), lambda: datetime.now(UTC))
    assert found == Key(name="alice", hash=hash_of(secret))


def test_new_takes_every_limit(folder: Path) -> None:
    options = "--models a,b --max-in-flight 2 --rpm 60 --tpm 1000 --priority batch --weight 0.5 --expires 2099-12-31 --admin"
    result = run("new", "bot", *options.split())
    assert result.exit_code == 0, result.output
    (key,) = read_keys(folder / "keys.yaml")
    assert key == Key(
        name="bot",
        hash=hash_of(result.stdout.strip()),
        models=frozenset({"a", "b"}),
        max_in_flight=2,
        rpm=60,
        tpm=1000,
        priority="batch",
        weight=0.5,
        expires=datetime(2100, 1, 1, tzinfo=UTC),
        admin=True,
    )


@pytest.mark.parametrize(
    "arguments",
    [
        ("new",),
        ("new", "a b"),
        ("new", ""),
        ("new", "x" * 65),
        ("new", "a", "--rpm", "0"),
        ("new", "a", "--rpm", "1000000000000000"),
        ("new", "a", "--tpm", "many"),
        ("new", "a", "--max-in-flight", "-1"),
        ("new", "a", "--priority", "high"),
        ("new", "a", "--weight", "0"),
        ("new", "a", "--weight", "nan"),
        ("new", "a", "--expires", "tomorrow"),
        ("new", "a", "--expires", "2020-01-01"),
        ("new", "a", "--models", "a,,b"),
        ("new", "a", "--config", "c.yaml", "--keys-file", "k.yaml"),
        ("revoke",),
        ("lst",),
    ],
)
def test_wrong_usage_is_status_2_and_writes_nothing(
    folder: Path, arguments: tuple[str, ...]
) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert list(folder.iterdir()) == []


def test_errors_are_one_line_with_status_1(folder: Path) -> None:
    run("new", "alice")
    for arguments in [
        ("new", "alice"),
        ("revoke", "bob"),
        ("list", "--config", "none.yaml"),
        ("new", "x", "--keys-file", "none/keys.yaml"),
    ]:
        result = run(*arguments)
        assert result.exit_code == 1, arguments
        assert result.stdout == ""
        assert len(result.stderr.splitlines()) == 1, result.stderr
        assert result.stderr.startswith("Error: ")


def test_a_revoked_key_is_gone_and_its_name_is_free(folder: Path) -> None:
    first = run("new", "alice").stdout.strip()
    assert run("revoke", "alice").exit_code == 0
    second = run("new", "alice").stdout.strip()
    ring = KeyStore(folder / "keys.yaml").ring
    assert not isinstance(ring.find((hash_of(first),), lambda: datetime.now(UTC)), Key)
    assert isinstance(ring.find((hash_of(second),), lambda: datetime.now(UTC)), Key)


def test_revoking_the_last_key_says_that_the_gateway_is_closed_now(folder: Path) -> None:
    run("new", "alice")
    assert "closes the gateway" in run("revoke", "alice").stderr


def test_list_shows_names_and_limits_but_neither_keys_nor_hashes(folder: Path) -> None:
    secret = run("new", "alice", "--models", "coder", "--rpm", "7").stdout.strip()
    add(
        folder / "keys.yaml",
        Key(name="old", hash=b"o" * 32, expires=datetime(2020, 1, 1, tzinfo=UTC)),
    )
    for result in (run("list"), run("list", "--json")):
        assert result.exit_code == 0
        assert "alice" in result.stdout
        assert "coder" in result.stdout
        assert secret not in result.output
        assert hash_of(secret).hex()[:12] not in result.output
    assert "(expired)" in run("list").stdout
    rows = json.loads(run("list", "--json").stdout)
    assert [(row["name"], row["rpm"], row["expired"]) for row in rows] == [
        ("alice", 7, False),
        ("old", None, True),
    ]
    assert rows[1]["expires"] == "2019-12-31"


def test_list_does_not_cut_long_names_when_piped(folder: Path) -> None:
    models = ",".join(f"a-rather-long-model-name-{n}" for n in range(3))
    run("new", "n" * 64, "--models", models)
    assert "n" * 64 in run("list").stdout


def test_an_empty_list_says_what_to_do(folder: Path) -> None:
    result = run("list")
    assert (result.exit_code, result.stdout) == (0, "")
    assert "slotgate keys new NAME" in result.stderr
    assert run("list", "--json").stdout == "[]\n"


@pytest.mark.parametrize("by_variable", [False, True])
def test_the_keys_file_of_the_config_is_used(folder: Path, by_variable: bool) -> None:
    (folder / "etc").mkdir()
    config = folder / "etc" / "c.yaml"
    config.write_text("auth: {keys_file: my-keys.yaml}\nlisten: {host: 0.0.0.0}\n")
    if by_variable:
        assert run("new", "a", env={"SLOTGATE_CONFIG": str(config)}).exit_code == 0
    else:
        assert run("new", "a", "--config", str(config)).exit_code == 0
    assert [one.name for one in read_keys(folder / "etc" / "my-keys.yaml")] == ["a"]


def test_a_keys_file_on_the_command_line_wins_over_the_variable(folder: Path) -> None:
    result = run("new", "a", "--keys-file", "k.yaml", env={"SLOTGATE_CONFIG": "none.yaml"})
    assert result.exit_code == 0
    assert (folder / "k.yaml").exists()


# -- check


def checked(*arguments: str, env: dict[str, str] | None = None) -> Result:
    return CliRunner().invoke(check, arguments, env=env)


def test_check_says_that_a_right_config_is_right(folder: Path) -> None:
    (folder / "c.yaml").write_text(
        "backends: [{url: http://127.0.0.1:1}]\nauth: {keys_file: keys.yaml}\n"
    )
    run("new", "alice")
    result = checked("c.yaml", "--offline")
    assert result.exit_code == 0
    assert result.stdout == "c.yaml: correct: 1 backend, 1 key\n"
    assert checked("--offline", env={"SLOTGATE_CONFIG": "c.yaml"}).exit_code == 0


def test_check_prints_every_mistake_on_a_line_and_fails(folder: Path) -> None:
    (folder / "c.yaml").write_text("listen: {prot: 1}\nbackends:\n  - {url: x}\n")
    result = checked("c.yaml", "--offline")
    assert result.exit_code == 1
    assert [line.split(": ")[0:2] for line in result.stdout.splitlines()] == [
        ["c.yaml:1", "listen.prot"],
        ["c.yaml:3", "backends[0].url"],
    ]


def test_check_looks_into_the_keys_file_too(folder: Path) -> None:
    (folder / "c.yaml").write_text("backends: [{url: http://127.0.0.1:1}]\n")
    (folder / "keys.yaml").write_text("- name: a\n  hash: x\n")
    result = checked("c.yaml", "--offline")
    assert result.exit_code == 1
    assert "keys.yaml:2: [0].hash: " in result.stdout


def test_check_warns_of_what_is_allowed_but_odd(folder: Path) -> None:
    (folder / "c.yaml").write_text("backends: [{url: http://127.0.0.1:1}]\ndefault_model: x\n")
    result = checked("c.yaml", "--offline")
    assert result.exit_code == 0
    assert "c.yaml: warning: default_model: `x` is no alias" in result.stdout
    assert "there are no keys" in result.stdout
    yesterday = datetime.now(UTC) - timedelta(days=1)
    add(folder / "keys.yaml", Key(name="old", hash=b"o" * 32, expires=yesterday))
    result = checked("c.yaml", "--offline")
    assert result.exit_code == 0
    assert "has no valid key, so everybody is refused" in result.stdout
    assert "the key old has expired" in result.stdout


def test_check_of_a_missing_file_is_one_line(folder: Path) -> None:
    result = checked("none.yaml")
    assert result.exit_code == 1
    assert result.stdout.startswith("none.yaml: cannot be read: ")
    assert checked().exit_code == 2
