"""The reader alone: whatever the reads, the same requests, and never a byte past the end of one."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.api.reader import RequestReader
from gateway.core.errors import GatewayError
from tests.fakes.raw_client import encode

STREAM = (
    encode("GET", "/1?q=1")
    + encode("POST", "/2", {"Upgrade": "h2c", "Connection": "upgrade"}, b"two\r\n\r\n")
    + b"\r\n"
    + encode("POST", "/3", chunks=[b"\r\n\r\n", b"0\r\n\r\n", b"GET / HTTP/1.1\r\n\r\n"])
    + encode("POST", "/4", {"Transfer-Encoding": "chunked"})
    + b"3;ext=1\r\nabc\r\n0\r\nT: v\r\nU: w\r\n\r\n"
    + encode("POST", "/5", {"Upgrade": "x", "Connection": "upgrade"}, chunks=[b"five\r\n\r\n"])
    + encode("GET", "/6", {"Upgrade": "websocket", "Connection": "upgrade"})
    + b"\r\n\r\n"
    + encode("HEAD", "/7")
)
ENDS = [
    STREAM.index(mark) for mark in (b"POST /2", b"\r\nPOST /3", b"POST /4", b"POST /5", b"GET /6")
] + [STREAM.index(b"\r\n\r\nHEAD"), len(STREAM)]
BODIES = [
    b"",
    b"two\r\n\r\n",
    b"\r\n\r\n0\r\n\r\nGET / HTTP/1.1\r\n\r\n",
    b"abc",
    b"five\r\n\r\n",
    b"",
    b"",
]


class Heard:
    """What a reader said, and where in the stream each request ended."""

    def __init__(self) -> None:
        self.reader = RequestReader(self, 65536, 100)
        self.urls: list[bytes] = []
        self.bodies: list[bytes] = []
        self.names: list[set[bytes]] = []
        self.over = 0

    def on_request(self) -> None:
        self.urls.append(self.reader.url)
        self.bodies.append(b"")
        self.names.append({name for name, _ in self.reader.headers})

    def on_request_body(self, data: bytes) -> None:
        self.bodies[-1] += data

    def on_request_end(self) -> None:
        self.over += 1

    def read(self, pieces: list[bytes]) -> list[int]:
        """Feed these reads; the offsets at which requests ended."""
        ends, offset = [], 0
        for piece in pieces:
            left = piece
            while left:
                used = self.reader.feed(left)
                offset += used
                left = left[used:]
                if self.reader.ended:
                    ends.append(offset)
                    self.reader.next()
        return ends


def cut(at: list[int]) -> list[bytes]:
    edges = [0, *sorted(at), len(STREAM)]
    return [STREAM[a:b] for a, b in itertools.pairwise(edges) if a < b]


def check(pieces: list[bytes]) -> None:
    heard = Heard()
    ends = heard.read(pieces)
    assert heard.urls == [b"/1?q=1", b"/2", b"/3", b"/4", b"/5", b"/6", b"/7"]
    assert heard.bodies == BODIES
    assert ends == ENDS
    assert heard.over == len(ENDS)
    assert not {b"t", b"u"} & set().union(*heard.names)
    assert b"upgrade" in heard.names[1]


def test_one_cut_anywhere_changes_nothing() -> None:
    for at in range(len(STREAM)):
        check(cut([at]))


@pytest.mark.parametrize("size", [1, 2, 3, 5, 7])
def test_small_reads_change_nothing(size: int) -> None:
    check(cut(list(range(0, len(STREAM), size))))


@given(st.lists(st.integers(0, len(STREAM)), max_size=40))
def test_any_cuts_change_nothing(at: list[int]) -> None:
    check(cut(at))


def test_a_bug_in_the_sink_is_an_internal_error_and_not_the_clients_fault(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Broken(Heard):
        def on_request(self) -> None:
            raise ZeroDivisionError

    with pytest.raises(GatewayError) as caught:
        Broken().read([encode("GET", "/")])
    assert caught.value.key == "internal_error"
    assert "ZeroDivisionError" in caplog.text
