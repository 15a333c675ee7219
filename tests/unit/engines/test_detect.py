"""Which engine is behind a URL."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from gateway.engines.base import Answer
from gateway.engines.detect import ENGINES, is_certain, next_question, verdict
from tests.unit.engines.talk import LLAMA, NOTHING, OK, said, sample, text

VLLM = {
    "/health": sample("vllm/health.http"),
    "/v1/models": sample("vllm/models.http"),
    "/version": sample("vllm/version.http"),
    "/metrics": sample("vllm/metrics_idle.http"),
}
OLLAMA = {
    "/v1/models": sample("ollama/v1_models.constructed.json"),
    "/api/version": sample("ollama/api_version.constructed.json"),
}
LM_STUDIO_UNKNOWN = said({"error": "Unexpected endpoint or method. (GET /x)"})


def _detect(
    table: Mapping[str, Answer | None], otherwise: Answer | None = NOTHING
) -> tuple[str | None, list[str], bool]:
    seen: dict[str, Answer | None] = {}
    while (ask := next_question(seen)) is not None:
        seen[ask.path] = table.get(ask.path, otherwise)
    engine = verdict(seen)
    return engine.name if engine else None, list(seen), is_certain(seen)


@pytest.mark.parametrize(
    "health",
    [
        sample("llama-server/health.http"),
        sample("llama-server/router_health.http"),
        sample("llama-server/loading_health_503.http"),
        sample("llama-server/wrongkey.http"),
    ],
)
def test_a_llama_server_gives_itself_away_with_the_first_answer(health: Answer) -> None:
    assert _detect({"/health": health}) == ("llama-server", ["/health"], True)


def test_a_llama_server_behind_a_proxy_is_known_by_its_models() -> None:
    models = Answer(200, {}, sample("llama-server/models.http").body)

    assert _detect({"/health": OK, "/v1/models": models})[0] == "llama-server"


def test_vllm_is_known_by_version_and_owner() -> None:
    assert _detect(VLLM) == ("vllm", ["/health", "/v1/models", "/version"], True)


def test_vllm_with_a_key_that_we_lack_is_known_by_its_open_metrics() -> None:
    locked = VLLM | {"/v1/models": sample("vllm/models_noauth.http")}

    assert _detect(locked) == ("vllm", ["/health", "/v1/models", "/version", "/metrics"], True)


def test_a_gateway_that_repeats_the_owner_is_not_vllm() -> None:
    assert _detect({"/v1/models": VLLM["/v1/models"]})[0] == "openai"


def test_ollama_is_known_by_its_version() -> None:
    name, asked, certain = _detect(OLLAMA)

    assert (name, certain) == ("ollama", True)
    assert "/metrics" not in asked, "there is none, and only a vLLM would tell by it"


def test_sglang_is_known_by_its_models_or_its_model_info_although_it_imitates_ollama() -> None:
    models = said({"data": [{"id": "m", "owned_by": "sglang"}]})
    info = said({"model_path": "m", "is_generation": True})

    assert _detect({"/v1/models": models, "/api/tags": OK})[0] == "sglang"
    assert (
        _detect({"/v1/models": said({"data": [{"id": "m"}]}), "/model_info": info})[0] == "sglang"
    )


def test_lm_studio_which_answers_200_to_everything_is_generic() -> None:
    table = {"/v1/models": said({"data": [{"id": "m", "owned_by": "organization_owner"}]})}

    assert _detect(table, LM_STUDIO_UNKNOWN)[0] == "openai"


def test_whatever_else_answers_is_generic_even_with_html() -> None:
    assert _detect({}, text("<html>"))[0] == "openai"
    assert _detect({}, NOTHING)[0] == "openai"


def test_two_questions_without_an_answer_are_enough() -> None:
    assert _detect({}, None) == (None, ["/health", "/v1/models"], False)


def test_a_hanging_health_does_not_hide_what_answers_otherwise() -> None:
    name, _, certain = _detect({"/health": None, "/v1/models": said({"data": []})})

    assert (name, certain) == ("openai", False), "another engine may hide behind the silence"


def test_a_name_in_the_config_finds_its_engine() -> None:
    assert set(ENGINES) == {"llama-server", "ollama", "vllm", "sglang", "openai"}
    assert all(engine.name == name for name, engine in ENGINES.items())


def test_a_llama_server_is_told_by_any_later_answer_too() -> None:
    assert _detect({"/health": OK, "/v1/models": Answer(401, LLAMA, b"")})[0] == "llama-server"
