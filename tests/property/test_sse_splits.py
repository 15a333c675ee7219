"""The tap against a slow reading of the same stream, and against itself under any split."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.sse import Tap
from gateway.core.wire import Wire
from tests.unit.recorded import STREAMS, body_of

SPOKEN = (
    "content",
    "reasoning_content",
    "reasoning",
    "tool_calls",
    "function_call",
    "refusal",
    "thinking",
    "reasoning_items",
    "reasoning_details",
    "audio",
)


def marks(tap: Tap) -> tuple[object, ...]:
    return (
        tap.events,
        tap.content_events,
        tap.at_boundary,
        tap.saw_terminal,
        tap.saw_error,
        tap.usage,
        tap.timings,
    )


def tapped(wire: Wire, reads: list[bytes]) -> Tap:
    tap = Tap(wire)
    total = sum(tap.feed(read) for read in reads)
    assert total == tap.content_events
    return tap


def whole_events(stream: bytes) -> list[tuple[str, str]]:
    """(event name, data) of each event, line by line as the event stream grammar has it."""
    found: list[tuple[str, str]] = []
    name, data = "", None
    for line in stream.splitlines(keepends=True):
        if not line.endswith((b"\n", b"\r")):
            break
        text = line.rstrip(b"\r\n").decode("utf-8", "replace")
        if not text:
            if data is not None:
                found.append((name, data))
            name, data = "", None
            continue
        field, _, value = text.partition(":")
        value = value.removeprefix(" ")
        if field == "data":
            data = value if data is None else f"{data}\n{value}"
        elif field == "event":
            name = value
    return found


def decoded(data: str) -> dict[str, Any]:
    try:
        value = json.loads(data)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def chat_content(event: dict[str, Any]) -> bool:
    return any(
        bool(choice.get("text")) or any((choice.get("delta") or {}).get(key) for key in SPOKEN)
        for choice in event.get("choices") or []
    )


def typed_content(name: str, event: dict[str, Any]) -> bool:
    kind = event.get("type", name)
    if kind.endswith("_delta"):
        delta = event.get("delta") or {}
        return any(delta.get(key) for key in ("text", "thinking", "partial_json"))
    if kind.endswith(".delta"):
        return bool(event.get("delta"))
    item = event.get("item") or event.get("content_block") or {}
    if kind in ("response.output_item.added", "content_block_start"):
        return str(item.get("type")).endswith(("_call", "_use")) or bool(item.get("text"))
    return False


def slow_content(wire: Wire, stream: bytes) -> list[bool]:
    if wire is Wire.OLLAMA_NDJSON:
        records = [decoded(line.decode("utf-8", "replace")) for line in stream.split(b"\n")[:-1]]
        return [bool((record.get("message") or {}).get("content")) for record in records]
    events = whole_events(stream)
    if wire in (Wire.CHAT, Wire.COMPLETIONS):
        return [chat_content(decoded(data)) for _, data in events]
    return [typed_content(name, decoded(data)) for name, data in events]


def cut(stream: bytes, places: list[int]) -> list[bytes]:
    ends = [0, *sorted(place % (len(stream) + 1) for place in places), len(stream)]
    return [stream[start:end] for start, end in pairwise(ends)]


places = st.lists(st.integers(0, 1 << 20), max_size=12)

# Text that tries to look like the stream's own keys, line ends and markers.
hostile = st.sampled_from(
    [
        '"content":"x"',
        '\\"content\\":\\"x\\"',
        '"finish_reason":"stop"',
        '"usage":{"prompt_tokens":1}',
        "data: [DONE]\n\n",
        "\r\n\r\n",
        "\n\n",
        "[DONE]",
        '"error":{}',
        "北京🌍",
        "\ud800",
        "\\",
        "",
    ]
)
text = st.one_of(hostile, st.text(max_size=20))
delta = st.one_of(
    st.builds(lambda said: {"content": said}, text),
    st.builds(lambda said: {"reasoning_content": said, "content": None}, text),
    st.builds(lambda said: {"reasoning": said}, text),
    st.builds(lambda said: {"role": "assistant", "content": said}, st.sampled_from([None, ""])),
    st.builds(lambda said: {"tool_calls": [{"index": 0, "function": {"arguments": said}}]}, text),
    st.builds(lambda said: {"zz_future": said, "tool_calls": None}, text),
    st.just({}),
)
chunk = st.one_of(
    st.builds(
        lambda part, end, index, rest: {"id": "c", "choices": [{"index": index, "delta": part, "finish_reason": end}]} | rest,
        delta,
        st.sampled_from([None, None, None, "stop", "length"]),
        st.sampled_from([0, 0, 0, 1]),
        st.sampled_from([{}, {"usage": None}, {"model": "", "logprob": float("nan")}]),
    ),
    st.builds(
        lambda prompt, said: {"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": said}},
        st.integers(0, 9999),
        st.integers(0, 9999),
    ),
    st.just({"choices": None}),
    st.just({"usage": {"prompt_tokens": 3, "prompt_tokens_details": {"cached_tokens": 2}}}),
    st.builds(lambda said: {"error": {"message": said, "code": 500}}, text),
    st.builds(lambda said: {"object": "error", "message": said}, text),
)  # fmt: skip


@st.composite
def streams(draw: st.DrawFn) -> bytes:
    out = b""
    for _ in range(draw(st.integers(1, 8))):
        end = draw(st.sampled_from([b"\n", b"\n", b"\r\n", b"\r"]))
        kind = draw(st.sampled_from(["chunk"] * 8 + ["comment", "done", "junk", "blank"]))
        if kind == "chunk":
            body = json.dumps(
                draw(chunk),
                ensure_ascii=True,
                separators=draw(st.sampled_from([(",", ":"), (", ", ": ")])),
            ).encode()
            space = draw(st.sampled_from([b" ", b""]))
            before = draw(st.sampled_from([b"", b"", b"id: 7", b": note", b"event: message"]))
            out += (before + end if before else b"") + b"data:" + space + body + end + end
        else:
            out += {
                "comment": b":" + end + end,
                "done": b"data: [DONE]" + end + end,
                "junk": b"data: {not json \xe5\x8c" + end + b"what: ever" + end + end,
                "blank": end,
            }[kind]
    return out + draw(st.sampled_from([b"", b"", b'data: {"choices":[{"del', b"event: x\n"]))


@pytest.mark.parametrize(("sample", "wire"), STREAMS.items())
def test_a_recorded_stream_reads_the_same_byte_by_byte_as_in_one_read(
    sample: str, wire: Wire
) -> None:
    stream = body_of(sample)
    whole = tapped(wire, [stream])
    single = tapped(wire, [stream[at : at + 1] for at in range(len(stream))])
    assert marks(single) == marks(whole)
    assert whole.events > 0


@pytest.mark.parametrize(("sample", "wire"), STREAMS.items())
def test_a_recorded_stream_has_as_many_content_events_as_full_decoding_finds(
    sample: str, wire: Wire
) -> None:
    stream = body_of(sample)
    expected = slow_content(wire, stream)
    tap = tapped(wire, [stream])
    assert (tap.content_events, tap.events) == (sum(expected), len(expected))


@given(sample=st.sampled_from(sorted(STREAMS)), places=places)
def test_a_recorded_stream_reads_the_same_under_any_split(sample: str, places: list[int]) -> None:
    stream, wire = body_of(sample), STREAMS[sample]
    assert marks(tapped(wire, cut(stream, places))) == marks(tapped(wire, [stream]))


@given(stream=streams(), places=places)
def test_any_stream_reads_the_same_under_any_split(stream: bytes, places: list[int]) -> None:
    assert marks(tapped(Wire.CHAT, cut(stream, places))) == marks(tapped(Wire.CHAT, [stream]))


@given(stream=streams(), places=places)
def test_the_tap_finds_the_content_that_full_decoding_finds(
    stream: bytes, places: list[int]
) -> None:
    expected = slow_content(Wire.CHAT, stream)
    tap = tapped(Wire.CHAT, cut(stream, places))
    assert (tap.content_events, tap.events) == (sum(expected), len(expected))


@given(stream=streams())
def test_the_tap_sees_usage_errors_and_ids_where_full_decoding_does(stream: bytes) -> None:
    events = [decoded(data) for _, data in whole_events(stream)]
    tap = tapped(Wire.CHAT, [stream])
    errors = [event for event in events if event.get("error") or event.get("object") == "error"]
    assert tap.saw_error == bool(errors)
    usages = [event["usage"] for event in events if event.get("usage")]
    assert (tap.usage.prompt_tokens if tap.usage else None) == (
        usages[-1]["prompt_tokens"] if usages else None
    )


@given(stream=st.binary(max_size=400), wire=st.sampled_from(Wire), places=places)
def test_no_bytes_make_the_tap_raise_and_no_split_changes_its_mind(
    stream: bytes, wire: Wire, places: list[int]
) -> None:
    taps = tapped(wire, cut(stream, places)), tapped(wire, [stream])
    for tap in taps:
        tap.finish()
    assert marks(taps[0]) == marks(taps[1])
