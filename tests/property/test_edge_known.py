"""A head that is known again says what a new reader would have read in it, whatever came before on its connection."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.api.reader import RequestReader
from gateway.core.errors import GatewayError

ENDS = {"scheme": "http", "server": None, "client": None}


HEAD = b"POST /v1/x HTTP/1.1\r\nHost: a\r\nContent-Length: %b\r\nX-A: 1\r\n\r\n"


class Told:
    """What one reader says of its requests."""

    def __init__(self, size_limit: int = 4096) -> None:
        self.reader = RequestReader(self, size_limit, 20)
        self.requests: list[dict[str, Any]] = []

    def on_request(self) -> None:
        reader = self.reader
        said = reader.scope(ENDS)
        said |= {"keep_alive": reader.keep_alive, "continue": reader.awaits_continue}
        self.requests.append(said | {"left": reader.body_left, "body": b"", "ended": False})

    def on_request_body(self, data: bytes) -> None:
        self.requests[-1]["body"] += data

    def on_request_end(self) -> None:
        self.requests[-1]["ended"] = True

    def read(self, request: bytes, cuts: list[int]) -> str | None:
        """Feed one request in these reads; the error that it was refused with."""
        edges = sorted({0, len(request), *(cut % (len(request) + 1) for cut in cuts)})
        try:
            for start, end in pairwise(edges):
                at = start
                while at < end and not self.reader.ended:  # what follows is dropped
                    at += self.reader.feed(request[at:end])
        except GatewayError as error:
            return f"{error.key} {error.message}"
        if self.reader.ended:
            self.reader.next()
        return None


# What a head is made of. The first of a kind is what is usual, and comes most often.
PLAIN = [
    "Host: a",
    "Accept: */*",
    "Authorization: Bearer k",
    "X-A: 1",
    "x-b:  spaced ",
    "Connection: keep-alive",
]
ODD = [
    "X-Fold: a\r\n b", "Expect: 100-continue", "Connection: close", "Upgrade: h2c", "Connection: upgrade",
    "Transfer-Encoding: chunked", "Content-Length: 3", "content-length: 5", "Content-Length:", " folded", "X-Content-Length: 3",
]  # fmt: skip
FIRST = ["POST /a?b=%20c HTTP/1.1"] * 6 + [
    "GET /a HTTP/1.1",
    "POST http://h/x HTTP/1.1",
    "POST / HTTP/1.0",
]
NAMES = [
    "Content-Length: ",
    "content-length: ",
    "Content-Length:",
    "CONTENT-LENGTH:  ",
    "Content-Length:\t",
    "Content-Lengt: ",
]
VALUES = ["+3", "3, 3", "3 3", "003", "99999999999999", "3 ", "3\t", "", "-1", "\r\n 3", "0x3"]


def usually(usual: list[str], odd: list[str]) -> st.SearchStrategy[str]:
    return st.integers(0, 9).flatmap(lambda n: st.sampled_from(odd if n == 9 else usual))


heads = st.tuples(
    st.sampled_from(FIRST),
    st.lists(st.sampled_from(PLAIN), max_size=3),
    usually(NAMES[:2], NAMES),
    st.lists(usually(PLAIN, ODD), max_size=3),
)
# One request: which head, how long its body says it is, what is put before and after that line, where it is cut.
requests = st.tuples(
    st.integers(0, 1),
    usually(["0", "3", "7", "12"], VALUES),
    st.lists(st.sampled_from(ODD), max_size=1) | st.just([]) | st.just([]),
    st.lists(st.sampled_from(ODD), max_size=1) | st.just([]) | st.just([]),
    st.lists(st.integers(0, 400), max_size=2) | st.just([]),
)


@settings(max_examples=600)
@given(
    st.tuples(heads, heads),
    st.lists(requests, min_size=2, max_size=8),
    st.binary(min_size=12, max_size=12),
)
def test_what_a_connection_said_before_changes_nothing_in_what_is_read(
    some: tuple[tuple[str, list[str], str, list[str]], ...],
    asked: list[tuple[int, str, list[str], list[str], list[int]]],
    body: bytes,
) -> None:
    """Heads come again with other lengths and odd lines; the same bytes go to a reader that knows none."""
    old = Told()
    for which, value, above, below, cuts in asked:
        first, before, name, after = some[which]
        lines = [first, *before, *above, name + value, *below, *after, "", ""]
        request = "\r\n".join(lines).encode() + body
        new = Told()
        error = new.read(request, cuts)
        known = len(old.requests)
        assert old.read(request, cuts) == error
        assert old.requests[known:] == new.requests
        last = new.requests[-1] if new.requests else None
        if error is not None or last is None or not (last["ended"] and last["keep_alive"]):
            return  # and so would the connection


@pytest.mark.parametrize(
    "value", [b"0", b"1", b"3", b"12", b"003", b"3 ", b"3\t", b" 3", *(v.encode() for v in VALUES)]
)
@pytest.mark.parametrize("shorter_by", [0, 1])
def test_a_length_is_read_as_it_would_be_in_a_head_that_is_not_known(
    value: bytes, shorter_by: int
) -> None:
    old, new = Told(), Told()
    assert old.read(HEAD % b"2" + b"ab", []) is None
    request = HEAD % value + b"123456789012"
    cuts = [len(request) - shorter_by]
    assert old.read(request, cuts) == new.read(request, cuts)
    assert old.requests[1:] == new.requests


@pytest.mark.parametrize("room", range(14))
def test_a_longer_length_does_not_let_a_head_grow_beyond_its_limit(room: int) -> None:
    limit = len(HEAD % b"0") + room
    old, new = Told(limit), Told(limit)
    assert old.read(HEAD % b"0", []) is None
    request = HEAD % b"%011d" % 1 + b"x"
    assert old.read(request, []) == new.read(request, [])


def test_a_body_that_begins_like_the_head_before_it_is_a_body() -> None:
    old = Told()
    inner = HEAD % b"0"
    assert old.read(inner, []) is None
    for _ in range(2):
        whole = HEAD % b"%d" % len(inner) + inner
        assert old.read(whole, [len(whole) - len(inner)]) is None
    assert [request["body"] for request in old.requests] == [b"", inner, inner]


def test_what_was_noted_of_a_head_is_kept_while_heads_are_alike() -> None:
    told = Told()
    notes = []
    for head in (HEAD % b"0", HEAD % b"1" + b"x", HEAD.replace(b"X-A: 1", b"X-A: 2") % b"0"):
        assert told.read(head, []) is None
        notes.append(told.reader.notes)
    assert notes[0] is notes[1]
    assert notes[1] is not notes[2]
