"""Where something may be inserted into a stream, and how streams end (cases B033, B043, B044)."""

from __future__ import annotations

import pytest

from gateway.core.figures import WHOLE
from gateway.core.wire import Wire
from tests.unit.events import DONE, delta, event, finish, tapped
from tests.unit.recorded import STREAMS, body_of


@pytest.mark.parametrize(
    ("reads", "whole"),
    [
        ([], True),
        ([b'data: {"choices":[{"delta":{"con'], False),
        ([b"event: x\n"], False),
        ([b"event: x\n\n"], True),
        ([b": ping\n"], True),
        ([b": pi"], False),
        ([b": ping\ndata: {}"], False),
        ([b"data: {}\n"], False),
        ([b"data: {}\n", b"\n"], True),
        ([b"data: {}\r\n\r"], True),
        ([b"A" * (WHOLE + 1)], False),
    ],
)
def test_a_boundary_is_where_no_event_is_open(reads: list[bytes], whole: bool) -> None:
    assert tapped(Wire.CHAT, *reads).at_boundary == whole


def test_a_half_ollama_record_is_no_boundary() -> None:
    tap = tapped(Wire.OLLAMA_NDJSON, b'{"message":{"content":"a"},"done":fa')
    assert not tap.at_boundary
    assert (tap.feed(b"lse}\n"), tap.at_boundary) == (1, True)


# How streams end


@pytest.mark.parametrize(
    ("wire", "last"),
    [
        (Wire.CHAT, DONE),
        (Wire.CHAT, event(finish())),
        (Wire.COMPLETIONS, event({"choices": [{"text": "", "finish_reason": "length"}]})),
        (Wire.RESPONSES, event({"type": "response.completed", "response": {}})),
        (Wire.RESPONSES, event({"type": "response.incomplete", "response": {}})),
        (Wire.MESSAGES, event({"type": "message_stop"})),
        (Wire.OLLAMA_NDJSON, b'{"message":{"content":""},"done":true}\n'),
        (Wire.NATIVE, event({"content": "", "stop": True})),
    ],
)
def test_each_wire_has_its_own_end(wire: Wire, last: bytes) -> None:
    assert tapped(wire, last).complete


@pytest.mark.parametrize(
    ("wire", "last"),
    [
        (Wire.RESPONSES, DONE),
        (Wire.MESSAGES, DONE),
        (Wire.MESSAGES, event({"type": "message_delta", "delta": {"stop_reason": "end_turn"}})),
        (Wire.CHAT, event({"type": "message_stop"})),
        (Wire.OLLAMA_NDJSON, b'{"message":{"content":"a"},"done":false}\n'),
        (Wire.JSON, DONE),
    ],
)
def test_no_other_mark_ends_a_stream(wire: Wire, last: bytes) -> None:
    assert not tapped(wire, last).saw_terminal


def test_a_failed_response_is_both_an_end_and_an_error() -> None:
    tap = tapped(Wire.RESPONSES, event({"type": "response.failed", "response": {"error": {}}}))
    assert (tap.saw_terminal, tap.saw_error, tap.complete) == (True, True, False)


def test_with_several_choices_the_stream_ends_when_each_has_finished() -> None:
    second = {"choices": [{"index": 1, "delta": {"role": "assistant"}}]}
    tap = tapped(Wire.CHAT, event(delta(content="a")), event(second), event(finish(0)))
    assert not tap.saw_terminal
    tap.feed(event(finish(1)))
    assert tap.complete


@pytest.mark.parametrize(
    ("wire", "failure"),
    [
        (Wire.CHAT, event({"error": {"code": 500, "message": "Context size has been exceeded."}})),
        (Wire.CHAT, event({"error": "overloaded", "error_type": "overloaded"})),
        (Wire.CHAT, event({"object": "error", "message": "full", "code": 503})),
        (Wire.CHAT, b'error: {"code":500}\n\n'),
        (Wire.RESPONSES, event({"type": "error", "message": "x"})),
        (Wire.MESSAGES, event({"type": "error", "error": {"type": "api_error"}})),
        (Wire.MESSAGES, event({"error": {"code": 500}})),
        (Wire.NATIVE, event({"error": {"code": 500}})),
        (Wire.OLLAMA_NDJSON, b'{"error":"unexpected EOF"}\n'),
    ],
)
def test_an_error_inside_a_stream_is_seen_in_every_form(wire: Wire, failure: bytes) -> None:
    tap = tapped(wire, failure)
    assert (tap.saw_error, tap.content_events, tap.complete) == (True, 0, False)


def test_an_error_outweighs_the_done_that_vllm_sends_after_it() -> None:
    tap = tapped(Wire.CHAT, event({"error": {"message": "x"}}), DONE)
    assert (tap.saw_terminal, tap.complete) == (True, False)


def test_ollamas_disguised_mid_stream_error_is_no_end() -> None:
    tap = tapped(Wire.CHAT, body_of("ollama/v1_chat_stream_midstream_error.constructed.sse"))
    tap.finish()
    assert (tap.content_events, tap.saw_terminal) == (1, False)


@pytest.mark.parametrize(
    ("wire", "rest", "complete"),
    [
        (Wire.CHAT, b"data: [DONE]", True),
        (Wire.CHAT, b"data: [DONE]\n", True),
        (Wire.CHAT, b"data: [DO", False),
        (Wire.OLLAMA_NDJSON, b'{"done":true}', True),
        (Wire.OLLAMA_NDJSON, b'{"done":tr', False),
    ],
)
def test_an_end_without_its_last_line_end_counts_when_the_stream_is_over(
    wire: Wire, rest: bytes, complete: bool
) -> None:
    tap = tapped(wire, rest)
    assert not tap.saw_terminal
    tap.finish()
    assert tap.complete == complete


@pytest.mark.parametrize(("sample", "wire"), STREAMS.items())
def test_a_recorded_stream_is_complete_unless_it_records_an_error(sample: str, wire: Wire) -> None:
    tap = tapped(wire, body_of(sample))
    tap.finish()
    assert tap.complete == ("error" not in sample and "err_" not in sample)
