"""What the tap takes for content, on each wire."""

from __future__ import annotations

import json
import os
import time

import pytest

from gateway.core.figures import Usage
from gateway.core.sse import Tap
from gateway.core.wire import Wire
from tests.unit.events import delta, event, finish, tapped

SLACK = float(os.environ.get("SLOTGATE_TEST_SLACK", "1"))


@pytest.mark.parametrize(
    "said",
    [
        {"content": "x"},
        {"content": " "},
        {"content": [{"type": "text", "text": "x"}]},
        {"reasoning_content": "x", "content": None},
        {"reasoning": "x"},
        {"reasoning_items": [{}]},
        {"tool_calls": [{"index": 0, "function": {"name": "f", "arguments": ""}}]},
        {"function_call": {"name": "f"}},
        {"refusal": "no"},
        {"role": "assistant", "content": "Hel"},
    ],
)
def test_text_reasoning_refusals_and_tool_calls_are_content(said: dict[str, object]) -> None:
    assert Tap(Wire.CHAT).feed(event(delta(**said))) == 1


@pytest.mark.parametrize(
    "document",
    [
        delta(role="assistant", content=None),
        delta(role="assistant", content=""),
        delta(content="", reasoning_content=None, tool_calls=None),
        delta(tool_calls=[]),
        delta(zz_future="x"),
        delta(),
        finish(),
        {"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 1}},
        {"choices": None},
        {"usage": {"prompt_tokens": 1}},
        {"choices": [{"index": 0, "delta": None}]},
        {"error": {"message": '"delta":{"content":"x"}'}},
        {},
    ],
)
def test_roles_empty_strings_usage_finish_and_errors_are_not_content(document: object) -> None:
    tap = Tap(Wire.CHAT)
    assert tap.feed(event(document)) == 0
    assert tap.events == 1


@pytest.mark.parametrize("comment", [b":\n\n", b": keep-alive\n\n", b"\n\n", b": a\n: b\n\n"])
def test_comments_and_blank_lines_are_no_events(comment: bytes) -> None:
    tap = tapped(Wire.CHAT, comment)
    assert (tap.events, tap.content_events, tap.at_boundary) == (0, 0, True)


def test_a_read_of_three_events_counts_its_content_events() -> None:
    read = event(delta(role="assistant")) + event(delta(content="a")) + event(delta(content="b"))
    assert Tap(Wire.CHAT).feed(read) == 2


def test_an_event_counts_when_its_blank_line_has_come() -> None:
    tap = Tap(Wire.CHAT)
    whole = event(delta(content="a"))
    assert [tap.feed(whole[:-1]), tap.at_boundary, tap.feed(whole[-1:])] == [0, False, 1]
    assert tap.at_boundary


@pytest.mark.parametrize(
    ("document", "content"),
    [
        ({"type": "response.created", "response": {"id": "r", "tools": []}}, 0),
        ({"type": "response.output_item.added", "item": {"type": "message", "content": []}}, 0),
        ({"type": "response.output_item.added", "item": {"type": "function_call"}}, 1),
        ({"type": "response.content_part.added", "part": {"text": ""}}, 0),
        ({"type": "response.output_text.delta", "delta": "x"}, 1),
        ({"type": "response.output_text.delta", "delta": ""}, 0),
        ({"type": "response.reasoning_text.delta", "delta": "x"}, 1),
        ({"type": "response.reasoning_summary_text.delta", "delta": "x"}, 1),
        ({"type": "response.function_call_arguments.delta", "delta": "{"}, 1),
        ({"type": "response.refusal.delta", "delta": "no"}, 1),
        ({"type": "keepalive", "sequence_number": 3}, 0),
    ],
)
def test_responses_events_are_content_by_their_type(document: object, content: int) -> None:
    assert Tap(Wire.RESPONSES).feed(event(document)) == content


def test_a_responses_text_whose_deltas_never_came_counts_once() -> None:
    done = event({"type": "response.output_text.done", "text": "Aw"})
    assert Tap(Wire.RESPONSES).feed(done) == 1
    seen = tapped(Wire.RESPONSES, event({"type": "response.output_text.delta", "delta": "Aw"}))
    assert seen.feed(done) == 0


@pytest.mark.parametrize(
    ("document", "content"),
    [
        ({"type": "message_start", "message": {"content": [], "usage": {"input_tokens": 1}}}, 0),
        ({"type": "content_block_start", "content_block": {"type": "text", "text": ""}}, 0),
        ({"type": "content_block_start", "content_block": {"type": "tool_use", "name": "f"}}, 1),
        ({"type": "content_block_delta", "delta": {"type": "text_delta", "text": "I"}}, 1),
        ({"type": "content_block_delta", "delta": {"type": "thinking_delta", "thinking": "h"}}, 1),
        ({"type": "content_block_delta", "delta": {"partial_json": "{"}}, 1),
        ({"type": "content_block_delta", "delta": {"partial_json": ""}}, 0),
        ({"type": "content_block_delta", "delta": {"signature": "x"}}, 0),
        ({"type": "ping"}, 0),
    ],
)
def test_messages_events_are_content_by_their_type(document: object, content: int) -> None:
    assert Tap(Wire.MESSAGES).feed(event(document)) == content


def test_the_event_line_stands_in_for_a_missing_type() -> None:
    assert Tap(Wire.RESPONSES).feed(event({"delta": "x"}, "response.output_text.delta")) == 1
    assert Tap(Wire.MESSAGES).feed(event({"delta": {"text": "x"}}, "content_block_delta")) == 1


def test_ollama_records_are_content_by_what_they_say() -> None:
    tap = Tap(Wire.OLLAMA_NDJSON)
    records = [
        {"message": {"role": "assistant", "content": ""}, "done": False},
        {"message": {"content": "", "thinking": "hm"}, "done": False},
        {"message": {"content": "", "tool_calls": [{}]}, "done": False},
        {"response": "a", "done": False},
        {"response": "", "done": True, "eval_count": 3},
    ]
    found = [tap.feed(json.dumps(record).encode() + b"\n") for record in records]
    assert found == [0, 1, 1, 1, 0]
    assert tap.complete


def test_native_completion_events_are_content_by_what_they_say() -> None:
    tap = Tap(Wire.NATIVE)
    assert tap.feed(event({"index": 0, "content": "a", "stop": False})) == 1
    last = {
        "content": "",
        "stop": True,
        "tokens_evaluated": 5,
        "tokens_predicted": 1,
        "timings": {
            "prompt_n": 2,
            "prompt_ms": 1.5,
            "predicted_n": 1,
            "predicted_ms": 2,
            "cache_n": 3,
        },
    }
    assert tap.feed(event(last)) == 0
    assert (tap.complete, tap.usage) == (True, Usage(5, 3, 1))


def test_a_usual_event_costs_a_few_microseconds_of_processor_time() -> None:
    tap = Tap(Wire.CHAT)
    usual = event(delta(content="Hello") | {"id": "chatcmpl-9scPlszgR5l5SIBWTf", "model": "m" * 40})
    start = time.process_time()
    for _ in range(10_000):
        tap.feed(usual)
    assert time.process_time() - start < 0.2 * SLACK  # 20 us each; measured 0.8
