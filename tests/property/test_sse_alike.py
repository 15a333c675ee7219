"""Events known by their likeness to one that was read mean what they would mean if each were read alone."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from gateway.core.sse import Tap
from gateway.core.wire import Wire

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
