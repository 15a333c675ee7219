"""vLLM: figures across its versions, and a number of slots that nothing tells."""

from __future__ import annotations

import pytest

from gateway.engines.base import Answer, EngineReport, Look, State
from gateway.engines.vllm import ENGINE
from tests.unit.engines.talk import NOTHING, OK, Round, said, sample, text

TABLE = {
    "/health": sample("vllm/health.http"),
    "/version": sample("vllm/version.http"),
    "/v1/models": sample("vllm/models.http"),
    "/metrics": sample("vllm/metrics_idle.http"),
}
CACHE = 'vllm:cache_config_info{block_size="16",num_gpu_blocks="%s"} 1.0\n'


def _read(metrics: str, known: EngineReport | None = None) -> EngineReport:
    return Round(ENGINE, TABLE | {"/metrics": text(metrics)}, known=known).report


def _load(running: float, waiting: float, blocks: str = "8192") -> str:
    head = f'vllm:num_requests_running{{engine="0"}} {running}\n'
    return head + f'vllm:num_requests_waiting{{engine="0"}} {waiting}\n' + CACHE % blocks


def test_a_recorded_idle_engine_is_read_in_full() -> None:
    report = Round(ENGINE, TABLE).report

    assert (report.state, report.version) == (State.UP, "0.32.0")
    assert report.models is not None
    assert [(m.id, m.loaded) for m in report.models] == [("smollm2", True)]
    assert (report.context_per_slot, report.kv_tokens, report.kv_shared) == (4096, 46592, True)
    assert (report.slots, report.slots_assumed) == (5, False)
    assert (report.running, report.waiting, report.kv_used_ratio) == (0, 0, 0.0)
    assert (report.preemptions, report.prompt_tokens, report.cached_tokens) == (0, 0, 0)
    assert report.generated_tokens == 0
    assert report.incarnation == "1795971777.190"
    assert "estimated by its KV cache" in report.warnings[0]
    assert "/v1/messages" in report.capabilities
    assert "/tokenize" not in report.capabilities


def test_a_recorded_busy_engine_lends_what_it_runs_while_others_wait() -> None:
    report = Round(ENGINE, TABLE | {"/metrics": sample("vllm/metrics_busy.txt")}).report

    assert (report.running, report.waiting, report.slots) == (4, 4, 4)
    assert report.kv_used_ratio == pytest.approx(0.011019, abs=1e-6)
    assert (report.prompt_tokens, report.generated_tokens) == (2928, 169)


def test_a_recorded_engine_after_its_work_keeps_its_counters() -> None:
    report = Round(ENGINE, TABLE | {"/metrics": sample("vllm/metrics_idle_after.txt")}).report

    assert (report.running, report.prompt_tokens, report.generated_tokens) == (0, 2928, 170)


def test_an_idle_look_asks_for_nothing_but_life() -> None:
    assert Round(ENGINE, TABLE, Look(full=False)).asked == ["/health"]
    assert Round(ENGINE, TABLE, Look(full=False, weigh=True)).asked == ["/health", "/metrics"]
    assert Round(ENGINE, TABLE).asked == ["/health", "/version", "/v1/models", "/metrics"]


def test_old_names_without_engine_label_or_total_are_understood() -> None:
    report = _read(
        'vllm:num_requests_running{model_name="m"} 2\nvllm:num_requests_waiting{model_name="m"} 0\n'
        'vllm:gpu_cache_usage_perc{model_name="m"} 0.5\nvllm:gpu_prefix_cache_hits_total 30\n'
        "vllm:num_preemptions 3\nvllm:prompt_tokens_total 90\n"
    )

    assert (report.running, report.kv_used_ratio, report.cached_tokens) == (2, 0.5, 30)
    assert (report.preemptions, report.prompt_tokens) == (3, 90)


def test_data_parallel_engines_are_added_up_and_their_kv_use_averaged() -> None:
    report = _read(
        'vllm:num_requests_running{engine="0"} 2\nvllm:num_requests_running{engine="1"} 3\n'
        'vllm:num_requests_waiting{engine="0"} 0\nvllm:num_requests_waiting{engine="1"} 0\n'
        'vllm:kv_cache_usage_perc{engine="0"} 0.2\nvllm:kv_cache_usage_perc{engine="1"} 0.4\n'
        'vllm:cache_config_info{engine="0",kv_cache_size_tokens="100000"} 1\n'
        'vllm:cache_config_info{engine="1",kv_cache_size_tokens="100000"} 1\n'
    )

    assert (report.running, report.kv_tokens, report.slots) == (5, 200000, 24)
    assert report.kv_used_ratio == pytest.approx(0.3)


def test_without_stats_the_load_is_unknown_and_sixteen_slots_are_assumed() -> None:
    report = _read("http_requests_total 7\n")

    assert report.state is State.UP
    assert (report.running, report.waiting, report.kv_used_ratio) == (None, None, None)
    assert (report.slots, report.slots_assumed, report.kv_tokens) == (16, True, None)
    assert any("num_requests_running" in words for words in report.warnings)


@pytest.mark.parametrize(("blocks", "slots"), [("100", 4), ("8192", 16), ("999999", 64)])
def test_slots_are_guessed_by_the_kv_cache_between_four_and_sixty_four(
    blocks: str, slots: int
) -> None:
    assert _read(_load(0, 0, blocks)).slots == slots


@pytest.mark.parametrize("blocks", ["None", "", "0", "9" * 20])
def test_an_unsaid_number_of_blocks_is_no_size(blocks: str) -> None:
    report = _read(_load(0, 0, blocks))

    assert (report.kv_tokens, report.slots, report.slots_assumed) == (None, 16, True)


def test_waiting_requests_lower_the_slots_to_what_runs_but_never_below_one() -> None:
    assert _read(_load(6, 2)).slots == 6
    assert _read(_load(0, 2)).slots == 1


def test_in_a_run_of_waiting_reports_the_higher_of_the_last_two_counts() -> None:
    first = _read(_load(6, 2))
    assert _read(_load(5, 2), first).slots == 6
    assert _read(_load(5, 2), _read(_load(6, 0))).slots == 5


def test_what_was_learned_stays_when_nobody_waits_and_grows_only_when_all_of_it_runs() -> None:
    learned = _read(_load(8, 2))
    assert learned.slots == 8

    assert _read(_load(3, 0), learned).slots == 8
    assert _read(_load(8, 0), learned).slots == 10
    assert _read(_load(15, 0), learned).slots == 16, "never above the guess"


def test_a_number_learned_from_who_waits_is_called_inferred_until_it_is_the_guess_again() -> None:
    assert not _read(_load(0, 0)).slots_inferred, "by the size that it says its cache has"
    learned = _read(_load(15, 2))
    assert learned.slots_inferred
    assert _read(_load(3, 0), learned).slots_inferred
    assert not _read(_load(15, 0), learned).slots_inferred


def test_an_assumption_is_not_taken_for_something_learned() -> None:
    assumed = _read("http_requests_total 7\n")

    assert _read(_load(0, 0, "32768"), assumed).slots == 64


def test_a_guess_that_shrank_replaces_what_was_learned() -> None:
    assert _read(_load(0, 0, "2048"), _read(_load(8, 2))).slots == 4


def test_slots_known_before_survive_a_report_without_figures() -> None:
    report = _read("http_requests_total 7\n", _read(_load(8, 2)))

    assert (report.slots, report.slots_assumed) == (8, False)


def test_a_sleeping_engine_says_so() -> None:
    metrics = (
        'vllm:engine_sleep_state{sleep_state="awake"} 0.0\n'
        'vllm:engine_sleep_state{sleep_state="discard_all"} 1.0\n'
    )

    assert _read(metrics).state is State.SLEEPING


@pytest.mark.parametrize("health", [None, text("", 503)])
def test_a_dead_engine_is_down_and_asked_no_more(health: Answer | None) -> None:
    round_ = Round(ENGINE, TABLE | {"/health": health})

    assert (round_.report.state, round_.asked) == (State.DOWN, ["/health"])


def test_a_hanging_or_broken_metrics_leaves_it_up_with_unknown_load() -> None:
    hanging = Round(ENGINE, TABLE | {"/metrics": None}).report
    broken = Round(ENGINE, TABLE | {"/metrics": text("oops", 500)}).report

    assert (hanging.state, hanging.running, hanging.slots) == (State.UP, None, 16)
    assert (broken.state, broken.running) == (State.UP, None)
    assert any("does not answer /metrics" in words for words in hanging.warnings)


@pytest.mark.parametrize("value", ["NaN", "1e300", "-4", "+Inf"])
def test_figures_that_cannot_be_true_are_not_said(value: str) -> None:
    report = _read(
        f"vllm:num_requests_running {value}\nvllm:kv_cache_usage_perc {value}\n"
        f"vllm:num_preemptions_total {value}\n"
    )

    assert (report.running, report.kv_used_ratio, report.preemptions) == (None, None, None)


def test_a_refused_key_is_said_while_the_open_paths_still_tell_the_load() -> None:
    report = Round(ENGINE, TABLE | {"/v1/models": sample("vllm/models_noauth.http")}).report

    assert (report.models, report.running) == (None, 0)
    assert "set `api_key`" in report.warnings[0]


def test_it_is_recognised_by_its_metrics_or_by_version_and_owner_together() -> None:
    assert ENGINE.recognises({"/metrics": text("vllm:x 1\n")})
    assert ENGINE.recognises(
        {"/version": TABLE["/version"], "/v1/models": TABLE["/v1/models"], "/metrics": NOTHING}
    )
    assert not ENGINE.recognises({"/version": NOTHING, "/v1/models": TABLE["/v1/models"]})
    assert not ENGINE.recognises({"/version": said({"version": "1"}), "/health": OK})
