"""What gateways tell each other of caches: the same hashes in every process, bounded, and believed only of what it is."""

from __future__ import annotations

import os
import subprocess
import sys

from hypothesis import given
from hypothesis import strategies as st

from gateway.core.chain import BLOCK_BYTES, chain_of
from gateway.core.dispatch import Limits, Offer, Start
from gateway.core.fleet import Fitness
from gateway.core.lease_dispatch import LeasedDispatch
from gateway.core.lease_homes import EVERY_S, MOST_HEARD, MOST_TOLD, Batch, Homes, chain_for_fleet
from gateway.core.prefix import Chain
from gateway.core.tickets import Used

PIECES = [b"x" * 700, b"y" * 1024, b"z" * 30]
POOL = frozenset({"b1", "b2"})


def test_the_hashes_of_a_prompt_are_the_same_in_every_process() -> None:
    program = (
        "from gateway.core.lease_homes import chain_for_fleet as of;"
        "print(of([b'x' * 700, b'y' * 1024, b'z' * 30], 'm').hashes)"
    )
    told = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for seed in ("1", "2")
    }
    assert told == {str(chain_for_fleet(PIECES, "m").hashes)}


pieces = st.lists(st.binary(max_size=3 * BLOCK_BYTES), max_size=5)


@given(pieces, pieces)
def test_a_prompt_is_cut_as_by_one_gateway_and_told_apart_as_well(
    one: list[bytes], other: list[bytes]
) -> None:
    assert chain_for_fleet(one, "m").ends == chain_of(one, "m").ends
    mine, theirs = chain_of(one, "m").hashes, chain_of(other, "m").hashes
    ours, others = chain_for_fleet(one, "m").hashes, chain_for_fleet(other, "m").hashes
    assert [a == b for a, b in zip(mine, theirs, strict=False)] == [
        a == b for a, b in zip(ours, others, strict=False)
    ]
    if ours:
        assert ours != chain_for_fleet(one, "another model").hashes


def chain(*words: str) -> Chain:
    return chain_for_fleet([word.encode() * 600 for word in words], "m")


def test_a_batch_stands_until_the_next_and_is_heard_once() -> None:
    here, there = Homes(), Homes()
    here.note("b1", chain("a"))
    batch = here.told(10.0)
    assert here.told(10.1) == batch
    there.hear([("here", batch)])
    assert there.of(chain("a", "b")) is not None
    there.hear([("here", batch)])
    assert there.of(chain("a", "b")) is None, "it was believed already"
    here.note("b2", chain("c"))
    assert here.told(10.2) == batch, "not yet"
    assert here.told(10.0 + EVERY_S).number == batch.number + 1


def test_what_is_told_and_heard_is_bounded_and_the_oldest_goes_first() -> None:
    homes = Homes()
    for number in range(MOST_TOLD + 5):
        homes.note("b1", chain(f"{number:04}"))
    held = homes.told(1.0).held
    assert len(held) == MOST_TOLD
    assert chain("0000").hashes[-1] not in held
    homes.hear([("g", Batch(1, dict.fromkeys(range(MOST_HEARD + 50), "b1")))])
    assert len(homes._heard) == MOST_HEARD


def test_what_a_restarted_engine_held_is_forgotten() -> None:
    homes = Homes()
    homes.hear([("g", Batch(1, {chain("a").hashes[-1]: "b1", chain("b").hashes[-1]: "b2"}))])
    homes.forget("b1")
    assert homes.of(chain("a")) is None
    assert homes.of(chain("b")) is not None


def fleet_dispatch(*, pooled: bool) -> LeasedDispatch:
    dispatch = LeasedDispatch(Limits())
    for name in sorted(POOL):
        dispatch.put(0.0, name, slots=2, pooled=pooled)
        dispatch.report(0.0, name, Fitness.UP, None, 0.0)
    dispatch.lend(0.0, dict.fromkeys(POOL, 2), 1e9)
    return dispatch


def serve(dispatch: LeasedDispatch, ticket: int, prompt: Chain, conversation: int) -> Start:
    offer = Offer(
        ticket, "ann", POOL, chain=prompt, prompt_bytes=prompt.size, conversation=conversation
    )
    started = dispatch.offer(float(ticket), offer)[0]
    assert isinstance(started, Start)
    used = Used(prompt.size // 4, 0, 10)
    dispatch.release(ticket + 0.5, ticket, cancelled=False, served=True, used=used)
    return started


@given(st.integers(0, 2**32 - 1), st.booleans())
def test_the_next_turn_goes_where_the_other_gateway_had_the_first(seed: int, pooled: bool) -> None:
    """Wherever the rendezvous hash would send it: its seed is another one in each gateway."""
    here, there = fleet_dispatch(pooled=pooled), fleet_dispatch(pooled=pooled)
    first = serve(here, 1, chain("system", "question"), seed)
    there.homes.hear([("here", here.homes.told(2.0))])
    assert serve(there, 2, chain("another"), 7).affinity == "miss"
    second = serve(there, 3, chain("system", "question", "answer"), seed ^ 0x5555)
    assert (second.backend, second.affinity) == (first.backend, "hit")


def test_what_an_engine_does_not_say_is_not_told() -> None:
    dispatch = fleet_dispatch(pooled=True)
    dispatch.offer(1.0, Offer(1, "ann", POOL, chain=chain("a")))
    dispatch.release(2.0, 1, cancelled=False, served=True, used=Used(100, None, 10))
    assert dispatch.homes.told(3.0).held == {}
