"""The models of caches against slow and simple ones that say the same in fewer words."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gateway.core.caches import Pool, Sequences
from gateway.core.chain import Chain, chain_of, deepest

SIZE = 10  # bytes a block, here


def chain(text: str) -> Chain:
    """Each letter a block; equal beginnings are equal blocks."""
    ids = tuple(hash(text[: n + 1]) for n in range(len(text)))
    return Chain(ids, tuple(SIZE * (n + 1) for n in range(len(text))))


def shared(a: str, b: str) -> int:
    n = 0
    while n < min(len(a), len(b)) and a[n] == b[n]:
        n += 1
    return n * SIZE


texts = st.text("ab", min_size=1, max_size=8)


@given(st.lists(texts, max_size=12), texts)
def test_a_pool_that_never_fills_holds_every_prefix_it_was_given(
    past: list[str], asked: str
) -> None:
    pool = Pool(10**9)
    for ticket, text in enumerate(past):
        pool.start(ticket, chain(text))
    expected = max((shared(text, asked) for text in past), default=0)
    assert pool.match(chain(asked), busy_too=False) == expected


@given(st.lists(texts, max_size=20), st.integers(1, 30), texts)
def test_a_pool_never_holds_more_than_its_size_nor_says_more_than_it_was_given(
    past: list[str], blocks: int, asked: str
) -> None:
    pool = Pool(blocks * SIZE)
    for ticket, text in enumerate(past):
        pool.start(ticket, chain(text))
        assert pool.blocks <= blocks
    found = pool.match(chain(asked), busy_too=False)
    assert found <= max((shared(text, asked) for text in past), default=0)


@given(st.lists(st.tuples(texts, st.booleans()), max_size=12), st.integers(1, 4), texts)
def test_sequences_say_no_more_than_some_past_prompt_has_and_no_less_than_the_last_one(
    past: list[tuple[str, bool]], slots: int, asked: str
) -> None:
    cache, ended = Sequences(slots), []
    for ticket, (text, ends) in enumerate(past):
        cache.start(ticket, chain(text))
        if ends:
            cache.end(ticket)
            ended.append(text)
    found = cache.match(chain(asked), busy_too=True)
    assert found <= max((shared(text, asked) for text, _ in past), default=0)
    assert cache.match(chain(asked), busy_too=False) <= found
    if past and all(ends for _, ends in past):
        assert found >= shared(past[-1][0], asked)


@given(st.lists(texts, min_size=1, max_size=8), texts)
def test_with_a_slot_for_each_prompt_the_longest_common_prefix_is_found(
    past: list[str], asked: str
) -> None:
    cache = Sequences(len(past))
    for ticket, text in enumerate(past):
        cache.start(ticket, chain(text))  # all run at once: nobody takes over another's slot
    for ticket in range(len(past)):
        cache.end(ticket)
    expected = max(shared(text, asked) for text in past)
    assert cache.match(chain(asked), busy_too=False) == expected


@given(
    st.lists(st.binary(max_size=1500), max_size=6), st.lists(st.binary(max_size=1500), max_size=6)
)
def test_equal_leading_pieces_and_only_they_give_equal_leading_blocks(
    a: list[bytes], b: list[bytes]
) -> None:
    same = 0
    while same < min(len(a), len(b)) and a[same] == b[same]:
        same += 1
    one, two = chain_of(a, "m"), chain_of(b, "m")
    common = deepest(one.hashes, set(two.hashes))
    assert common >= len(chain_of(a[:same], "m").hashes)
    assert one.hashes[:common] == two.hashes[:common]
