"""Events known by their likeness to one that was read mean what they would mean if each were read alone."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from gateway.core.sse import Tap
from gateway.core.wire import Wire
from gateway.runtime.watch import Watch
from tests.fakes.meter import Counts

TEXTS = st.one_of(
    st.sampled_from(
        ["", "a", '"', "\\", "\\n", "\n", "\r", "\u2028", "ü", '","finish_reason":"stop"']
    ),
    st.text(max_size=8),
)
KEYS = st.sampled_from(["content", "reasoning_content", "reasoning", "text", "role", "audio"])
EXTRA = st.sampled_from(
    [b"", b',"usage":{"prompt_tokens":3,"completion_tokens":2}', b',"error":{"message":"x"}']
)


@st.composite
def events(draw: st.DrawFn) -> bytes:
    key, text = draw(KEYS), draw(TEXTS)
    raw = draw(st.booleans())  # a text that nobody escaped: no JSON, or another JSON
    value = b'"' + text.encode() + b'"' if raw else json.dumps(text, ensure_ascii=False).encode()
    member = b'"%b":%b' % (key.encode(), value)
    choice = member if key == "text" else b'"delta":{%b}' % member
    finish = draw(st.sampled_from([b"null", b'"stop"']))
    index = draw(st.sampled_from([0, 0, 0, 1]))
    return b'data: {"id":"1","choices":[{"index":%d,%b,"finish_reason":%b}]%b}\n\n' % (
        index,
        choice,
        finish,
        draw(EXTRA),
    )


@given(st.lists(events(), min_size=1, max_size=12))
def test_each_event_counts_as_if_it_were_the_only_one(stream: list[bytes]) -> None:
    tap = Tap(Wire.CHAT)
    alone = []
    for event in stream:
        fresh = Tap(Wire.CHAT)
        assert tap.feed(event) == fresh.feed(event), event
        alone.append(fresh)
        if not tap.at_boundary:
            return  # an unescaped line end has cut the event: what follows belongs to it
    assert tap.content_events == sum(one.content_events for one in alone)
    assert tap.saw_error == any(one.saw_error for one in alone)
    assert (tap.usage is None) == all(one.usage is None for one in alone)


HOW = st.sampled_from(["chunk", "chunk", "chunk", "chunk", "bytes", "halves", "two"])


@given(st.lists(st.tuples(events(), HOW), min_size=1, max_size=16))
def test_chunks_that_are_known_by_their_length_count_as_if_they_were_read(
    stream: list[tuple[bytes, str]],
) -> None:
    """Whatever else of the stream comes in between, in other pieces."""
    watch, plain = Watch(Tap(Wire.CHAT), Counts()), Tap(Wire.CHAT)
    passed: list[bytes] = []

    def put(chunk: bytes) -> bool:
        passed.append(chunk)
        return True

    take = watch.chunk_taker(put, lambda: None)
    for event, how in stream:
        if how in ("bytes", "halves"):
            half = len(event) // 2 if how == "halves" else len(event)
            for part in (event[:half], event[half:]):
                watch.look(part, 0.0)
        else:
            for data in (event, event) if how == "two" else (event,):
                chunk = b"%x\r\n%b\r\n" % (len(data), data)
                assert take(chunk, 0.0)
                assert passed[-1] is chunk
        plain.feed(event * (2 if how == "two" else 1))
        assert watch.meter.events == plain.content_events
        assert watch.tap.at_boundary == plain.at_boundary
        assert (watch.tap.complete, watch.tap.saw_error) == (plain.complete, plain.saw_error)
        assert watch.tap.usage == plain.usage


PLAIN = b'data: {"id":"1","choices":[{"index":0,"delta":{"content":"abcdefgh"},"finish_reason":null}]}\n\n'


@given(
    st.integers(0, len(PLAIN) - 1),
    st.sampled_from(
        [b'"', b"\\", b"\n", b"\r", b"x", b"1", b"\x00", b"{", b"}", b",", b'"}', b'":', b"\n\n"]
    ),
)
def test_an_event_of_a_known_length_that_differs_outside_of_its_text_is_read(
    at: int, odd: bytes
) -> None:
    """One or two bytes of it are others: it means what it would mean to a tap that knows nothing by its length."""
    other = PLAIN[:at] + odd + PLAIN[at + len(odd) :]
    watch, plain = Watch(Tap(Wire.CHAT), Counts()), Tap(Wire.CHAT)
    take = watch.chunk_taker(lambda _: True, lambda: None)
    for event in (PLAIN, PLAIN, other[: len(PLAIN)], PLAIN, PLAIN):
        take(b"%x\r\n%b\r\n" % (len(event), event), 0.0)
        plain.feed(event)
        assert watch.meter.events == plain.content_events
        assert watch.tap.at_boundary == plain.at_boundary


def test_a_last_event_of_a_known_length_ends_the_stream() -> None:
    last = PLAIN.replace(b'{"content":"abcdefgh"}', b'{"content":"ab"}').replace(
        b"null", b'"length"'
    )
    last += b" " * (len(PLAIN) - len(last))
    last = last.rstrip(b" \n").ljust(len(PLAIN) - 2) + b"\n\n"
    assert len(last) == len(PLAIN)
    watch = Watch(Tap(Wire.CHAT), Counts())
    take = watch.chunk_taker(lambda _: True, lambda: None)
    for event in (PLAIN, PLAIN, last):
        assert not watch.tap.complete
        take(b"%x\r\n%b\r\n" % (len(event), event), 0.0)
    assert watch.tap.complete


@given(events(), st.binary(max_size=12), st.integers(0, 400))
def test_what_is_no_whole_chunk_is_never_taken_for_one_that_is_known(
    event: bytes, odd: bytes, at: int
) -> None:
    watch = Watch(Tap(Wire.CHAT), Counts())
    take = watch.chunk_taker(lambda _: True, lambda: None)
    chunk = b"%x\r\n%b\r\n" % (len(event), event)
    for _ in range(2):
        take(chunk, 0.0)
    at %= len(chunk)
    changed = (chunk[:at] + odd + chunk[at + len(odd) :])[: len(chunk)]  # of the same length
    size, _, data = changed.partition(b"\r\n")
    whole = size == b"%x" % max(0, len(data) - 2) and data.endswith(b"\r\n") and len(data) > 2
    assert take(changed, 0.0) == whole


def test_two_shapes_in_one_stream_are_not_mixed() -> None:
    """The beginning of the one with the end of the other is no JSON, though of a known length."""
    content = b'data: {"choices":[{"delta":{"content":"%b"},"finish_reason":null}]}\n\n'
    text = b'data: {"choices":[{"text":"%b","finish_reason":null}]}\n\n'
    mixed = content.partition(b"%b")[0] + b"abcd" + text.partition(b"%b")[2]
    watch = Watch(Tap(Wire.CHAT), Counts())
    take = watch.chunk_taker(lambda _: True, lambda: None)
    longer = content % (b"x" * (len(mixed) - len(content % b"")))
    for event in (longer, longer, text % b"abcd", text % b"abcd"):
        take(b"%x\r\n%b\r\n" % (len(event), event), 0.0)
    before = watch.meter.events
    take(b"%x\r\n%b\r\n" % (len(mixed), mixed), 0.0)
    assert (watch.meter.events, len(longer)) == (before, len(mixed))


def test_a_known_event_goes_past_the_tap_and_a_client_that_is_behind_stops_them() -> None:
    watch = Watch(Tap(Wire.CHAT), Counts())
    room = iter([True, True, True, False])
    stops: list[int] = []
    take = watch.chunk_taker(lambda _: next(room), lambda: stops.append(watch.meter.events))
    for _ in range(4):
        take(b"%x\r\n%b\r\n" % (len(PLAIN), PLAIN), 0.0)
    assert (watch.meter.events, watch.tap.events, stops) == (4, 1, [4])


def test_text_after_text_is_not_decoded_again_and_still_counts() -> None:
    tap = Tap(Wire.CHAT)
    event = b'data: {"choices":[{"delta":{"content":"%b"},"finish_reason":null}]}\n\n'
    assert [tap.feed(event % text) for text in (b"a", b"b c", b"", b"\\u00fc", b"d")] == [
        1,
        1,
        0,
        1,
        1,
    ]
