"""What the doctor concludes from answers and times, without a network."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from gateway.__main__ import main
from gateway.cli.doctor import doctor
from gateway.cli.ops.exam import Exam, model_of
from gateway.cli.ops.host import counted, judge_host
from gateway.cli.ops.judge_engine import judge_engine
from gateway.cli.ops.judge_timing import Targets, figures, judge_timing
from gateway.cli.ops.reach import Opening
from gateway.cli.ops.streamed import Sample
from gateway.cli.ops.timing import Timing, gaps_within, is_serial
from gateway.core.config import Backend
from gateway.core.figures import Usage
from gateway.engines.base import Answer, EngineReport, Model, State
from gateway.engines.detect import ENGINES

SAMPLES = Path(__file__).parents[1] / "data" / "samples"
BACKEND = Backend("gpu1", "http://127.0.0.1:8080")


def sample(
    started: float = 0.0, ttft: float = 0.1, itl: float = 0.02, tokens: int = 20, **more: Any
) -> Sample:
    first = started + ttft
    return Sample(
        started_s=started,
        first_s=first,
        ended_s=first + itl * (tokens - 1) + 0.001,
        gaps=(itl,) * (tokens - 1),
        events=tokens,
        usage=Usage(more.pop("prompt", 20), more.pop("cached", None), tokens),
        **more,
    )


def exam(engine: str = "llama-server", timing: Timing | None = None, **report: Any) -> Exam:
    told = EngineReport(engine=engine, state=State.UP, **report)
    return Exam(backend=BACKEND, report=told, timing=timing)


def timed(**samples: Sample) -> Timing:
    """A good engine's times, but for these."""
    good = {
        "warm": sample(tokens=1),
        "short": sample(),
        "long": sample(prompt=500, tokens=8),
        "again": sample(prompt=500, cached=490, tokens=8),
    }
    return Timing(**(good | samples))


def found(timing: Timing, **report: Any) -> set[str]:
    return {one.code for one in judge_timing(exam(timing=timing, **report), Targets())}


def test_the_second_that_starts_only_when_the_first_has_ended_is_served_one_at_a_time() -> None:
    first = sample()
    assert is_serial(first, sample(0.1, ttft=0.5)) is True
    assert is_serial(first, sample(0.1, ttft=0.1)) is False


def test_a_first_that_was_too_short_proves_nothing() -> None:
    assert is_serial(sample(tokens=2), sample(0.1, ttft=0.5)) is None
    first = sample(tokens=8)
    assert is_serial(first, sample(first.ended_s + 0.1)) is None, "it was sent too late"


def test_gaps_are_taken_from_a_span_of_the_clock() -> None:
    one = sample(1.0, ttft=0.5, itl=0.1, tokens=6)  # contents at 1.5, 1.6, ... 2.0
    assert gaps_within(one, 1.65, 1.85) == pytest.approx([0.1, 0.1])
    assert gaps_within(Sample(started_s=0, ended_s=1), 0, 9) == []


def test_good_times_are_no_finding_and_none_are_no_finding_either() -> None:
    pair = {"first": sample(), "second": sample(0.1)}
    assert found(timed(**pair)) == set()
    assert list(judge_timing(exam(), Targets())) == []


@pytest.mark.parametrize(
    ("samples", "code"),
    [
        ({"long": sample(ttft=2.5, prompt=500)}, "slow_prefill"),
        ({"short": sample(itl=0.2)}, "slow_decode"),
        ({"again": sample(prompt=500, cached=0)}, "cache_off"),
        ({"warm": sample(ttft=9.0)}, "cold_start"),
        ({"first": sample(), "second": sample(0.1, ttft=0.6)}, "one_at_a_time"),
        ({"first": sample(itl=0.04), "second": sample(0.1, itl=0.04)}, "shared_bandwidth"),
        ({"first": sample(tokens=200), "second": sample(0.1, ttft=1.3)}, "waits_when_busy"),
        (
            {"beside": sample(itl=0.7, tokens=5), "intruder": sample(0.1, ttft=2.0)},
            "prefill_stalls",
        ),
        ({"short": sample(error="HTTP 500")}, "probe_failed"),
    ],
)
def test_each_cause_of_a_wait_has_its_name(samples: dict[str, Sample], code: str) -> None:
    assert code in found(timed(**samples))


def test_a_cache_that_does_not_say_or_had_too_short_a_prompt_is_not_called_off() -> None:
    assert "cache_off" not in found(timed(again=sample(prompt=500, cached=None)))
    assert "cache_off" not in found(timed(again=sample(prompt=100, cached=0)))


def test_the_times_are_told_in_company_when_others_were_at_work() -> None:
    assert found(timed(), running=3) == {"in_company"}


def test_the_figures_fit_in_one_line() -> None:
    words = figures(timed(long=sample(ttft=0.5, prompt=500), second=sample(0.1, ttft=0.3)))
    assert words == (
        "first token after 0.10 s when idle, 0.30 s beside another, prefill 1,000 tokens/s, decode 50 tokens/s"
    )


def test_one_at_a_time_blames_the_setting_only_where_there_is_one() -> None:
    pair = {"first": sample(), "second": sample(0.1, ttft=0.6)}

    def meaning(**report: Any) -> str:
        one = next(iter(judge_timing(exam(timing=timed(**pair), **report), Targets())))
        return f"{one.means} {one.change}"

    assert "never took effect" in meaning(slots=4)
    assert "--parallel 4" in meaning(slots=4)
    assert "never took effect" not in meaning(slots=1)
    assert "OLLAMA_NUM_PARALLEL=2" in meaning(engine="ollama", slots=1, slots_assumed=True)


def test_a_recorded_busy_vllm_has_a_queue_inside() -> None:
    metrics = Answer(200, {}, (SAMPLES / "vllm" / "metrics_busy.txt").read_bytes())
    seen = {"/health": Answer(200, {}, b""), "/metrics": metrics}
    report = ENGINES["vllm"].read(seen, None)
    codes = [one.code for one in judge_engine(Exam(backend=BACKEND, report=report, seen=seen))]
    assert codes == ["engine_queue"]


def test_every_finding_of_an_engine_says_what_to_change_and_how_to_see_it() -> None:
    report = EngineReport(
        engine="llama-server", state=State.SLEEPING, slots=4, context_per_slot=2048, waiting=3,
        kv_used_ratio=0.95, kv_shared=True, kv_tokens=2048, prompt_tokens=90_000, cached_tokens=0,
        warnings=("llama-server runs without --metrics; …",),
    )  # fmt: skip
    opened = (Opening("10.0.0.1", chat=True, pages=("/slots",)),)
    backend = Backend("gpu1", "http://127.0.0.1:8080", slots=9)
    findings = list(judge_engine(Exam(backend=backend, report=report, openings=opened)))
    assert {one.code for one in findings} == {
        "engine_queue", "kv_full", "too_many_slots", "small_context", "asleep", "unified_kv",
        "cache_off", "metrics_off", "open_engine", "open_pages",
    }  # fmt: skip
    for one in findings:
        assert all((one.seen, one.means, one.change, one.then)), one.code


def test_open_metrics_alone_are_only_worth_knowing() -> None:
    report = EngineReport(engine="vllm", state=State.UP)
    opened = (Opening("10.0.0.1", chat=False, pages=("/metrics",)),)
    findings = list(judge_engine(Exam(backend=BACKEND, report=report, openings=opened)))
    assert [(one.code, one.wrong) for one in findings] == [("open_pages", False)]


def test_a_probe_goes_to_a_model_that_is_loaded() -> None:
    models = (Model("a", loaded=False), Model("b", loaded=True))
    assert model_of(exam(models=models)) == "b"
    assert model_of(exam(models=models[:1])) == "a"
    narrowed = Backend("gpu1", "http://x", models=("a",))
    told = EngineReport(engine="ollama", state=State.UP, models=models)
    assert model_of(Exam(backend=narrowed, report=told)) == "a"


def test_swap_counters_are_read_and_a_few_pages_are_nothing() -> None:
    assert counted("nr_free_pages 5\npswpin 3\npswpout 4\n") == 7
    assert counted("nr_free_pages 5\n") is None
    assert counted("pswpin many\n") is None
    assert list(judge_host(5.0)) == list(judge_host(None)) == []
    assert [one.code for one in judge_host(5000.0)] == ["swapping"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "--backend"),
        (["--config", "a", "--backend", "http://x"], "not both"),
        (["--backend", "http://x", "--target-ttft", "0"], "--target-ttft"),
    ],
)
def test_wrong_usage_says_what_to_do(arguments: list[str], words: str) -> None:
    result = CliRunner().invoke(doctor, arguments)
    assert result.exit_code == 2
    assert words in result.output


def test_a_config_with_mistakes_is_told_with_its_mistakes(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("backends: []\n")
    result = CliRunner().invoke(doctor, ["--config", str(file)])
    assert result.exit_code == 1
    assert "c.yaml" in result.output
    assert "Traceback" not in result.output


def test_every_finding_is_documented() -> None:
    root = Path(__file__).parents[2]
    code = "".join(
        path.read_text() for path in sorted((root / "gateway" / "cli" / "ops").glob("*.py"))
    )
    names = set(re.findall(r'code="(\w+)"', code))
    assert len(names) > 20
    text = (root / "docs" / "doctor.md").read_text()
    assert [name for name in sorted(names) if f"`{name}`" not in text] == []


@pytest.mark.parametrize("command", ["doctor", "loadtest", "plan"])
def test_every_option_of_the_bench_is_documented(command: str) -> None:
    text = (Path(__file__).parents[2] / "docs" / f"{command}.md").read_text()
    found = main.get_command(click.Context(main), command)
    assert found is not None
    options = [name for one in found.params for name in one.opts if name.startswith("--")]
    assert len(options) > 4
    assert [name for name in options if f"`{name}" not in text] == []
