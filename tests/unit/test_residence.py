"""An engine that holds few models at a time: who goes first, who waits for a load, and for how long. B021."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from gateway.core.residence import Memory, Residence
from tests.unit.dispatch_desk import Desk

LOAD_S = 5.0  # before any was measured


def desk(*loaded: str, slots: int = 1, names: str = "a", **memory: Any) -> Desk:
    """Backends that hold `loaded`, one model at a time."""
    made = Desk(queue=99, **dict.fromkeys(names, slots))
    for name in names:
        hold(made, name, *loaded, **memory)
    return made


def hold(one: Desk, name: str, *loaded: str, **memory: Any) -> None:
    one.dispatch.hold(name, Memory(frozenset(loaded), **{"most": 1, **memory}), one.now)


def serve_all(one: Desk, models: dict[int, str], service_s: float = 1.0) -> list[str]:
    """All end one after the other; the models in the order in which they started."""
    while one.running:
        one.end(next(iter(one.running)), after_s=service_s)
        one.wait(0.3)
    return [models[ticket] for ticket in one.started]


def switches(order: list[str]) -> int:
    return sum(one != other for one, other in pairwise(order))


def test_requests_are_grouped_by_model_and_nobody_starves() -> None:
    one = desk("A")
    models = {one.offer(model=model): model for model in "ABAACABC"}
    order = serve_all(one, models, service_s=0.5)
    assert sorted(order) == sorted("ABAACABC")
    assert switches(order) <= 3, order


def test_under_steady_traffic_for_one_model_another_one_has_its_turn() -> None:
    one = desk("A")
    models = {one.offer("ann", model="A"): "A"}
    rare = one.offer("bob", model="B")
    came = one.now
    for _ in range(40):
        models[one.offer("ann", model="A")] = "A"
        one.end(next(iter(one.running)), after_s=1.0)
        if rare in one.running:
            break
    assert rare in one.running
    assert LOAD_S <= one.now - came <= LOAD_S + 3


def test_a_model_at_work_is_not_pushed_out_although_a_slot_is_free() -> None:
    one = desk("A", slots=2)
    running = one.offer(model="A")
    other = one.offer(model="B")
    one.wait(20.0)
    assert one.waits(other)
    one.end(running)
    assert other in one.running


def test_after_its_turn_a_model_at_work_gets_no_new_requests_while_another_one_waits() -> None:
    one = desk("A", slots=2)
    running = one.offer(model="A")
    other = one.offer("bob", model="B")
    one.wait(LOAD_S + 1)
    late = one.offer("cat", model="A")
    assert one.waits(late), "the slot is kept"
    one.end(running)
    assert other in one.running
    assert one.waits(late)


def test_an_engine_that_waits_by_itself_is_trusted_with_it_after_two_turns() -> None:
    one = desk("A", slots=2, waits=True)
    one.offer(model="A")
    other = one.offer("bob", model="B")
    one.wait(2 * LOAD_S - 0.5)
    assert one.waits(other)
    one.wait(1.0)
    assert other in one.running


def test_room_for_two_models_is_used_at_once() -> None:
    one = desk("A", slots=2, most=2)
    assert one.offer(model="A") in one.running
    assert one.offer(model="B") in one.running
    third = one.offer(model="C")
    assert one.waits(third)


def test_where_the_model_is_loaded_comes_before_where_it_is_installed() -> None:
    one = desk("B", names="ab")
    hold(one, "b", "A")
    assert one.running[one.offer(model="A", pool="ab")] == "b"
    assert one.running[one.offer(model="B", pool="ab")] == "a"


def test_a_short_wait_is_better_than_a_load_and_patience_ends() -> None:
    one = desk("B", names="ab")
    hold(one, "b", "A")
    for _ in range(9):
        one.end(one.offer(model="A", pool="b"), after_s=0.1)
    one.offer(model="A", pool="b")
    second = one.offer(model="A", pool="ab")
    assert one.waits(second), "b will be free long before a has loaded it"
    one.wait(0.6)
    assert one.running[second] == "a", "but no slot idles for longer than half a second"


def test_the_time_to_load_is_learned_and_does_not_spoil_the_speed_of_prefill() -> None:
    one = desk("B")
    backend = one.dispatch.backends["a"]
    rate = backend.prefill_rate.value
    ticket = one.offer(model="A", prompt_bytes=4000)
    one.now += 20.0
    one.dispatch.first_token(one.now, ticket)
    one.end(ticket)
    assert backend.load_s.value == pytest.approx(20.0, abs=1.0)
    assert backend.prefill_rate.value == rate


def test_another_name_of_a_model_is_the_same_model() -> None:
    one = desk("x:latest", slots=2, names="a", most=1)
    hold(one, "a", "x:latest", names={"x": "x:latest"})
    assert one.offer(model="x") in one.running
    assert one.offer(model="x:latest") in one.running
    assert one.offer(model="alias", ids={"a": "x"}) not in one.running, "only the slots are full"
    assert one.dispatch.backends["a"].residence.running == {"x:latest": 2}


def test_answers_from_before_a_load_or_during_it_are_not_believed() -> None:
    memory = Residence()
    memory.hear(Memory(frozenset("A")), asked_at=1.0)
    assert memory.start(2.0, 7, "B")
    memory.hear(Memory(frozenset("A")), asked_at=3.0)
    assert memory.loaded == {"B"}, "it is still loading"
    memory.arrived(4.0, 7)
    memory.hear(Memory(frozenset("A")), asked_at=3.5)
    assert memory.loaded == {"B"}, "that was asked too early"
    assert memory.hear(Memory(frozenset("A")), asked_at=5.0), "B is gone"
    assert memory.loaded == {"A"}


def test_an_engine_that_says_nothing_of_its_memory_has_all_its_models() -> None:
    memory = Residence()
    assert memory.has("any")
    assert not memory.start(1.0, 1, "one")
    assert not memory.start(1.0, 2, "other")
    assert memory.loaded is None
