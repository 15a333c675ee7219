"""Chains, the models of engines' caches, and the index over them."""

from __future__ import annotations

import pytest

from gateway.core.caches import MOST_BLOCKS, RAM_BYTES, Pool, Sequences
from gateway.core.chain import BLOCK_BYTES, EMPTY, MAX_BLOCKS, Chain, chain_of, deepest
from gateway.core.prefix import PrefixIndex, conversation_of, session_in


def prompt(*names: str, blocks: int = 4) -> Chain:
    """A chain with a piece of so many blocks for each name."""
    return chain_of([name.encode().ljust(blocks * BLOCK_BYTES, b".") for name in names], "m")


def used(cache: Sequences, ticket: int, chain: Chain) -> None:
    cache.start(ticket, chain)
    cache.end(ticket)


# ---------------------------------------------------------------- chains


def test_one_more_turn_keeps_all_earlier_blocks() -> None:
    short, longer = chain_of([b"system", b"hello"], "m"), chain_of([b"system", b"hello", b"x"], "m")
    assert longer.hashes[:2] == short.hashes
    assert longer.size == short.size + 1


def test_the_same_prompt_of_another_model_shares_nothing() -> None:
    assert chain_of([b"hello"], "m").hashes != chain_of([b"hello"], "n").hashes


def test_a_block_hash_covers_all_before_it() -> None:
    a, b = chain_of([b"A" * 512, b"same"], "m"), chain_of([b"B" * 512, b"same"], "m")
    assert a.hashes[1] != b.hashes[1]


def test_a_prompt_beyond_the_most_blocks_is_cut() -> None:
    chain = chain_of([b"x" * (MAX_BLOCKS + 10) * BLOCK_BYTES], "m")
    assert len(chain.hashes) == len(chain.ends) == MAX_BLOCKS


@pytest.mark.parametrize("held", range(7))
def test_binary_search_finds_how_deep_a_chain_is_held(held: int) -> None:
    hashes = tuple(range(100, 106))
    assert deepest(hashes, set(hashes[:held])) == held


# ---------------------------------------------------------------- whole sequences


def test_a_running_sequence_serves_nobody_else_and_an_ended_one_does() -> None:
    cache, chain = Sequences(2), prompt("a")
    cache.start(1, chain)
    assert cache.match(chain, busy_too=False) == 0
    assert cache.match(chain, busy_too=True) == chain.size
    cache.end(1)
    assert cache.match(chain, busy_too=False) == chain.size


def test_the_next_turn_takes_over_the_slot_of_its_conversation() -> None:
    cache = Sequences(2)
    used(cache, 1, prompt("a"))
    used(cache, 2, prompt("b"))
    used(cache, 3, prompt("a", "more"))
    assert cache.match(prompt("b"), busy_too=False) == prompt("b").size


def test_what_a_slot_loses_is_kept_in_ram_until_that_is_full() -> None:
    cache = Sequences(1)
    names = [f"chat {n}" for n in range(200)]
    for ticket, name in enumerate(names):
        used(cache, ticket, prompt(name, blocks=64))
    sizes = [cache.match(prompt(name, blocks=64), busy_too=False) for name in names]
    size = prompt("x", blocks=64).size
    assert sizes[0] == 0, "the oldest is gone"
    assert sizes[-1] == sizes[-2] == size
    assert size * (sizes.count(size) - 1) <= RAM_BYTES


def test_a_small_part_of_a_saved_sequence_is_not_restored() -> None:
    cache = Sequences(1)
    used(cache, 1, prompt("system", "a", "b", "c", "d", "e"))
    used(cache, 2, prompt("other"))
    assert cache.match(prompt("system"), busy_too=False) == 0


def test_a_saved_sequence_that_the_engine_did_not_have_is_forgotten() -> None:
    cache = Sequences(1)
    used(cache, 1, prompt("a"))
    used(cache, 2, prompt("b"))
    cache.start(3, prompt("a", "more"))
    cache.correct(3, 0)
    cache.end(3)
    used(cache, 4, prompt("c"))
    used(cache, 5, prompt("d"))
    assert cache.match(prompt("a", "more"), busy_too=False) > 0, "the new one was saved since"


def test_an_answer_that_began_before_a_sequence_was_saved_says_nothing_about_it() -> None:
    cache = Sequences(2)
    cache.start(1, prompt("system", "a"))  # cold, and it reports so when it ends
    cache.start(2, prompt("system", "b"))
    cache.end(2)
    used(cache, 3, prompt("other"))  # takes the slot of 2, whose sequence is saved
    cache.end(1)
    cache.correct(1, 0)
    assert cache.match(prompt("system", "b"), busy_too=False) == prompt("system", "b").size


def test_ram_that_holds_less_than_assumed_shrinks_until_it_predicts_nothing_it_lacks() -> None:
    cache, wrong = Sequences(1), []
    for ticket in range(400):
        chain = prompt(f"chat {ticket % 8}", blocks=32)
        wrong.append(cache.match(chain, busy_too=False))
        cache.start(ticket, chain)
        cache.correct(ticket, 0)  # an engine with --cache-ram 0
        cache.end(ticket)
    assert sum(map(bool, wrong[:50])) > sum(map(bool, wrong[-50:])) == 0


def test_ram_that_holds_more_than_assumed_grows() -> None:
    cache, count = Sequences(1), 12
    chains = [prompt(f"chat {n}", blocks=32) for n in range(count)]
    hits = []
    for ticket in range(count * 30):
        chain = chains[ticket % count]
        hits.append(cache.match(chain, busy_too=False) > 0)
        cache.start(ticket, chain)
        cache.correct(
            ticket, chain.size if ticket >= 8 * count else 0
        )  # it was restarted with more
        cache.end(ticket)
    assert not any(hits[7 * count : 8 * count]), "by then nothing is expected of it"
    assert all(hits[-count:])


def test_fewer_slots_forget_the_idle_ones_and_keep_who_runs() -> None:
    cache = Sequences(3)
    used(cache, 1, prompt("old"))
    cache.start(2, prompt("running"))
    cache.resize(1, 0)
    cache.end(2)
    assert cache.match(prompt("running"), busy_too=False) > 0
    assert cache.match(prompt("old"), busy_too=False) == 0


# ---------------------------------------------------------------- one pool of blocks


def test_a_pool_shares_blocks_while_they_are_computed() -> None:
    pool = Pool(1 << 20)
    pool.start(1, prompt("system", "a"))
    assert pool.match(prompt("system", "b"), busy_too=False) == prompt("system").size


def test_a_pool_keeps_what_was_used_last() -> None:
    pool = Pool(prompt("a").size * 2)
    for ticket, name in enumerate("abac"):
        pool.start(ticket, prompt(name))
    assert [pool.match(prompt(n), busy_too=False) > 0 for n in "abc"] == [True, False, True]


# ---------------------------------------------------------------- bounds


@pytest.mark.parametrize("cache", [Pool(1 << 30), Sequences(4)], ids=["pool", "sequences"])
def test_many_distinct_prompts_of_tiny_pieces_stay_within_the_bound(
    cache: Pool | Sequences,
) -> None:
    """In bytes they would fit: two bytes a block."""
    for ticket in range(200):
        chain = chain_of([b"%d" % (n % 10) for n in range(3_000)], ticket)
        cache.start(ticket, chain)
        cache.end(ticket)
    assert cache.blocks <= MOST_BLOCKS + 4 * 3_000


def test_tickets_whose_answers_report_nothing_are_not_remembered_for_ever() -> None:
    cache = Sequences(2)
    for ticket in range(5_000):
        used(cache, ticket, prompt(str(ticket), blocks=1))
    assert len(cache._expected) <= 4 * 2 + 64


def test_a_slot_that_an_engine_gained_is_used_before_one_that_holds_a_prompt() -> None:
    cache, first = Sequences(1), prompt("first")
    used(cache, 1, first)
    cache.resize(2, 0)
    cache.start(2, prompt("second"))
    assert cache.match(first, busy_too=False) == first.size
    assert cache.blocks == 8


def test_a_slot_that_an_engine_lost_is_the_one_used_longest_ago() -> None:
    cache, prompts = Sequences(3), [prompt(name) for name in "abc"]
    for ticket in (1, 0, 2):
        used(cache, ticket, prompts[ticket])
    cache.resize(2, 0)
    assert [cache.match(one, busy_too=False) for one in prompts] == [
        prompts[0].size,
        0,
        prompts[2].size,
    ]


# ---------------------------------------------------------------- the index


def index(*, pooled: bool = False) -> PrefixIndex:
    made = PrefixIndex()
    made.put("b", pooled=pooled, slots=2, capacity=None)
    return made


@pytest.mark.parametrize("pooled", [False, True])
def test_a_restarted_engine_has_nothing_and_learns_again(pooled: bool) -> None:
    one, chain = index(pooled=pooled), prompt("a")
    one.start("b", 1, chain)
    one.end("b", 1)
    assert one.match("b", chain, busy_too=False) == chain.size
    one.forget("b")
    assert one.match("b", chain, busy_too=False) == 0
    one.start("b", 2, chain)
    one.end("b", 2)
    assert one.match("b", chain, busy_too=False) == chain.size, "before its next report, too"


def test_an_unknown_or_removed_backend_has_nothing_and_breaks_nothing() -> None:
    one = index()
    one.remove("b")
    one.start("b", 1, prompt("a"))
    one.end("b", 1)
    one.correct("b", 1, 100)
    assert one.match("b", prompt("a"), busy_too=True) == one.blocks("b") == 0


def test_no_prompt_matches_nothing() -> None:
    assert index().match("b", EMPTY, busy_too=True) == 0


def test_a_conversation_has_one_number_by_its_name_or_by_how_it_begins() -> None:
    named = [(b"session-id", b"s1")]
    assert conversation_of(session_in(named), None, [b"x"]) == conversation_of(
        session_in(named), None, [b"y"]
    )
    assert conversation_of(None, "key", [b"x"]) == conversation_of(None, "key", [b"y"])
    first, later = [b"system", b"hello"], [b"system", b"hello", b"answer", b"more"]
    assert conversation_of(None, None, first) == conversation_of(None, None, later)


def test_a_request_id_never_names_a_conversation() -> None:
    a = conversation_of(session_in([(b"x-request-id", b"1")]), None, [b"hello"])
    assert a == conversation_of(session_in([(b"x-request-id", b"2")]), None, [b"hello"])
