"""What engines say about tokens, cache and time."""

from __future__ import annotations

import pytest

from gateway.core.body_tap import BodyTap
from gateway.core.figures import WHOLE, Figures, Timings, Usage, figures_of_json
from gateway.core.wire import Wire
from tests.unit.events import DONE, delta, event, tapped
from tests.unit.recorded import SAMPLES, body_of


def test_usage_and_timings_of_a_llama_server_stream() -> None:
    tap = tapped(Wire.CHAT, body_of("llama-server/chat_stream.http"))
    assert tap.usage == Usage(prompt_tokens=32, cached_tokens=31, generated_tokens=3)
    assert tap.timings == Timings(1, 16.439, 3, 22.174, 31)


def test_without_usage_the_timings_say_it() -> None:
    tap = tapped(Wire.CHAT, body_of("llama-server/chat_stream_nousage.http"))
    assert tap.usage == Usage(prompt_tokens=32, cached_tokens=31, generated_tokens=3)


def test_anthropic_usage_adds_what_came_from_the_cache() -> None:
    tap = tapped(Wire.MESSAGES, body_of("llama-server/messages_stream.http"))
    assert tap.usage == Usage(prompt_tokens=32, cached_tokens=31, generated_tokens=2)


def test_of_continuous_usage_the_last_counts() -> None:
    tap = tapped(Wire.CHAT, body_of("vllm/chat_stream_continuous_usage.http"))
    assert tap.usage == Usage(prompt_tokens=32, cached_tokens=0, generated_tokens=2)


def test_a_usage_event_that_comes_first_is_kept() -> None:
    usage = {"choices": [], "usage": {"prompt_tokens": 4, "completion_tokens": 2}}
    assert tapped(Wire.CHAT, event(usage), event(delta(content="a")), DONE).usage == Usage(
        4, None, 2
    )


@pytest.mark.parametrize(
    ("sample", "wire", "usage"),
    [
        ("llama-server/chat.http", Wire.CHAT, Usage(32, 26, 5)),
        ("llama-server/completions.http", Wire.COMPLETIONS, Usage(1, 0, 3)),
        ("llama-server/responses.http", Wire.RESPONSES, Usage(32, 26, 3)),
        ("llama-server/messages.http", Wire.MESSAGES, Usage(32, 31, 3)),
        ("vllm/chat_cached.http", Wire.CHAT, Usage(89, 0, 5)),
        ("vllm/messages.http", Wire.MESSAGES, Usage(32, 0, 3)),
        ("vllm/responses.http", Wire.RESPONSES, Usage(32, 0, 3)),
        ("ollama/v1_chat.constructed.json", Wire.CHAT, Usage(26, None, 2)),
        ("ollama/api_generate_preload.constructed.json", Wire.OLLAMA_NDJSON, None),
        ("llama-server/err_toolong.http", Wire.CHAT, None),
    ],
)
def test_usage_of_recorded_whole_answers(sample: str, wire: Wire, usage: Usage | None) -> None:
    assert figures_of_json(body_of(sample), wire).usage == usage


def test_usage_of_other_whole_answers() -> None:
    embedded = b'{"data":[],"usage":{"prompt_tokens":8,"total_tokens":8}}'
    assert figures_of_json(embedded, Wire.JSON).usage == Usage(8, None, 0)
    assert figures_of_json(
        b'{"embeddings":[],"prompt_eval_count":4}', Wire.OLLAMA_NDJSON
    ).usage == Usage(4, None, 0)
    native = b'{"content":"a","stop":true,"tokens_evaluated":3,"tokens_predicted":1}'
    assert figures_of_json(native, Wire.NATIVE).usage == Usage(3, None, 1)


@pytest.mark.parametrize("first", [True, False])
def test_usage_of_an_answer_of_many_mib_is_found_at_either_end(first: bool) -> None:
    usage = '"usage":{"prompt_tokens":8,"total_tokens":8}'
    data = '"data":[{"embedding":[' + "0.25," * (1 << 20) + "0.5]}]"
    body = "{" + ",".join([usage, data] if first else [data, usage]) + "}"
    assert figures_of_json(body.encode(), Wire.JSON).usage == Usage(8, None, 0)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"null",
        b"[]",
        b"<html>",
        b'{"usage":5}',
        b'{"usage":{"prompt_tokens":"5"}}',
        b'{"usage":{"prompt_tokens":-1}}',
        b'{"usage":{"prompt_tokens":true}}',
        b'{"usage":{"prompt_tokens":1e99}}',
        b'{"timings":{"prompt_n":1}}',
        b'{"timings":{"prompt_n":1,"prompt_ms":"x","predicted_n":1,"predicted_ms":1}}',
        b'{"a":' + b"[" * 5000,
        b'"usage":{' * WHOLE,
        b"\xff" * WHOLE * 2,
    ],
)
def test_odd_answers_have_no_figures_and_raise_nothing(body: bytes) -> None:
    assert figures_of_json(body, Wire.CHAT) == Figures(None, None)


def test_every_recorded_json_body_is_read_without_raising() -> None:
    bodies = [
        body_of(str(path.relative_to(SAMPLES)))
        for path in sorted(SAMPLES.glob("*/*"))
        if path.suffix in (".http", ".json")
    ]
    assert len(bodies) > 100
    assert sum(figures_of_json(body, Wire.CHAT).usage is not None for body in bodies) >= 10


@pytest.mark.parametrize("size", [1, 1000, 65536, 1 << 22])
@pytest.mark.parametrize("first", [True, False])
def test_an_answer_watched_read_by_read_says_what_the_whole_says(size: int, first: bool) -> None:
    usage = '"usage":{"prompt_tokens":8,"total_tokens":8}'
    data = '"data":[' + "0.25," * (size if size > 1000 else 10) + "0.5]"
    body = ("{" + ",".join([usage, data] if first else [data, usage]) + "}").encode()
    tap = BodyTap(Wire.JSON)
    for at in range(0, len(body), size):
        tap.feed(body[at : at + size])
        assert len(tap._kept) <= WHOLE
    assert tap.figures == figures_of_json(body, Wire.JSON) == Figures(Usage(8, None, 0), None)
