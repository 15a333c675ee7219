"""What a new report changes in what was known."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.engines.base import UNKNOWN, EngineReport, Model, State
from gateway.engines.changes import merged, other_models, restarted


def report(**fields: Any) -> EngineReport:
    return EngineReport(**{"engine": "vllm", "state": State.UP, **fields})


def test_what_is_not_said_this_time_still_stands_but_for_load() -> None:
    before = report(slots=4, slots_assumed=True, models=(Model("m"),), running=3, version="1")
    now = merged(before, report(state=State.DOWN))
    assert (now.slots, now.slots_assumed, now.models, now.version) == (4, True, (Model("m"),), "1")
    assert now.state is State.DOWN
    assert now.running is None


def test_silence_says_nothing_about_which_engine_it_is() -> None:
    now = merged(report(models=(Model("m"),)), report(engine=UNKNOWN, state=State.DOWN))
    assert (now.engine, now.models) == ("vllm", (Model("m"),))


def test_nothing_of_another_engine_stands() -> None:
    assert merged(report(slots=4), report(engine="ollama")).slots is None


@pytest.mark.parametrize(
    ("before", "now", "is_new"),
    [
        (None, report(), False),
        (report(), report(), False),
        (report(state=State.DOWN), report(), True),
        (report(state=State.LOADING), report(), True),
        (report(state=State.SLEEPING), report(), True),
        (report(), report(state=State.DOWN), False),
        (report(incarnation="a"), report(incarnation="b"), True),
        (report(incarnation=None), report(incarnation="a"), False),
        (report(engine="ollama"), report(), True),
    ],
)
def test_a_process_that_is_another_one_has_an_empty_cache(
    before: EngineReport | None, now: EngineReport, is_new: bool
) -> None:
    assert restarted(before, now) is is_new


def test_models_that_come_and_go_are_named_by_their_own_ids() -> None:
    old = report(models=(Model("a"), Model("b", aliases=("x",))))
    new = report(models=(Model("b", loaded=True), Model("c")))
    assert other_models(old, new) == (["c"], ["a"])
    assert other_models(old, report()) == ([], [])
    assert other_models(None, new) == ([], [])
