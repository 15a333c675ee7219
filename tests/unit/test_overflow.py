"""The one answer that is changed: an engine's 400 for a prompt that is too long."""

from __future__ import annotations

import json

import pytest

from gateway.core.overflow import CODE, with_code
from tests.unit.recorded import body_of

OVERFLOWS = {
    "llama-server": {
        "code": 400,
        "message": "request (4031 tokens) exceeds the available context size (2048 tokens), try increasing it",
        "type": "exceed_context_size_error",
        "n_prompt_tokens": 4031,
        "n_ctx": 2048,
    },
    "vllm": {
        "message": "This model's maximum context length is 4096 tokens. However, your prompt contains at least "
        "4097 input tokens, which exceeds this limit even without any output tokens.",
        "type": "BadRequestError",
        "param": "input_tokens",
        "code": 400,
    },
    "older vllm": {
        "message": "This model's maximum context length is 4096 tokens. However, you requested 5000 tokens "
        "(4900 in the messages, 100 in the completion).",
        "type": "BadRequestError",
        "code": 400,
    },
    "sglang": {
        "message": "The input (5000 tokens) is longer than the model's context length (4096 tokens).",
        "type": "BadRequestError",
        "code": 400,
    },
    "ollama": {
        "message": "the input length exceeds the context length",
        "type": "invalid_request_error",
        "param": None,
        "code": None,
    },
}
OTHERS = {
    "too many output tokens": {
        "message": "max_tokens=99999 cannot be greater than max_model_len=4096. Please request fewer output tokens.",
        "type": "BadRequestError",
        "param": "max_tokens",
        "code": 400,
    },
    "a wrong field": {"message": "'messages' is required", "type": "invalid_request_error"},
    "context in other words": {"message": "unknown field context_length", "code": 400},
}


@pytest.mark.parametrize("engine", OVERFLOWS)
def test_an_engines_word_for_a_prompt_too_long_gets_the_code_and_keeps_the_rest(
    engine: str,
) -> None:
    told = OVERFLOWS[engine]
    document = json.loads(with_code(json.dumps({"error": told}).encode()))
    assert document == {"error": {**told, "code": CODE}}


@pytest.mark.parametrize("reason", OTHERS)
def test_any_other_400_stays_byte_for_byte(reason: str) -> None:
    body = json.dumps({"error": OTHERS[reason]}).encode()
    assert with_code(body) is body


def test_the_flat_form_gets_the_code_too() -> None:
    flat = {"object": "error", "message": "longer than the model's context length", "code": 400}
    assert json.loads(with_code(json.dumps(flat).encode()))["code"] == CODE


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"<html>maximum context length is exceeded by the prompt</html>",
        b'{"error":"the input length exceeds the context length"}',
        b"[" * 100_000,
        b'{"error":{"message":' + b"7" * 100 + b"}}",
        b'{"error":{"message":"prompt is too long","code":"context_length_exceeded"}}',
        b'{"error":{"message":"prompt is too long ' + b"x" * 70_000 + b'"}}',
    ],
    ids=["empty", "html", "ollama", "deep", "number", "has it", "huge"],
)
def test_what_has_no_place_for_a_code_or_has_it_stays(body: bytes) -> None:
    assert with_code(body) is body


RECORDED = (
    "llama-server/err_toolong.http",
    "llama-server/err_toolong_messages.http",
    "llama-server/err_toolong_stream.http",
    "vllm/err_toolong.http",
)


@pytest.mark.parametrize("sample", RECORDED)
def test_the_recorded_answers_of_engines_are_known(sample: str) -> None:
    told = json.loads(body_of(sample))["error"]
    assert json.loads(with_code(body_of(sample)))["error"] == {**told, "code": CODE}


@pytest.mark.parametrize("sample", ["vllm/err_maxtokens.http", "llama-server/err_nomessages.http"])
def test_recorded_400s_of_another_kind_stay(sample: str) -> None:
    body = body_of(sample)
    assert with_code(body) is body
