"""A request body as a small frozen value, and the two edits that are ever made to one.

Law of this file: a body is read, never rebuilt. What reaches the engine is the client's bytes, in which at most
the `model` value is replaced and a top-level `id_slot` is cut out. Fields of an odd type are the engine's to judge;
only what is no JSON object, or says `model` or `stream` twice, is refused here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Final

import msgspec

from gateway.core.json_scan import UNREADABLE, Span, Value, equals, members, text_of, top_level
from gateway.core.prompt import Piece, permits_of_prompt, pieces_of, prompt_bytes_of
from gateway.core.wire import Wire

MOST_PERMITS: Final = 1_000_000_000  # a larger `n` says the same: more than anybody has
LONGEST_CACHE_KEY: Final = 1024  # characters; a longer one names no conversation

_CHAT: Final = Wire.CHAT
_SEVERAL: Final = (Wire.CHAT, Wire.COMPLETIONS, Wire.NATIVE)  # answers, if the request says so
_LIMITS: Final = ("max_completion_tokens", "max_output_tokens", "max_tokens", "n_predict")


class ParsedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What the gateway needs to know of a request. Sizes are bytes, limits are tokens.

    `model` is None when there is none (`model_present` False; null counts as none) and when it is no usable
    name: not a string, or empty (`model_present` True: the caller answers model_not_found).
    `pieces`: the prompt as raw JSON in the order in which a chat template lays it out, as views of the body.
    `prompt_bytes`: their size, inline images and files counted as IMAGE_BYTES each.
    """

    model: str | None
    model_present: bool
    model_span: Span | None  # where the value stands in the body, for `replace_model`
    stream: bool
    permits: int
    max_tokens: int | None
    prompt_cache_key: str | None
    pieces: tuple[Piece, ...]
    prompt_bytes: int
    pins_slot: bool = False  # it has a top-level `id_slot`


def parse(body: bytes, wire: Wire) -> ParsedRequest:
    """Reads a request body.

    Raises GatewayError("invalid_json") if it is no JSON object, is nested too deeply to check, or holds a
    top-level `model` or `stream` twice, however spelled.
    """
    fields, few, span = top_level(body, once=("model", "stream"))
    model = text_of(fields["model"]) or None if span else None
    pieces = pieces_of(fields, wire, few=few)
    return ParsedRequest(
        model=model,
        model_present=span is not None
        and (model is not None or not equals(fields["model"], b"null")),
        model_span=span,
        stream=_stream(fields, wire),
        permits=_permits(fields, wire, few=few),
        max_tokens=_max_tokens(fields),
        prompt_cache_key=_cache_key(fields),
        pieces=pieces,
        prompt_bytes=prompt_bytes_of(pieces),
        pins_slot="id_slot" in fields,
    )


def replace_model(body: bytes, new_model: str, span: Span | None = None) -> bytes:
    """The body with another value for its top-level `model`; every other byte stays.

    `span`: ParsedRequest.model_span of this very body, if at hand. A body without a model comes back as it is.
    """
    if span is None:
        _, _, span = top_level(body, once=("model",))
    if span is None:
        return body
    return b"".join((body[: span[0]], json.dumps(new_model).encode(), body[span[1] :]))


def drop_top_level(body: bytes, name: str) -> bytes:
    """The body without the top-level members of this name, each with exactly one comma."""
    found = members(body)
    kept = [position for position, member in enumerate(found) if member.name != name]
    if len(kept) == len(found):
        return body
    if not kept:
        return body[: found[0].start] + body[found[-1].end :]
    last = kept[-1]
    cuts = [(found[at].start, found[at + 1].start) for at in range(last) if at not in kept]
    cuts.append((found[last].end, found[-1].end))  # those at the end take the comma before them
    edges = [0, *(edge for cut in cuts for edge in cut), len(body)]
    return b"".join(body[start:end] for start, end in zip(edges[::2], edges[1::2], strict=True))


def _stream(fields: Mapping[str, Value], wire: Wire) -> bool:
    """JSON true only; Ollama's native paths stream unless told not to."""
    value = fields.get("stream")
    if value is None:
        return wire is Wire.OLLAMA_NDJSON
    written = bytes(value) if len(value) <= 4 else b""
    return written == b"true" or (written == b"null" and wire is Wire.OLLAMA_NDJSON)


def _permits(fields: Mapping[str, Value], wire: Wire, *, few: bool) -> int:
    if wire not in _SEVERAL:
        return 1
    prompts = 1 if wire is _CHAT else permits_of_prompt(fields.get("prompt"), few=few)
    number = fields.get("n")
    if number is not None:
        prompts *= max(_integer(number) or 1, 1)
    return min(prompts, MOST_PERMITS)


def _max_tokens(fields: Mapping[str, Value]) -> int | None:
    """The first limit that says something; a negative one means none."""
    for name in _LIMITS:
        value = fields.get(name)
        limit = _integer(value) if value is not None else None
        if limit is not None:
            return limit if limit >= 0 else None
    options = fields.get("options")
    limit = _integer(_num_predict(options)) if options is not None else None
    return limit if limit is not None and limit >= 0 else None


def _cache_key(fields: Mapping[str, Value]) -> str | None:
    value = fields.get("prompt_cache_key")
    if value is None or len(value) > LONGEST_CACHE_KEY:
        return None
    return text_of(value) or None


def _integer(value: Value | None) -> int | None:
    """A JSON integer, at most MOST_PERMITS in size; None for anything else."""
    if value is None or len(value) > 64:
        return None
    digits = bytes(value)
    if not digits.removeprefix(b"-").isdigit():
        return None
    number = int(digits)
    if -MOST_PERMITS <= number <= MOST_PERMITS:
        return number
    return MOST_PERMITS if number > 0 else -MOST_PERMITS


class _Options(msgspec.Struct):
    num_predict: msgspec.Raw = msgspec.Raw()


_options = msgspec.json.Decoder(_Options).decode


def _num_predict(options: Value) -> Value | None:
    """Ollama's limit; None if the options have none or are no object."""
    try:
        return _options(options).num_predict or None
    except UNREADABLE:
        return None
