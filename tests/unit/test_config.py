"""What a right config reads as, and the finer points of YAML, variables and rules between settings."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from gateway.core.config import Backend, Config, Limits, ModelAlias, Secret, Timeouts, is_loopback
from gateway.core.settings.nodes import ConfigErrors, Mistake
from gateway.core.settings.rules import doubts, unconfirmed
from gateway.runtime.configfile import from_backends, keys_file_of, load

ONE = "backends: [{url: http://127.0.0.1:8080}]\n"
BACKEND_DEFAULTS = {
    "engine": "auto",
    "api_key": None,
    "slots": None,
    "kv_tokens": None,
    "models": None,
    "drain": False,
    "ca": None,
}


@pytest.fixture
def read(tmp_path: Path):
    def read(text: str, environ: Mapping[str, str] | None = None, **overrides: object) -> Config:
        file = tmp_path / "config.yaml"
        file.write_text(text, encoding="utf-8")
        return load(file, environ=environ or {}, **overrides)

    return read


@pytest.fixture
def mistakes(read):
    def mistakes(
        text: str, environ: Mapping[str, str] | None = None, **more: object
    ) -> list[Mistake]:
        with pytest.raises(ConfigErrors) as caught:
            read(text, environ, **more)
        return list(caught.value.mistakes)

    return mistakes


def test_a_url_alone_is_a_config_with_the_documented_defaults(read) -> None:
    config = read(ONE)
    assert config.backends == (
        Backend(name="127.0.0.1:8080", url="http://127.0.0.1:8080", **BACKEND_DEFAULTS),
    )
    assert (config.listen.host, config.listen.port, config.listen.tls) == ("127.0.0.1", 8088, None)
    assert config.timeouts == Timeouts(5, 1800, 600, 300, 240)
    assert (config.admission.queue, config.admission.max_wait_s) == (None, 30)
    assert (config.drain_s, config.keepalive_s) == (60, 75)
    assert config.keyless
    assert not config.needs_key


def test_the_contracts_own_example_reads_as_it_says(read, tmp_path: Path) -> None:
    config = read(
        """
listen: {host: 127.0.0.1, port: 8088}
auth: {keys_file: keys.yaml, anonymous: false, metrics: admin, key_in_path: false}
backends:
  - name: gpu1
    url: http://127.0.0.1:8080
    engine: auto
    api_key: ${GPU1_KEY}
    slots: auto
    kv_tokens: auto
    models: auto
    drain: false
models:
  coder: {ids: [qwen3-coder-30b, "qwen3-coder:30b"], fallback: small}
default_model: coder
admission: {queue: auto, max_wait_s: 30}
routing: {affinity: true}
timeouts: {connect_s: 5, first_byte_s: 1800, between_bytes_s: 600, write_stall_s: 300, early_headers_s: 240}
limits: {body_mib: 64, header_kib: 64}
redis: {url: redis://127.0.0.1:6379/0}
drain_s: 60
keepalive_s: 75
trusted_proxies: []
cors: {origins: []}
log: {level: info, format: auto}
""",
        {"GPU1_KEY": "engine-key"},
    )
    assert config.models == {
        "coder": ModelAlias(ids=("qwen3-coder-30b", "qwen3-coder:30b"), fallback="small")
    }
    assert config.auth.keys_file == str(tmp_path / "keys.yaml")
    assert config.backends[0].api_key == Secret("engine-key")
    assert config.redis is not None
    assert config.redis.url.reveal() == "redis://127.0.0.1:6379/0"
    assert config.needs_key
    assert config.unused({"auth"}) == ("models", "default_model", "redis")


def test_numbers_lists_and_flags_are_taken_over(read) -> None:
    config = read(
        """
backends:
  - {name: a, url: "https://h/v1/", engine: vllm, slots: 8, kv_tokens: 65536, models: [m, "n:1b"], drain: true}
admission: {queue: 0, max_wait_s: 0.5}
limits: {body_mib: 0.5, header_kib: 8}
trusted_proxies: [10.0.0.5, "fd00::/8"]
cors: {origins: ["https://Chat.example.org"]}
routing: {affinity: false, keep_id_slot: true}
""",
    )
    assert config.backends == (
        Backend("a", "https://h/v1", "vllm", None, 8, 65536, ("m", "n:1b"), drain=True, ca=None),
    )
    assert (config.admission.queue, config.admission.max_wait_s) == (0, 0.5)
    assert (config.limits.body_bytes, config.limits.header_kib) == (512 * 1024, 8)
    assert config.trusted_proxies == ("10.0.0.5/32", "fd00::/8")
    assert config.cors.origins == ("https://chat.example.org",)
    assert (config.routing.affinity, config.routing.keep_id_slot) == (False, True)


@pytest.mark.parametrize(
    ("url", "name"),
    [
        ("http://127.0.0.1:8080", "127.0.0.1:8080"),
        ("http://127.0.0.1:8080/v1/", "127.0.0.1:8080"),
        ("https://gpu.lan/engine/v1", "gpu.lan:443"),
        ("http://[::1]:8080/v1", "[::1]:8080"),
        ("http://docker_service:80", "docker_service:80"),
    ],
)
def test_a_backend_without_a_name_is_called_after_its_address(read, url: str, name: str) -> None:
    config = read(f'backends: [{{url: "{url}"}}]')
    assert config.backends[0].name == name


def test_two_engines_at_one_address_need_names(mistakes) -> None:
    found = mistakes("backends:\n  - {url: http://h:1/a}\n  - {url: http://h:1/b}\n")
    assert [(one.line, one.path) for one in found] == [(3, "backends[1].name")]


def test_an_engine_is_the_same_whatever_the_spelling_of_its_url(mistakes) -> None:
    found = mistakes(
        "backends:\n  - {name: a, url: http://H}\n  - {name: b, url: http://h:80/v1}\n"
    )
    assert [one.path for one in found] == ["backends[1].url"]


# -- environment


def test_variables_are_expanded_inside_a_text_too(read) -> None:
    config = read("backends: [{url: 'http://${HOST}:${PORT}/v1'}]", {"HOST": "gpu", "PORT": "8000"})
    assert config.backends[0].url == "http://gpu:8000/v1"


@pytest.mark.parametrize("written", ["${N}", '"${N}"', "${OTHER:-7}", "${OTHER:-}7"])
def test_a_variable_may_hold_a_number(read, written: str) -> None:
    config = read(f"backends:\n- url: http://h\n  slots: {written}\n", {"N": "7"})
    assert config.backends[0].slots == 7


@pytest.mark.parametrize(
    "value", ["true", "12345", "null", "1.5", "2027-01-01", "~", "#a:b", "off"]
)
def test_a_key_from_the_environment_is_a_text_whatever_yaml_would_make_of_it(
    read, value: str
) -> None:
    config = read("backends:\n- url: http://h\n  api_key: ${K}\n", {"K": value})
    assert config.backends[0].api_key == Secret(value)


def test_a_line_break_after_a_key_from_the_environment_is_not_part_of_it(read) -> None:
    config = read("backends:\n- url: http://h\n  api_key: ${K}\n", {"K": "key\n"})
    assert config.backends[0].api_key == Secret("key")


def test_a_variable_cannot_bring_yaml_of_its_own(mistakes) -> None:
    found = mistakes("backends: [{url: '${U}'}]", {"U": "http://h, slots: 3}, {url: http://i"})
    assert [one.path for one in found] == ["backends[0].url"]


def test_an_empty_variable_means_the_default(read, mistakes) -> None:
    config = read("backends: [{url: http://h, api_key: '${K}', slots: '${N:-}'}]", {"K": ""})
    assert (config.backends[0].api_key, config.backends[0].slots) == (None, None)
    assert [one.path for one in mistakes("backends: [{url: '${K}'}]", {"K": ""})] == ["backends[0]"]


def test_a_default_may_hold_another_colon_and_an_escape_stays_a_text(read) -> None:
    config = read(ONE + "redis: {url: '${R:-redis://h:1/0}'}\ndefault_model: $${x}\n")
    assert config.redis is not None
    assert config.redis.url == Secret("redis://h:1/0")
    assert config.default_model == "${x}"


@pytest.mark.parametrize(
    "line",
    [
        "backends: [{url: '${S}'}]",
        "backends: [{url: http://h, slots: '${S}'}]",
        "backends: [{url: http://h, engine: '${S}'}]",
        "backends: [{url: http://h, drain: '${S}'}]",
        "backends: [{url: http://h, models: '${S}'}]",
        "backends: [{url: http://h, api_key: 'a ${S}'}]",
        "backends: '${S}'",
        "backends: [{url: http://h, ca: '~${S}'}]",
        ONE + "redis: {url: '${S}'}",
        ONE + "log: {level: '${S}'}",
        ONE + "trusted_proxies: ['${S}']",
        ONE + "cors: {origins: ['https://x.org/${S}']}",
        ONE + "listen: {host: 'a:${S}'}",
    ],
)
def test_no_message_repeats_a_value_from_the_environment(mistakes, line: str) -> None:
    found = mistakes(line, {"S": "canary-value"})
    assert found
    assert "canary-value" not in "\n".join(str(one) for one in found)


def test_a_config_never_shows_its_secrets(read) -> None:
    config = read(
        "backends: [{url: http://h, api_key: canary-key}]\nredis: {url: 'redis://:canary-pw@h:1'}"
    )
    shown = f"{config!r} {config} {config.backends[0].api_key} {config.backends[0].api_key!r}"
    assert "canary" not in shown
    assert config.backends[0].api_key is not None
    assert config.backends[0].api_key.reveal() == "canary-key"


@pytest.mark.parametrize(("value", "expected"), [("true", True), ("False", False)])
def test_a_variable_may_hold_a_flag(read, value: str, expected: bool) -> None:
    config = read("backends:\n- url: http://h\n  drain: ${D}\n", {"D": value})
    assert config.backends[0].drain is expected


def test_redis_may_be_a_unix_socket(read) -> None:
    config = read(ONE + "redis: {url: 'unix:///run/redis.sock?db=1'}\n")
    assert config.redis is not None
    assert config.redis.url.reveal() == "unix:///run/redis.sock?db=1"


def test_secrets_are_equal_by_their_text_and_stay_hidden_in_sets() -> None:
    assert {Secret("a"), Secret("a"), Secret("b")} == {Secret("b"), Secret("a")}
    assert Secret("a") != "a"


# -- YAML


def test_anchors_and_merges_are_written_once_and_used_twice(read) -> None:
    config = read(
        """
backends:
  - &gpu {url: http://h:1, slots: 4, engine: vllm}
  - {<<: *gpu, url: http://h:2}
  - <<: [*gpu, {drain: true}]
    url: http://h:3
    slots: 9
"""
    )
    assert [(one.url, one.slots, one.engine, one.drain) for one in config.backends] == [
        ("http://h:1", 4, "vllm", False),
        ("http://h:2", 4, "vllm", False),
        ("http://h:3", 9, "vllm", True),
    ]


def test_a_byte_order_mark_and_windows_line_ends_do_no_harm(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_bytes(b"\xef\xbb\xbfbackends:\r\n  - url: http://h\r\n    slots: 3\r\n")
    assert load(file, environ={}).backends[0].slots == 3


def test_a_setting_without_a_value_has_its_default(read) -> None:
    config = read(ONE + "admission:\n  queue:\nredis:\nmodels:\nlisten: {tls: ~}\n")
    assert (config.admission.queue, config.redis, config.models) == (None, None, {})


def test_an_anchor_used_very_often_does_not_explode(mistakes) -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 30)]
    assert len(mistakes("\n".join(lines) + "\n" + ONE)) == 30


def test_what_only_looks_like_a_date_is_a_text(read) -> None:
    config = read(ONE + "default_model: 2026-13-45\n")
    assert config.default_model == "2026-13-45"


def test_a_wrong_file_altogether_is_told_of_soon_and_in_part(mistakes) -> None:
    found = mistakes("".join(f"key{number}: 1\n" for number in range(20_000)))
    assert len(found) == 201
    assert "there are more mistakes" in "\n".join(one.message for one in found)


def test_a_file_that_is_far_too_large_is_not_read(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_bytes(b"#" * (16 * 1024 * 1024 + 1))
    with pytest.raises(ConfigErrors, match="larger than 16 MiB"):
        load(file)


# -- files


def test_a_missing_file_is_one_line_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigErrors) as caught:
        load(tmp_path / "none.yaml")
    assert str(caught.value).startswith(f"{tmp_path / 'none.yaml'}: cannot be read: ")
    with pytest.raises(ConfigErrors, match="cannot be read"):
        load(tmp_path)


def test_relative_paths_begin_at_the_configs_folder(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc" / "c.yaml").write_text(ONE + "auth: {keys_file: k/keys.yaml}\n")
    monkeypatch.chdir(tmp_path)
    assert load("etc/c.yaml").auth.keys_file == str(tmp_path / "etc" / "k" / "keys.yaml")


def test_keys_beside_the_config_are_used_without_being_named(read, tmp_path: Path) -> None:
    (tmp_path / "keys.yaml").write_text("[]")
    config = read(ONE + "listen: {host: 0.0.0.0}\n")
    assert config.auth.keys_file == str(tmp_path / "keys.yaml")
    assert config.needs_key


def test_tls_files_are_loaded_and_watched(read, tmp_path: Path) -> None:
    source = Path(__file__).parents[1] / "data" / "broken_configs" / "tls"
    for name in ("one.pem", "one.key", "two.pem"):
        (tmp_path / name).write_bytes((source / name).read_bytes())
    config = read(
        "listen: {tls: {cert: one.pem, key: one.key}}\nauth: {keys_file: k.yaml}\n"
        "backends: [{url: https://h, ca: two.pem}]\n"
    )
    names = ("k.yaml", "one.pem", "one.key", "two.pem")
    assert config.files == tuple(str(tmp_path / name) for name in names)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("auth: {keys_file: sub/k.yaml}", "sub/k.yaml"),
        ("auth: {keys_file: '${D}/k.yaml'}\nbackends: [{url: '${UNSET}'}]", "elsewhere/k.yaml"),
        ("backends: []\nlisten: {host: 0.0.0.0}", "keys.yaml"),
        ("auth: {keys_file: }", "keys.yaml"),
    ],
)
def test_the_keys_file_of_a_config_that_is_not_right_yet_is_found(
    tmp_path: Path, text: str, expected: str
) -> None:
    (tmp_path / "c.yaml").write_text(text)
    assert keys_file_of(tmp_path / "c.yaml", environ={"D": "elsewhere"}) == tmp_path / expected


def test_a_keys_file_named_by_an_unset_variable_is_not_guessed(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("auth: {keys_file: '${UNSET}'}\nredis: {url: '${ALSO}'}")
    with pytest.raises(ConfigErrors) as caught:
        keys_file_of(tmp_path / "c.yaml", environ={})
    assert [one.path for one in caught.value.mistakes] == ["auth.keys_file"]


# -- the command line


def test_a_url_on_the_command_line_is_a_config(tmp_path: Path) -> None:
    config = from_backends(["http://a:1", "http://b:2/v1", "http://a:1"], folder=tmp_path, port=0)
    assert [one.name for one in config.backends] == ["a:1", "b:2"]
    assert config.listen.port == 0
    assert config.keyless


def test_the_command_line_uses_the_keys_of_its_folder(tmp_path: Path) -> None:
    (tmp_path / "keys.yaml").write_text("[]")
    config = from_backends(["http://a:1"], folder=tmp_path, host="0.0.0.0")
    assert config.auth.keys_file == str(tmp_path / "keys.yaml")


def test_mistakes_of_the_command_line_have_no_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigErrors) as caught:
        from_backends(["127.0.0.1:1"], folder=tmp_path)
    assert str(caught.value) == (
        "command line: backends[0].url: `127.0.0.1:1` does not begin with http:// or https://; "
        "write http://127.0.0.1:1"
    )


def test_keyless_on_the_network_is_refused_from_the_command_line_too(tmp_path: Path) -> None:
    with pytest.raises(ConfigErrors, match="not a loopback address"):
        from_backends(["http://a:1"], folder=tmp_path, host="0.0.0.0")


def test_host_and_port_of_the_command_line_are_held_to_the_same_rules(read, mistakes) -> None:
    assert read(ONE + "listen: {host: 10.0.0.1, port: 1}", host="::1", port=2).listen.host == "::1"
    paths = [one.path for one in mistakes(ONE + "auth: {anonymous: true}", host="0.0.0.0")]
    assert paths == ["auth.anonymous"]
    assert [one.path for one in mistakes(ONE, host="a:1")] == ["listen.host"]


@pytest.mark.parametrize(
    ("host", "expected"),
    [("127.0.0.1", True), ("127.9.9.9", True), ("::1", True), ("localhost", True)]
    + [(host, False) for host in ("0.0.0.0", "::", "10.0.0.1", "gateway.lan", "")],
)
def test_a_host_is_loopback_only_if_it_surely_is(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected


# -- rules between settings


def test_a_fallback_may_be_a_model_that_only_an_engine_knows(read) -> None:
    config = read(ONE + "models: {coder: {ids: [a], fallback: small}}\ndefault_model: other\n")
    assert config.models["coder"].fallback == "small"
    assert [one.split(":")[0] for one in unconfirmed(config)] == [
        "default_model",
        "models.coder.fallback",
    ]


def test_a_right_config_raises_no_doubts(read) -> None:
    config = read(
        "backends: [{url: http://h, models: [a, b]}]\nmodels: {x: {ids: [a], fallback: b}}\ndefault_model: x"
    )
    assert (doubts(config), unconfirmed(config)) == ((), ())


def test_a_name_without_its_tag_is_a_listed_model(read) -> None:
    config = read("backends: [{url: http://h, models: ['a:latest']}]\ndefault_model: a\n")
    assert unconfirmed(config) == ()


def test_what_serves_nothing_raises_doubts(read, tmp_path: Path) -> None:
    pem = Path(__file__).parents[1] / "data" / "broken_configs" / "tls" / "one.pem"
    config = read(
        f"backends: [{{url: http://h, models: [a], drain: true, ca: {pem}}}]\nmodels: {{x: {{ids: [c]}}}}"
    )
    assert [one.split(":")[0] for one in doubts(config)] == [
        "models.x.ids",
        "backends h",
        "backends",
    ]


def test_settings_without_effect_are_found_by_section_and_by_name(read) -> None:
    config = read(
        ONE
        + "cors: {origins: ['https://x.org']}\ntimeouts: {connect_s: 9}\nlimits: {body_mib: 64}\n"
    )
    assert config.unused({"backends"}) == ("timeouts.connect_s", "cors.origins")
    assert config.unused({"timeouts", "cors.origins"}) == ()
    assert config.limits == Limits()
