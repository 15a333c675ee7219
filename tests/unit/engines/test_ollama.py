"""Ollama: which models, which of them loaded, and nothing about load."""

from __future__ import annotations

import pytest

from gateway.engines.base import Answer, EngineReport, Look, Model, State
from gateway.engines.ollama import ENGINE
from tests.unit.engines.talk import NOTHING, Round, said, sample, text

TABLE = {
    "/api/version": sample("ollama/api_version.constructed.json"),
    "/api/ps": sample("ollama/api_ps_loaded.constructed.json"),
    "/api/tags": sample("ollama/api_tags.constructed.json"),
    "/v1/models": sample("ollama/v1_models.constructed.json"),
}
NAME = "llama3.2:latest"


def test_a_loaded_model_its_context_and_its_short_name_are_read() -> None:
    report = Round(ENGINE, TABLE).report

    assert (report.state, report.version, report.context_per_slot) == (State.UP, "0.31.0", 4096)
    assert report.models is not None
    assert [(m.id, m.loaded, m.aliases) for m in report.models] == [(NAME, True, ("llama3.2",))]
    assert report.models[0].document["owned_by"] == "library"


def test_one_slot_is_assumed_and_said_in_the_words_of_the_contract() -> None:
    report = Round(ENGINE, TABLE).report

    assert (report.slots, report.slots_assumed) == (1, True)
    assert report.warnings == (
        "Ollama does not say how many requests it runs at once; assuming 1, set `slots`",
    )
    assert (report.running, report.waiting, report.kv_used_ratio) == (None, None, None)


def test_its_native_lists_are_kept_whole() -> None:
    documents = Round(ENGINE, TABLE).report.documents

    assert documents["/api/tags"]["models"][0]["capabilities"] == ["completion", "tools"]
    assert documents["/api/ps"]["models"][0]["size_vram"] == 3338801152
    assert documents["/api/version"] == {"version": "0.31.0"}


def test_an_installed_model_that_is_not_loaded_is_known_as_such() -> None:
    report = Round(
        ENGINE, TABLE | {"/api/ps": sample("ollama/api_ps_idle.constructed.json")}
    ).report

    assert report.models is not None
    assert report.models[0].loaded is False
    assert report.context_per_slot is None


def test_between_full_looks_only_life_and_loading_are_asked_and_loading_is_updated() -> None:
    known = EngineReport(engine="ollama", state=State.UP, models=(Model(NAME, False), Model("b")))
    round_ = Round(ENGINE, TABLE, Look(weigh=True, full=False), known)

    assert round_.asked == ["/api/version", "/api/ps"]
    assert round_.report.models is not None
    assert [(m.id, m.loaded) for m in round_.report.models] == [(NAME, True), ("b", False)]


def test_models_that_were_not_asked_are_not_said() -> None:
    known = EngineReport(engine="ollama", state=State.UP)
    look = Look(full=False)

    assert Round(ENGINE, TABLE, look, known).report.models is None
    assert Round(ENGINE, TABLE, look).report.models is None
    assert Round(ENGINE, TABLE | {"/api/ps": None}, look, known).report.models is None


def test_null_means_no_models_and_a_missing_list_is_made_up_by_the_tags() -> None:
    none = Round(ENGINE, TABLE | {"/v1/models": sample("ollama/v1_models_empty.constructed.json")})
    tags = Round(ENGINE, TABLE | {"/v1/models": NOTHING, "/api/ps": NOTHING})

    assert none.report.models == ()
    assert tags.report.models is not None
    assert [(m.id, m.loaded) for m in tags.report.models] == [(NAME, None)]
    assert tags.report.models[0].document["id"] == NAME


def test_tags_without_usable_names_make_no_models() -> None:
    table = TABLE | {"/v1/models": NOTHING, "/api/tags": said({"models": [{"name": 7}, 3]})}

    assert Round(ENGINE, table).report.models == ()


def test_cloud_models_are_called_out() -> None:
    table = TABLE | {"/v1/models": said({"data": [{"id": "big:cloud"}]})}

    assert any("ollama.com" in words for words in Round(ENGINE, table).report.warnings)


def test_a_refused_host_is_explained() -> None:
    table = {"/api/version": sample("ollama/err_403_host_check.constructed.http")}
    round_ = Round(ENGINE, table)

    assert round_.asked == ["/api/version"]
    assert any("403" in words for words in round_.report.warnings)


@pytest.mark.parametrize("version", [None, text("", 500)])
def test_silence_and_failure_are_down(version: Answer | None) -> None:
    round_ = Round(ENGINE, TABLE | {"/api/version": version})

    assert (round_.report.state, round_.asked) == (State.DOWN, ["/api/version"])


def test_it_is_not_mistaken_for_lm_studio_which_answers_200_with_an_error() -> None:
    assert ENGINE.recognises({"/api/version": TABLE["/api/version"]})
    assert not ENGINE.recognises({"/api/version": said({"error": "x", "version": "1"})})
    assert not ENGINE.recognises({"/api/version": said({"error": "Unexpected endpoint"})})
