"""llama-server with one model."""

from __future__ import annotations

import pytest

from gateway.engines.base import Answer, EngineReport, Look, Model, State
from gateway.engines.llama_server import ENGINE
from tests.unit.engines.talk import LLAMA, NOTHING, OK, Round, said, sample, text

MODEL = "/models/SmolLM2-135M-Instruct.Q4_1.gguf"
IDLE = {
    "/health": sample("llama-server/health.http"),
    "/props": sample("llama-server/props.http"),
    "/v1/models": sample("llama-server/models.http"),
    "/slots": sample("llama-server/slots_idle.http"),
    "/metrics": sample("llama-server/metrics.http"),
}
WEIGH = Look(weigh=True, full=False)


def test_an_idle_server_is_asked_only_what_is_free() -> None:
    assert Round(ENGINE, IDLE).asked == ["/health", "/props", "/v1/models"]
    assert Round(ENGINE, IDLE, Look(full=False)).asked == ["/health", "/props"]


def test_with_traffic_props_comes_first_and_the_pair_last_and_together() -> None:
    assert Round(ENGINE, IDLE, WEIGH).asked == ["/health", "/props", "/slots", "/metrics"]
    assert Round(ENGINE, IDLE, Look(weigh=True)).asked[-2:] == ["/slots", "/metrics"]


def test_its_facts_are_read_without_touching_the_inference_thread() -> None:
    report = Round(ENGINE, IDLE).report

    assert report.state is State.UP
    assert (report.version, report.slots, report.slots_assumed) == ("b1-7e4c0a9", 2, False)
    assert (report.context_per_slot, report.kv_tokens, report.kv_shared) == (2048, 4096, False)
    assert report.models is not None
    assert [(m.id, m.loaded, m.aliases) for m in report.models] == [(MODEL, True, ())]
    assert report.models[0].document["meta"]["n_params"] == 134515008
    assert report.incarnation == "<__media_cm0k8zbnlPZxRxxpc2nv4PEbRglyI4MC__>"
    assert report.warnings == ()
    assert {"/infill", "/v1/messages"} <= report.capabilities
    assert "/api/chat" not in report.capabilities


def test_load_that_was_not_asked_is_unknown_and_not_zero() -> None:
    report = Round(ENGINE, IDLE).report

    assert (report.running, report.waiting, report.idle_slots) == (None, None, None)
    assert (report.kv_used_ratio, report.prompt_tokens, report.cached_tokens) == (None, None, None)


def test_load_of_an_idle_server_is_zero_though_its_slots_still_hold_tokens() -> None:
    report = Round(ENGINE, IDLE, WEIGH).report

    assert (report.running, report.waiting, report.idle_slots) == (0, 0, 2)
    assert report.kv_used_ratio == 0.0
    assert (report.prompt_tokens, report.cached_tokens, report.generated_tokens) == (71, 24, 48)


def test_a_busy_slot_its_tokens_and_the_deferred_request_are_counted() -> None:
    table = IDLE | {
        "/slots": sample("llama-server/slots_busy_decoding.json"),
        "/metrics": sample("llama-server/metrics_busy_deferred.txt"),
    }
    report = Round(ENGINE, table, WEIGH).report

    assert (report.running, report.waiting, report.idle_slots) == (1, 1, 0)
    assert report.kv_used_ratio == pytest.approx(212 / 4096)


def test_aliases_are_the_further_names_of_the_model() -> None:
    table = IDLE | {"/v1/models": sample("llama-server/models_alias.http")}
    models = Round(ENGINE, table).report.models

    assert models is not None
    assert [(m.id, m.aliases) for m in models] == [("smol", ("tiny",))]


def test_a_list_of_models_without_aliases_has_none() -> None:
    models = Round(ENGINE, IDLE | {"/v1/models": said({"data": [{"id": "m"}]})}).report.models

    assert models is not None
    assert models[0].aliases == ()


def test_loading_is_a_state_of_its_own_whatever_path_says_it() -> None:
    loading = sample("llama-server/loading_health_503.http")

    first = Round(ENGINE, {"/health": loading}, WEIGH)
    second = Round(ENGINE, IDLE | {"/props": loading}, WEIGH)

    assert (first.report.state, first.asked) == (State.LOADING, ["/health"])
    assert (second.report.state, second.asked) == (State.LOADING, ["/health", "/props"])


def test_a_sleeper_is_not_woken() -> None:
    table = IDLE | {"/props": sample("llama-server/props_sleeping.json")}
    round_ = Round(ENGINE, table, Look(weigh=True))

    assert round_.asked == ["/health", "/props", "/v1/models"]
    assert round_.report.state is State.SLEEPING
    assert round_.report.slots == 1
    assert round_.report.models is not None
    assert round_.report.models[0].loaded is False


def test_what_is_switched_off_is_not_asked_and_said_once() -> None:
    props = said({"total_slots": 3, "endpoint_slots": False, "endpoint_metrics": False})
    round_ = Round(ENGINE, IDLE | {"/props": props}, WEIGH)

    assert round_.asked == ["/health", "/props"]
    assert [w for w in round_.report.warnings if "--slots" in w]
    assert [w for w in round_.report.warnings if "--metrics" in w]
    assert round_.report.slots == 3


def test_an_old_build_says_by_501_that_they_are_switched_off() -> None:
    table = IDLE | {
        "/props": said({"total_slots": 1}),
        "/slots": sample("llama-server/slots_disabled.http"),
        "/metrics": sample("llama-server/metrics_disabled.http"),
    }
    report = Round(ENGINE, table, WEIGH).report

    assert report.state is State.UP
    assert (report.running, report.waiting) == (None, None)
    assert len(report.warnings) == 2


def test_an_old_build_without_slots_in_props_has_as_many_as_it_lists() -> None:
    table = IDLE | {"/props": NOTHING}

    assert Round(ENGINE, table, WEIGH).report.slots == 2
    assert Round(ENGINE, table, WEIGH).report.slots_assumed is False
    assert Round(ENGINE, table, WEIGH).report.context_per_slot == 2048


def test_without_any_word_on_slots_one_is_assumed_and_said() -> None:
    report = Round(ENGINE, IDLE | {"/props": NOTHING}).report

    assert (report.slots, report.slots_assumed) == (1, True)
    assert "assuming 1" in report.warnings[0]
    assert (report.kv_tokens, report.kv_used_ratio) == (None, None)


def test_slots_known_before_are_not_replaced_by_an_assumption() -> None:
    known = EngineReport(engine="llama-server", state=State.UP, slots=8)
    report = Round(ENGINE, IDLE | {"/props": None}, known=known).report

    assert (report.slots, report.slots_assumed) == (None, False)
    assert report.warnings == ("llama-server does not answer /props; its load is unknown",)


def test_an_assumption_made_before_stays_one() -> None:
    known = EngineReport(engine="llama-server", state=State.UP, slots=1, slots_assumed=True)
    report = Round(ENGINE, IDLE | {"/props": NOTHING}, known=known).report

    assert (report.slots, report.slots_assumed) == (1, True)


def test_a_refused_key_is_said_in_words_and_the_server_lives() -> None:
    wrong = sample("llama-server/wrongkey.http")
    report = Round(ENGINE, IDLE | {"/props": wrong, "/v1/models": wrong}).report

    assert report.state is State.UP
    assert "set `api_key`" in report.warnings[0]
    assert report.models is None


def test_four_slots_with_the_whole_trained_context_each_share_one_pool() -> None:
    props = said({"total_slots": 4, "default_generation_settings": {"n_ctx": 8192}})
    shared = Round(ENGINE, IDLE | {"/props": props}).report
    models = (Model("m", document={"meta": {"n_ctx_train": 8192}}),)
    known = EngineReport(engine="llama-server", state=State.UP, slots=4, models=models)
    later = Round(ENGINE, IDLE | {"/props": props}, Look(full=False), known).report

    assert (shared.kv_tokens, shared.kv_shared) == (8192, True)
    assert "set `kv_tokens`" in shared.warnings[0]
    assert (later.kv_tokens, later.kv_shared) == (8192, True)


def test_a_slots_answer_without_end_gives_no_load_and_spares_the_engine_the_second_question() -> (
    None
):
    round_ = Round(ENGINE, IDLE | {"/slots": None}, WEIGH)

    assert round_.asked == ["/health", "/props", "/slots"]
    assert round_.report.state is State.UP
    assert round_.report.running is None
    assert "does not answer /slots" in round_.report.warnings[0]


def test_a_hanging_metrics_leaves_the_server_up_with_what_slots_said() -> None:
    report = Round(ENGINE, IDLE | {"/metrics": None}, WEIGH).report

    assert report.state is State.UP
    assert (report.running, report.waiting, report.idle_slots) == (0, None, 2)
    assert "does not answer /metrics" in report.warnings[0]


def test_with_slots_off_the_gauge_tells_what_runs() -> None:
    props = said({"total_slots": 2, "endpoint_slots": False})
    table = IDLE | {"/props": props, "/metrics": sample("llama-server/metrics_busy_deferred.txt")}
    report = Round(ENGINE, table, WEIGH).report

    assert (report.running, report.waiting, report.idle_slots) == (1, 1, None)
    assert report.generated_tokens == 20


def test_the_process_start_tells_restarts_where_there_is_no_marker() -> None:
    report = Round(ENGINE, IDLE | {"/props": said({"total_slots": 2})}, WEIGH).report

    assert report.incarnation == "741594468"


@pytest.mark.parametrize("health", [None, text("", 500), text("bad gateway", 502)])
def test_without_life_there_is_no_further_question(health: Answer | None) -> None:
    round_ = Round(ENGINE, IDLE | {"/health": health}, WEIGH)

    assert round_.asked == ["/health"]
    assert round_.report.state is State.DOWN


def test_a_server_without_health_but_with_props_lives() -> None:
    assert Round(ENGINE, IDLE | {"/health": NOTHING}).report.state is State.UP


def test_it_is_recognised_by_its_signature_or_by_what_only_it_says() -> None:
    assert ENGINE.recognises({"/health": Answer(401, LLAMA, b"")})
    assert ENGINE.recognises({"/props": said({"total_slots": 1})})
    assert ENGINE.recognises({"/v1/models": said({"data": [{"id": "m", "owned_by": "llamacpp"}]})})
    assert ENGINE.recognises({"/health": text('{"error":{"message":"Loading model"}}', 503)})
    assert not ENGINE.recognises({"/health": OK, "/props": None, "/v1/models": said({"data": []})})
