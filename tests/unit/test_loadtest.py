"""What a load test counts, advises, saves and compares; without a network."""

from __future__ import annotations

import io
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from rich.console import Console
from rich.table import Table

from gateway.cli.loadtest import loadtest
from gateway.cli.loadtest_tables import changes, overview
from gateway.cli.ops import runs, work
from gateway.cli.ops.percentile import spread
from gateway.cli.ops.streamed import Sample
from gateway.cli.ops.tally import Load, Step, advice, knee, step_of
from gateway.cli.ops.watch import load_of_status
from gateway.core.figures import Usage


def shown(table: Table) -> str:
    console = Console(width=200, file=io.StringIO(), record=True)
    console.print(table)
    return console.export_text()


TEN = Usage(prompt_tokens=100, cached_tokens=40, generated_tokens=10)


def sample(ttft: float = 0.5, seconds: float = 1.0, **fields: Any) -> Sample:
    given: dict[str, Any] = {
        "started_s": 5.0,
        "ended_s": 5.0 + seconds,
        "first_s": 5.0 + ttft,
        "gaps": (0.1, 0.2),
        "events": 3,
        "usage": TEN,
    }
    return Sample(**given | fields)


def step(
    level: float, rate: float, *, ttft: float = 0.5, slowest: float = 1.0, errors: int = 0
) -> Step:
    """A step that generated so many tokens a second."""
    good = sample(ttft, slowest, usage=Usage(100, 0, round(rate)))
    bad = [sample(error="broken", detail="said so")] * errors
    return step_of(level, [good, *bad], 1.0, Load())


def test_percentiles_are_the_nearest_rank() -> None:
    found = spread([float(n) for n in range(1, 101)])
    assert found is not None
    assert (found.p50, found.p95, found.p99, found.mean) == (50, 95, 99, 50.5)
    assert spread([]) is None
    one = spread([3.0])
    assert one is not None
    assert one.p99 == 3.0


def test_only_whole_answers_give_figures_and_every_503_is_counted() -> None:
    samples = [
        sample(0.5, 2.0),
        sample(1.5, 4.0, refusals=(0.004, 0.006)),
        sample(0.0, 9.0, error="HTTP 500", detail="oh"),
        sample(0.0, 9.0, error="refused", refusals=(0.01,)),
    ]
    found = step_of(2, samples, 4.0, Load(waiting=3))
    assert (found.requests, found.served, found.refused) == (4, 2, 3)
    assert found.slowest_s == 4.0
    assert found.ttft is not None
    assert (found.ttft.p50, found.ttft.p99, found.ttft.count) == (0.5, 1.5, 2)
    assert found.itl is not None
    assert found.itl.count == 4
    assert found.prompt_tokens_per_s == 200 / 4
    assert found.generated_tokens_per_s == 20 / 4
    assert found.cached_share == 0.4
    assert found.errors == {"HTTP 500": 1, "refused": 1}
    assert found.details["HTTP 500"] == "oh"


def test_an_engine_that_says_nothing_is_counted_by_events_and_has_no_cached_share() -> None:
    found = step_of(1, [sample(usage=None)], 2.0, Load())
    assert found.generated_tokens_per_s == 1.5
    assert found.cached_share is None
    assert "-" in shown(overview([found]))


def test_the_knee_is_where_more_at_once_brings_no_more_tokens() -> None:
    steps = [step(1, 100), step(2, 180), step(4, 200, slowest=2.0), step(8, 205, slowest=9.0)]
    bend = knee(steps)
    assert bend is not None
    assert bend.level == 4
    told = " ".join(advice(steps, None, None))
    assert "The knee is at 4" in told
    assert "9.0 s instead of 2.0 s" in told


def test_without_a_knee_it_says_to_try_higher() -> None:
    assert "try higher" in " ".join(advice([step(1, 100), step(2, 200)], None, None))


def test_the_smallest_step_that_meets_the_target_is_named_and_failures_do_not_meet_it() -> None:
    steps = [step(1, 100, errors=1), step(2, 180), step(4, 200, ttft=1.0), step(8, 205, ttft=9.0)]
    told = list(advice(steps, 1.0, 0.5))
    assert told[0].startswith("The smallest that meets the target")
    assert ": 2. The fastest that does: 4, 200.0 tokens/s." in told[0]
    assert told[-1] == "At 1, 1 of 2 failed: 1 x broken (said so)."
    assert "No step meets" in next(iter(advice(steps, 0.1, None)))


def test_when_nothing_was_served_the_advice_says_why() -> None:
    failed = step_of(1, [sample(error="unreachable", first_s=None)], 1.0, Load())
    assert knee([failed]) is None
    assert "1 x unreachable" in " ".join(advice([failed], None, None))


def test_a_saved_run_is_read_back_as_it_was_and_compared_step_by_step(tmp_path: Path) -> None:
    old, new = [step(1, 100), step(2, 180)], [step(2, 90), step(4, 95)]
    file = tmp_path / "run.json"
    file.write_text(json.dumps(runs.document_of(old, {"url": "u"})))
    assert list(runs.read_run(file)) == old
    both = runs.pairs(runs.read_run(file), new)
    assert [(one.level, other.level) for one, other in both] == [(2, 2)]
    assert "180.0 → 90.0 (-50%)" in shown(changes(both, "run.json"))


@pytest.mark.parametrize("text", ["", "[]", '{"format": 99}', '{"format": 1, "steps": [{}]}'])
def test_what_is_no_saved_run_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "run.json"
    file.write_text(text)
    with pytest.raises(runs.BadRun, match=r"run\.json"):
        runs.read_run(file)


def test_the_request_set_is_the_same_each_time_and_shares_no_beginning() -> None:
    assert work.built_in(6) == work.built_in(6)
    firsts = [one.turns[0][0]["content"][:8] for one in work.built_in(12)]
    assert len(set(firsts)) == 12


def test_agents_share_a_system_prompt_and_every_turn_continues_the_one_before() -> None:
    conversations = work.agents(8)
    assert work.size(conversations) == 8
    assert len({one.turns[0][0]["content"] for one in conversations}) == 1
    for one in conversations:
        for before, after in itertools.pairwise(one.turns):
            assert after[: len(before)] == before


def test_a_set_is_cut_to_size_or_repeated() -> None:
    assert work.size(work.cut(work.agents(8), 6)) == 6
    assert work.size(work.cut(work.built_in(3), 7)) == 7


def test_a_mark_stands_first_and_leaves_the_prompt_whole() -> None:
    messages = [{"role": "user", "content": "hello"}]
    assert work.marked(messages, "ab00")[0]["content"] == "[ab00] hello"
    assert work.marked(messages, "") == messages
    parts = [{"role": "user", "content": [{"type": "text", "text": "hello"}]}]
    assert work.marked(parts, "ab00") == parts


def test_prompts_are_read_line_by_line(tmp_path: Path) -> None:
    file = tmp_path / "prompts"
    file.write_text(
        'plain\n\n"quoted"\n{"prompt": "p"}\n{"messages": [{"role": "user", "content": "m"}]}\n'
    )
    contents = [one.turns[0][0]["content"] for one in work.from_file(file)]
    assert contents == ["plain", "quoted", "p", "m"]
    file.write_text('fine\n{"text": "x"}\n')
    with pytest.raises(work.BadPrompts, match=":2:"):
        work.from_file(file)


def test_requests_of_an_open_loop_come_at_their_rate_on_average() -> None:
    times = list(itertools.islice(work.open_times(4.0, seed=1), 2000))
    assert times == sorted(times)
    assert 1900 / times[1999] == pytest.approx(4.0, rel=0.1)
    assert times == list(itertools.islice(work.open_times(4.0, seed=1), 2000))


def test_a_gateways_line_and_its_engines_are_seen_together() -> None:
    rows = [
        {"in_flight": 2, "waiting": 1, "kv_used_ratio": 0.5},
        {"in_flight": 1, "waiting": None, "kv_used_ratio": None},
    ]
    assert load_of_status({"queued": 4, "backends": rows}) == Load(
        running=3, waiting=5, kv_used_ratio=0.5
    )
    assert Load(waiting=1).joined(Load(running=2)) == Load(running=2, waiting=1)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["http://x", "--concurrency", "1,two"], "1,2,4"),
        (["http://x", "--concurrency", "0"], "1,2,4"),
        (["http://x", "--agents", "--prompts", "f"], "not both"),
        ([], "BASE_URL"),
    ],
)
def test_wrong_usage_says_what_to_do(arguments: list[str], words: str) -> None:
    result = CliRunner().invoke(loadtest, arguments)
    assert result.exit_code == 2
    assert words in result.output


def test_nobody_at_the_address_is_one_line() -> None:
    result = CliRunner().invoke(loadtest, ["http://127.0.0.1:1"])
    assert result.exit_code == 1
    assert "is it running?" in result.output
