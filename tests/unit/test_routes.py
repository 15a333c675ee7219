"""What a request's target means: which paths are served, and which could mean another one to somebody else."""

from __future__ import annotations

import pytest

from gateway.core.errors import Family
from gateway.core.routes import ROUTES, family_of, meaning_of


def path_of(raw: str, **how: bool) -> str:
    return meaning_of(raw.encode(), **{"key_in_path": False, **how}).path


@pytest.mark.parametrize(
    "raw",
    [
        "/v1/chat/completions",
        "//v1/chat/completions",
        "///v1/chat/completions",
        "/v1/chat/completions/",
        "/v1/v1/chat/completions",
        "//v1/v1/chat/completions/",
        "/chat/completions",
        "/chat/completions/",
        "http://gateway.example:8088/v1/chat/completions",
    ],
)
def test_a_path_written_in_a_usual_wrong_way_is_served(raw: str) -> None:
    meaning = meaning_of(raw.encode(), key_in_path=False)
    assert meaning.path in ROUTES
    assert meaning.literal


@pytest.mark.parametrize(
    "bare", ["chat/completions", "completions", "embeddings", "responses", "messages", "rerank"]
)
def test_the_bare_paths_are_those_below_v1(bare: str) -> None:
    assert path_of(f"/{bare}") == f"/v1/{bare}"


@pytest.mark.parametrize(
    "raw",
    [
        "/v1/chat%2fcompletions",
        "/v1/chat%2Fcompletions",
        "/v1/%2e%2e/v1/chat/completions",
        "/v1/../v1/chat/completions",
        "/v1\\chat/completions",
        "/v1/chat%5ccompletions",
        "/v1/%63hat/completions",
        "/v1/chat%252fcompletions",
        "/props%2f",
        "/api/%63hat",
    ],
)
def test_a_path_that_may_mean_another_one_is_none_of_ours(raw: str) -> None:
    assert not meaning_of(raw.encode(), key_in_path=False).literal


@pytest.mark.parametrize(
    ("raw", "model"),
    [
        ("/v1/models/m", "m"),
        ("/v1/models/org/model", "org/model"),
        ("/v1/models/org%2Fmodel", "org/model"),
        ("/v1/models/qwen3-coder:30b", "qwen3-coder:30b"),
        ("/v1/models/a%20b%25", "a b%"),
        ("/v1/models//models/x.gguf", "/models/x.gguf"),
        ("/v1/models/%C3%BC", "ü"),
    ],
)
def test_a_model_id_may_hold_slashes_colons_and_encoded_characters(raw: str, model: str) -> None:
    meaning = meaning_of(raw.encode(), key_in_path=False)
    assert meaning.path == f"/v1/models/{model}"
    assert meaning.literal


def test_a_key_in_the_path_is_taken_out_of_it() -> None:
    meaning = meaning_of(b"/k/sk-sg-abc/v1/messages", key_in_path=True)
    assert (meaning.path, meaning.key) == ("/v1/messages", "sk-sg-abc")
    assert meaning_of(b"//k/a%2Db/chat/completions/", key_in_path=True).key == "a-b"
    assert meaning_of(b"/k/sk/", key_in_path=True).path == "/"
    assert meaning_of(b"/k//v1/models", key_in_path=True).key is None


def test_a_model_behind_a_key_in_the_path_is_found() -> None:
    meaning = meaning_of(b"/k/sk/v1/models/org%2Fm", key_in_path=True)
    assert (meaning.path, meaning.key) == ("/v1/models/org/m", "sk")


@pytest.mark.parametrize("raw", [b"/k/secret/v1/models", b"//k/secret", b"/k/secret%2f/../x"])
def test_where_no_key_may_stand_in_a_path_nothing_of_it_is_kept(raw: bytes) -> None:
    meaning = meaning_of(raw, key_in_path=False)
    assert not meaning.literal
    assert meaning.key is None
    assert "secret" not in meaning.path


@pytest.mark.parametrize(
    ("path", "family"),
    [
        ("/v1/messages", Family.ANTHROPIC),
        ("/v1/messages/count_tokens", Family.ANTHROPIC),
        ("/v1/messagesx", Family.OPENAI),
        ("/api/pull", Family.OLLAMA),
        ("/api", Family.OPENAI),
        ("/infill", Family.OPENAI),
    ],
)
def test_the_family_of_a_refusal_follows_from_the_path(path: str, family: Family) -> None:
    assert family_of(path) is family


def test_nothing_that_administers_an_engine_is_relayed() -> None:
    administrative = {
        *("/slots", "/lora-adapters", "/models/load", "/models/unload", "/sleep", "/wake_up"),
        *("/api/pull", "/api/push", "/api/create", "/api/copy", "/api/delete", "/api/blobs"),
        *("/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/reset_prefix_cache", "/pause"),
    }
    assert not administrative & set(ROUTES)
    assert ROUTES["/props"].method == "GET"


@pytest.mark.parametrize(
    "path",
    [
        *("/tokenize", "/detokenize", "/apply-template", "/props", "/api/show"),
        "/v1/messages/count_tokens",
    ],
)
def test_what_makes_no_tokens_takes_no_permit(path: str) -> None:
    assert not ROUTES[path].generates
