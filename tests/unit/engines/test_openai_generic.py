"""Any other server that speaks the OpenAI API."""

from __future__ import annotations

import pytest

from gateway.engines.base import Answer, Look, State
from gateway.engines.openai_generic import ENGINE
from tests.unit.engines.talk import LLAMA, Round, said, text

LIST = said({"data": [{"id": "m", "max_model_len": 8192}]})


def _state(answer: Answer | None) -> State:
    return Round(ENGINE, {"/v1/models": answer}).report.state


def test_a_list_of_models_is_life_and_four_slots_are_assumed() -> None:
    round_ = Round(ENGINE, {"/v1/models": LIST}, Look(weigh=True))
    report = round_.report

    assert round_.asked == ["/v1/models"]
    assert report.state is State.UP
    assert report.models is not None
    assert [(m.id, m.loaded) for m in report.models] == [("m", None)]
    assert (report.slots, report.slots_assumed, report.context_per_slot) == (4, True, 8192)
    assert "assuming 4" in report.warnings[0]
    assert report.running is None


@pytest.mark.parametrize(
    "answer",
    [
        None,
        text("<html>welcome</html>"),
        said({"error": "Unexpected endpoint or method. (GET /v1/models)"}),
        text("", 302),
        text("boom", 500),
    ],
)
def test_what_does_not_answer_like_an_engine_is_down(answer: Answer | None) -> None:
    assert _state(answer) is State.DOWN


def test_an_answer_that_no_engine_gives_makes_the_url_suspect() -> None:
    report = Round(ENGINE, {"/v1/models": text("<html>")}).report

    assert any("URL" in words for words in report.warnings)


def test_a_server_that_is_not_ready_is_loading() -> None:
    assert _state(text("", 503)) is State.LOADING


@pytest.mark.parametrize("status", [401, 403, 404, 405, 429])
def test_a_server_that_only_refuses_the_list_lives(status: int) -> None:
    assert _state(text("", status)) is State.UP


def test_a_list_that_is_too_long_to_read_is_no_list_but_life() -> None:
    report = Round(ENGINE, {"/v1/models": Answer(200, {}, b"", cut=True)}).report

    assert (report.state, report.models) == (State.UP, None)
    assert any("set `models`" in words for words in report.warnings)


def test_a_refused_key_is_said() -> None:
    report = Round(ENGINE, {"/v1/models": text("", 401)}).report

    assert "set `api_key`" in report.warnings[0]


def test_it_waits_longer_for_servers_that_answer_nothing_while_they_generate() -> None:
    assert ENGINE.patience == 10


def test_a_llama_server_that_took_its_port_is_noticed() -> None:
    assert ENGINE.recognises({"/v1/models": LIST, "/health": None})
    assert not ENGINE.recognises({"/v1/models": Answer(200, LLAMA, LIST.body)})
