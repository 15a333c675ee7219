"""The tap on bytes in any shape: line ends, cuts, junk and very large events."""

from __future__ import annotations

import json

import pytest

from gateway.core.figures import END, WHOLE, Timings, Usage
from gateway.core.sse import Tap
from gateway.core.wire import Wire
from tests.unit.events import delta, event, tapped


@pytest.mark.parametrize("end", ["\n\n", "\r\n\r\n", "\r\r", "\n\r\n", "\r\n\n"])
def test_five_events_are_five_in_any_line_ending_also_byte_by_byte(end: str) -> None:
    stream = event(delta(content="北京🌍")).replace(b"\n\n", end.encode()) * 5
    whole = tapped(Wire.CHAT, stream)
    single = tapped(Wire.CHAT, *(stream[at : at + 1] for at in range(len(stream))))
    for tap in (whole, single):
        assert (tap.events, tap.content_events, tap.at_boundary) == (5, 5, True)


def test_a_crlf_cut_in_two_is_one_line_end() -> None:
    tap = tapped(Wire.CHAT, b"id: 1\r", b"\n", b'data: {"choices":[]}\r', b"\n\r")
    assert (tap.events, tap.at_boundary) == (1, True)
    tap.feed(b"\n")
    assert (tap.events, tap.at_boundary) == (1, True)


def test_a_character_cut_in_half_by_the_engine_is_still_content() -> None:
    broken = b'data: {"choices":[{"delta":{"content":"\xe5\x8c"}}]}\n\n'
    assert Tap(Wire.CHAT).feed(broken) == 1


@pytest.mark.parametrize("odd", [b"NaN", b"-Infinity", b'"\\ud83d"'])
def test_json_that_only_lenient_parsers_accept_is_read(odd: bytes) -> None:
    stream = b'data: {"choices":[{"delta":{"content":"a"},"logprob":%b}],"x":%b}\n\n' % (odd, odd)
    assert Tap(Wire.CHAT).feed(stream) == 1


@pytest.mark.parametrize(
    "junk",
    [
        b"data: {not json}\n\n",
        b"data:\n\n",
        b"data: 5\n\n",
        b'data: {"choices":{}}\n\n',
        b'data: {"choices":[{"delta":"text"}]}\n\n',
        b"data: " + b"[" * 5000 + b"\n\n",
        b'data: {"a":' + b"[" * 5000 + b"\n\n",
        b"\xff\xfe\n\n",
        b"<html>\n\n",
    ],
)
def test_what_the_tap_cannot_understand_is_passed_over(junk: bytes) -> None:
    tap = tapped(Wire.CHAT, junk)
    assert (tap.content_events, tap.saw_terminal, tap.at_boundary) == (0, False, True)
    assert tap.feed(event(delta(content="a"))) == 1


@pytest.mark.parametrize("kib", [70, 140, 600, 1536, 8192])
def test_a_very_large_event_is_one_content_event_and_little_of_it_is_kept(kib: int) -> None:
    large = event(delta(content="A" * (kib << 10)))
    small = event(delta(content="a"))
    tap = Tap(Wire.CHAT)
    found = [tap.feed(small)]
    for at in range(0, len(large), 65536):
        found.append(tap.feed(large[at : at + 65536]))
        assert len(tap._blocks._held) + len(tap._blocks._head) <= WHOLE + 65536 + END
    assert (found[0], sum(found), tap.feed(small), tap.events) == (1, 2, 1, 3)


@pytest.mark.parametrize("split", [True, False])
def test_the_end_and_the_figures_of_a_very_large_last_event_are_found(split: bool) -> None:
    usage = {"input_tokens": 7, "output_tokens": 9, "input_tokens_details": {"cached_tokens": 4}}
    answer = {"output": ["A" * (1 << 20)], "usage": usage}
    llama = event({"type": "response.completed", "response": answer}, "response.completed")
    vllm = event({"response": answer, "sequence_number": 9, "type": "response.completed"})
    for stream in (llama, vllm):
        reads = [stream[:5000], stream[5000:700000], stream[700000:]] if split else [stream]
        tap = tapped(Wire.RESPONSES, *reads)
        assert (tap.complete, tap.usage) == (True, Usage(7, 4, 9))
        assert tap.at_boundary


@pytest.mark.parametrize(
    ("wire", "stream", "complete"),
    [
        (Wire.CHAT, event({"choices": [{"delta": {"content": "A" * WHOLE}, "finish_reason": "stop"}]}), True),
        (Wire.CHAT, event({"error": {"message": "A" * WHOLE}}), False),
        (Wire.NATIVE, event({"content": "A" * WHOLE, "stop": True}), True),
        (Wire.OLLAMA_NDJSON, json.dumps({"response": "A" * WHOLE, "done": True}).encode() + b"\n", True),
        (Wire.MESSAGES, event({"type": "content_block_delta", "delta": {"text": "A" * WHOLE}}), False),
        (Wire.RESPONSES, event({"type": "response.output_text.delta", "delta": "A" * WHOLE}), False),
        (Wire.MESSAGES, event({"delta": {"text": "A" * WHOLE}, "type": "content_block_delta"}), False),
        (Wire.MESSAGES, event({"delta": {"text": "A" * WHOLE}}, "content_block_delta"), False),
        (Wire.CHAT, b":" + b"A" * WHOLE + b"\n\n", False),
        (Wire.JSON, event({"a": "A" * WHOLE}), False),
    ],
)  # fmt: skip
def test_a_very_large_event_says_what_its_ends_say(
    wire: Wire, stream: bytes, complete: bool
) -> None:
    tap = tapped(wire, stream)
    quiet = b"error" in stream or stream.startswith(b":") or wire is Wire.JSON
    assert (tap.complete, tap.content_events) == (complete, 0 if quiet else 1)
    assert tap.saw_error == (b"error" in stream)


def test_an_event_is_never_confused_with_its_own_text() -> None:
    said = '"finish_reason":"stop"},{"usage":{"prompt_tokens":1}\n\ndata: [DONE]\n\n"error":{"a":1}'
    tap = tapped(Wire.CHAT, event(delta(content=said)))
    assert (tap.content_events, tap.saw_terminal, tap.saw_error, tap.usage) == (
        1,
        False,
        False,
        None,
    )


def test_a_very_large_event_that_never_ends_is_judged_by_its_ends_too() -> None:
    document = {"choices": [{"delta": {"content": "A" * WHOLE}, "finish_reason": "stop"}]}
    tap = tapped(Wire.CHAT, event(document)[:-2])
    assert not tap.at_boundary
    assert (tap.finish(), tap.complete) == (1, True)


def test_a_response_event_of_unknown_kind_and_size_is_passed_over() -> None:
    tap = tapped(Wire.RESPONSES, event({"junk": "A" * WHOLE}))
    assert (tap.events, tap.content_events, tap.complete) == (1, 0, False)


def test_fields_that_no_wire_uses_are_passed_over() -> None:
    tap = tapped(Wire.CHAT, b"retry: 10\nwhat\nevent: x\n" + event(delta(content="a")))
    assert tap.content_events == 1


def test_timings_on_a_messages_stream_are_kept() -> None:
    timings = {"prompt_n": 1, "prompt_ms": 2, "predicted_n": 3, "predicted_ms": 4}
    tap = tapped(Wire.MESSAGES, event({"type": "message_stop", "timings": timings}))
    assert tap.timings == Timings(1, 2.0, 3, 4.0, None)
