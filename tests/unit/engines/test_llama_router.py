"""llama-server as a router: nothing is loaded, nothing is woken."""

from __future__ import annotations

import json
from typing import Any

from gateway.engines.base import EngineReport, Look, Model, State
from gateway.engines.llama_server import ENGINE
from tests.unit.engines.talk import Answer, Round, said, sample

WEIGH = Look(weigh=True, full=False)
CHILD = "?model=smol-b&autoload=false"
TABLE = {
    "/health": sample("llama-server/router_health.http"),
    "/props": sample("llama-server/router_props.http"),
    "/v1/models": sample("llama-server/router_models.http"),
}
LOADED = TABLE | {
    "/v1/models": sample("llama-server/router_models_loaded.http"),
    f"/props{CHILD}": sample("llama-server/router_props_model.http"),
    f"/slots{CHILD}": sample("llama-server/router_slots_loaded.http"),
    f"/metrics{CHILD}": sample("llama-server/router_metrics_loaded.http"),
}


def _listed(*entries: dict[str, Any]) -> dict[str, Answer]:
    return TABLE | {"/v1/models": said({"data": list(entries)})}


def _entry(name: str, status: str, *args: str, **more: Any) -> dict[str, Any]:
    return {"id": name, "status": {"value": status, "args": list(args)}} | more


def test_unloaded_models_are_listed_and_never_asked() -> None:
    round_ = Round(ENGINE, TABLE, Look(weigh=True))

    assert round_.asked == ["/health", "/props", "/v1/models"]
    assert round_.report.state is State.UP
    assert round_.report.models is not None
    assert [(m.id, m.loaded) for m in round_.report.models] == [
        ("smol-a", False),
        ("smol-b", False),
    ]


def test_slots_come_from_the_arguments_while_nothing_is_loaded() -> None:
    report = Round(ENGINE, TABLE).report

    assert (report.slots, report.slots_assumed, report.max_loaded) == (2, False, 1)
    assert (report.version, report.kv_tokens, report.context_per_slot) == ("b1-7e4c0a9", None, None)


def test_the_only_loaded_model_is_weighed_with_autoload_off() -> None:
    round_ = Round(ENGINE, LOADED, WEIGH)
    report = round_.report

    assert round_.asked[-3:] == [f"/props{CHILD}", f"/slots{CHILD}", f"/metrics{CHILD}"]
    assert (report.slots, report.context_per_slot, report.kv_tokens) == (2, 1024, 2048)
    assert (report.running, report.waiting, report.idle_slots) == (0, 0, 2)
    assert (report.prompt_tokens, report.generated_tokens) == (31, 1)
    assert report.incarnation == "<__media_KixGGqIm5YIMIFqej31Zy5bmtA3AtDg6__>"


def test_every_question_about_a_model_forbids_loading_it() -> None:
    asked = Round(ENGINE, LOADED, WEIGH).asked

    assert all("autoload=false" in path for path in asked if "model=" in path)


def test_without_traffic_no_child_is_asked() -> None:
    assert Round(ENGINE, LOADED).asked == ["/health", "/props", "/v1/models"]


def test_a_child_that_sleeps_is_left_alone_whoever_says_so() -> None:
    by_list = Round(ENGINE, _listed(_entry("a", "sleeping")), WEIGH)
    by_props = Round(ENGINE, LOADED | {f"/props{CHILD}": said({"is_sleeping": True})}, WEIGH)

    assert by_list.asked == ["/health", "/props", "/v1/models"]
    assert by_props.asked[-1] == f"/props{CHILD}"


def test_a_child_that_went_away_meanwhile_is_not_asked_further() -> None:
    gone = sample("llama-server/router_metrics_noautoload.http")
    round_ = Round(ENGINE, LOADED | {f"/props{CHILD}": gone}, WEIGH)

    assert round_.asked[-1] == f"/props{CHILD}"
    assert round_.report.running is None


def test_of_several_loaded_models_the_smallest_number_of_slots_counts_and_none_is_weighed() -> None:
    table = _listed(
        _entry("a", "loaded", "--parallel", "8", meta={"n_ctx": 4096}),
        _entry("b", "loaded", "-np", "3", meta={"n_ctx": 1024}),
        _entry("c", "unloaded", "--parallel", "1"),
    )
    round_ = Round(ENGINE, table, WEIGH)

    assert round_.asked == ["/health", "/props", "/v1/models"]
    assert (round_.report.slots, round_.report.slots_assumed) == (3, False)
    assert (round_.report.context_per_slot, round_.report.kv_tokens) == (1024, None)
    assert "several models loaded" in round_.report.warnings[0]


def test_without_parallel_four_slots_over_one_pool_are_assumed() -> None:
    table = _listed(_entry("a", "loaded", "--parallel", "-1", meta={"n_ctx": 8192}))
    report = Round(ENGINE, table).report

    assert (report.slots, report.slots_assumed) == (4, True)
    assert (report.kv_tokens, report.kv_shared) == (8192, True)
    assert "assuming 4 slots" in report.warnings[0]


def test_what_a_child_said_of_its_slots_stands_while_it_is_the_only_one_loaded() -> None:
    table = _listed(_entry("a", "loaded"), _entry("b", "unloaded"))
    told = table | {"/props?model=a&autoload=false": said({"total_slots": 2})}
    weighed = Round(ENGINE, told, WEIGH).report
    other = _listed(_entry("a", "unloaded"), _entry("b", "loaded"))

    later = Round(ENGINE, table, known=weighed).report
    swapped = Round(ENGINE, other, known=weighed).report
    assumed_again = Round(ENGINE, table, known=swapped).report

    assert (later.slots, later.slots_assumed) == (2, False)
    assert (swapped.slots, swapped.slots_assumed) == (4, True)
    assert (assumed_again.slots, assumed_again.slots_assumed) == (4, True)


def test_one_model_of_unknown_size_makes_the_whole_number_unknown() -> None:
    table = _listed(_entry("a", "unloaded", "--parallel", "2"), {"id": "b"})

    assert Round(ENGINE, table).report.slots_assumed is True


def test_names_with_slashes_and_ampersands_are_quoted() -> None:
    table = _listed(_entry("org/a&b", "loaded"))

    assert Round(ENGINE, table, WEIGH).asked[-1] == "/props?model=org%2Fa%26b&autoload=false"


def test_without_a_list_this_time_the_models_known_before_still_count() -> None:
    document = json.loads('{"status": {"value": "loaded", "args": ["-np", "6"]}}')
    known = EngineReport(
        engine="llama-server", state=State.UP, slots=6, models=(Model("a", True, (), document),)
    )
    report = Round(ENGINE, TABLE | {"/v1/models": None}, WEIGH, known).report

    assert report.models is None
    assert report.slots == 6


def test_without_any_list_it_lives_with_assumed_slots() -> None:
    report = Round(ENGINE, TABLE | {"/v1/models": sample("llama-server/wrongkey.http")}).report

    assert (report.state, report.models, report.slots) == (State.UP, None, 4)
    assert "set `api_key`" in report.warnings[0]
