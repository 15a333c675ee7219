"""What engines say about a finished request: how many tokens, from which cache, in what time.

Law of this file: a figure that is missing, of an odd type or negative is None, never a guess and never an
exception. An answer may be of any size; at most `WHOLE` bytes of it are decoded, of a larger one only its ends.
"""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec

from gateway.core.json_scan import UNREADABLE
from gateway.core.wire import Wire

WHOLE = 256 * 1024  # bytes: larger documents are looked at from their ends only
END = 8 * 1024  # bytes of each end


class Usage(msgspec.Struct, frozen=True):
    """Tokens of one request. `cached_tokens` are part of `prompt_tokens`; None: the engine does not say."""

    prompt_tokens: int
    cached_tokens: int | None
    generated_tokens: int


class Timings(msgspec.Struct, frozen=True):
    """llama-server's own clock: tokens and milliseconds of prefill and decode (engines.md 1.11).

    `prompt_n` counts only what was computed; `cache_n` (None in old builds) came from the cache.
    """

    prompt_n: int
    prompt_ms: float
    predicted_n: int
    predicted_ms: float
    cache_n: int | None


class Figures(msgspec.Struct, frozen=True):
    """What one answer said."""

    usage: Usage | None
    timings: Timings | None


NO_FIGURES = Figures(None, None)


class _Answer(msgspec.Struct):
    """The parts of a whole answer, of any wire, that hold figures."""

    usage: Any = None
    timings: Any = None
    tokens_evaluated: Any = None
    tokens_predicted: Any = None
    prompt_eval_count: Any = None
    eval_count: Any = None


def figures_of_json(body: bytes, wire: Wire) -> Figures:
    """The figures of a whole, not streamed answer. Never raises; an answer without any gives NO_FIGURES."""
    if len(body) > WHOLE:
        return figures_of_ends(body[:END], body[-END:], wire)
    try:
        answer = msgspec.json.decode(body, type=_Answer)
    except UNREADABLE:
        return NO_FIGURES
    timings = timings_of(answer.timings)
    usage = usage_of(answer.usage, wire)
    if usage is None:
        usage = ollama_usage(answer.prompt_eval_count, answer.eval_count)
    if usage is None:
        usage = native_usage(answer.tokens_evaluated, answer.tokens_predicted, timings)
    return Figures(usage or usage_of_timings(timings), timings)


def figures_of_ends(head: bytes, tail: bytes, wire: Wire) -> Figures:
    """The figures of a document too large to decode, as far as they stand within its ends."""
    timings = timings_of(_member(tail, "timings") or _member(head, "timings"))
    usage = usage_of(_member(tail, "usage") or _member(head, "usage"), wire)
    if usage is None:
        usage = ollama_usage(_member(tail, "prompt_eval_count"), _member(tail, "eval_count"))
    return Figures(usage or usage_of_timings(timings), timings)


def usage_of(fields: object, wire: Wire) -> Usage | None:
    """A `usage` object. Only Anthropic's `input_tokens` leaves out what the cache gave."""
    if not isinstance(fields, dict):
        return None
    generated = _count(fields.get("completion_tokens", fields.get("output_tokens"))) or 0
    prompt = _count(fields.get("prompt_tokens", fields.get("input_tokens")))
    if prompt is None:
        return None
    if wire is Wire.MESSAGES:
        cached = _count(fields.get("cache_read_input_tokens"))
        written = _count(fields.get("cache_creation_input_tokens")) or 0
        return Usage(prompt + (cached or 0) + written, cached, generated)
    details = fields.get("prompt_tokens_details", fields.get("input_tokens_details"))
    cached = _count(details.get("cached_tokens")) if isinstance(details, dict) else None
    return Usage(prompt, cached, generated)


def ollama_usage(prompt: object, generated: object) -> Usage | None:
    """Ollama's native counters. A count of 0 is left out on the wire; the cache is never told."""
    prompt_n, generated_n = _count(prompt), _count(generated)
    if prompt_n is None and generated_n is None:
        return None
    return Usage(prompt_n or 0, None, generated_n or 0)


def native_usage(evaluated: object, predicted: object, timings: Timings | None) -> Usage | None:
    """llama-server's /completion counters; what the cache gave stands in its timings."""
    prompt = _count(evaluated)
    if prompt is None:
        return None
    return Usage(prompt, timings.cache_n if timings else None, _count(predicted) or 0)


def usage_of_timings(timings: Timings | None) -> Usage | None:
    """llama-server streams without `include_usage` still carry timings on the finish event."""
    if timings is None or timings.cache_n is None:
        return None
    return Usage(timings.cache_n + timings.prompt_n, timings.cache_n, timings.predicted_n)


def timings_of(fields: object) -> Timings | None:
    """A `timings` object."""
    if not isinstance(fields, dict):
        return None
    prompt_n, predicted_n = _count(fields.get("prompt_n")), _count(fields.get("predicted_n"))
    prompt_ms, predicted_ms = _span(fields.get("prompt_ms")), _span(fields.get("predicted_ms"))
    if prompt_n is None or predicted_n is None or prompt_ms is None or predicted_ms is None:
        return None
    return Timings(prompt_n, prompt_ms, predicted_n, predicted_ms, _count(fields.get("cache_n")))


def _count(value: object) -> int | None:
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 53:
        return value
    return None


def _span(value: object) -> float | None:
    if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < 1e15:
        return float(value)
    return None


def _member(end: bytes, name: str) -> object:
    """The last value named so in one end. A quote inside a string is escaped, so text cannot pose as a key."""
    found: object = None
    text = end.decode("utf-8", "replace")
    for match in re.finditer(rf'"{name}"\s*:\s*(?=[{{\d])', text):
        try:
            found = json.JSONDecoder().raw_decode(text, match.end())[0]
        except (ValueError, RecursionError):
            continue
    return found
