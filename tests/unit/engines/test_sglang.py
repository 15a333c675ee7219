"""SGLang: /v1/loads where there is one, metrics where not, and never /health."""

from __future__ import annotations

import pytest

from gateway.engines.base import Answer, EngineReport, Look, State
from gateway.engines.sglang import ENGINE
from tests.unit.engines.talk import NOTHING, OK, Round, said, sample, text

LOADS = "/v1/loads?include=core"
MODELS = said({"data": [{"id": "m", "owned_by": "sglang", "max_model_len": 32768}]})
TABLE = {LOADS: sample("sglang/v1_loads.constructed.json"), "/v1/models": MODELS}
OLDER = {
    "/model_info": said({"model_path": "m", "is_generation": True}),
    "/v1/models": MODELS,
    "/metrics": sample("sglang/metrics.constructed.txt"),
}


def test_everything_is_read_from_loads_and_health_is_never_asked() -> None:
    round_ = Round(ENGINE, TABLE)
    report = round_.report

    assert round_.asked == [LOADS, "/v1/models"]
    assert (report.state, report.version) == (State.UP, "0.5.23")
    assert (report.slots, report.slots_assumed) == (256, False)
    assert (report.running, report.waiting, report.kv_used_ratio) == (3, 1, 0.075)
    assert (report.kv_tokens, report.kv_shared, report.context_per_slot) == (120000, True, 32768)
    assert report.models is not None
    assert [(m.id, m.loaded) for m in report.models] == [("m", True)]
    assert "/api/chat" not in report.capabilities
    assert report.warnings == ()


def test_without_need_for_models_loads_is_the_only_question() -> None:
    assert Round(ENGINE, TABLE, Look(full=False)).asked == [LOADS]


def test_data_parallel_ranks_are_added_up_and_their_use_averaged() -> None:
    rank = {"num_running_reqs": 2, "num_waiting_reqs": 0, "max_running_requests": 10}
    loads = [rank | {"token_usage": 0.2}, rank | {"token_usage": 0.6}]
    report = Round(ENGINE, TABLE | {LOADS: said({"loads": loads})}).report

    assert (report.running, report.waiting, report.slots) == (4, 0, 20)
    assert report.kv_used_ratio == pytest.approx(0.4)


def test_a_rank_that_does_not_say_makes_the_sum_unknown() -> None:
    loads = [{"num_running_reqs": 2}, {"num_running_reqs": -5}]

    assert Round(ENGINE, TABLE | {LOADS: said({"loads": loads})}).report.running is None


def test_an_older_version_is_read_from_its_metrics() -> None:
    round_ = Round(ENGINE, OLDER)
    report = round_.report

    assert round_.asked == [LOADS, "/model_info", "/v1/models", "/metrics"]
    assert (report.running, report.waiting, report.kv_used_ratio) == (3, 1, 0.075)
    assert (report.kv_tokens, report.slots, report.slots_assumed) == (120000, 16, True)
    assert "assuming 16" in report.warnings[0]


def test_slots_known_before_are_not_replaced_by_an_assumption() -> None:
    known = EngineReport(engine="sglang", state=State.UP, slots=256)

    assert Round(ENGINE, OLDER, known=known).report.slots is None


def test_without_models_or_metrics_it_lives_with_unknown_load() -> None:
    report = Round(ENGINE, {"/model_info": OLDER["/model_info"]}).report

    assert (report.state, report.running, report.kv_used_ratio) == (State.UP, None, None)
    assert (report.models, report.kv_tokens) == (None, None)


def test_a_starting_engine_is_loading_and_a_silent_or_failing_one_down() -> None:
    starting = Round(ENGINE, {LOADS: text("", 503)})
    late = Round(ENGINE, {"/model_info": text("", 503)})

    assert (starting.report.state, starting.asked) == (State.LOADING, [LOADS])
    assert late.report.state is State.LOADING
    assert Round(ENGINE, {LOADS: None}).report.state is State.DOWN
    assert Round(ENGINE, {LOADS: text("", 500)}).report.state is State.DOWN


def test_a_refused_key_is_said_and_not_death() -> None:
    report = Round(ENGINE, {LOADS: text("", 401)}).report

    assert report.state is State.UP
    assert "set `api_key`" in report.warnings[0]


@pytest.mark.parametrize(
    "seen",
    [
        {"/model_info": OLDER["/model_info"]},
        {"/v1/models": MODELS},
        {LOADS: TABLE[LOADS]},
        {"/metrics": OLDER["/metrics"]},
    ],
)
def test_it_is_recognised_by_any_answer_that_only_it_gives(seen: dict[str, Answer | None]) -> None:
    assert ENGINE.recognises(seen)


def test_a_queue_full_answer_and_strangers_are_not_recognised() -> None:
    full = sample("sglang/err_503_queue_full.constructed.json", 503)

    assert not ENGINE.recognises({LOADS: full, "/model_info": said({"model_path": "m"})})
    assert not ENGINE.recognises({"/health": OK, "/v1/models": NOTHING, "/metrics": None})
