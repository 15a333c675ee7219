"""What one stream event means, wire by wire.

Law of this file: an event is *content* only if it carries something the model made: text, reasoning, a refusal
or a tool call. Comments, roles, empty strings, usage, timings and finish marks are not. Shapes: engines.md 1.11,
2.8 and 3.10, and the public API references of the wires. Types of fields we only test for truth are `Any`, so that an engine's
odd value cannot make a whole event unreadable.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

from gateway.core.figures import (
    Figures,
    Timings,
    Usage,
    figures_of_ends,
    native_usage,
    ollama_usage,
    timings_of,
    usage_of,
    usage_of_timings,
)
from gateway.core.stream_blocks import Cut
from gateway.core.wire import Wire

MOST_CHOICES = 1024  # indexes remembered per stream; a stream with more never counts as unfinished


class Reader:
    """Reads the payloads of one stream and remembers what was seen. Owned by its Tap.

    By itself it reads nothing: for answers that are no streams of events.
    """

    __slots__ = ("_figures", "_timings", "_usage", "error", "finished", "plain")
    wire = Wire.JSON

    def __init__(self) -> None:
        self.plain = False  # the last event was content of the first choice, and nothing else
        self.error = False
        self.finished = False
        self._usage: Any = None
        self._timings: Any = None
        self._figures: Figures | None = None  # from a block too long to decode

    def read(self, _payload: bytes, _name: bytes, /) -> bool:
        """One event's data and event name; True: it is content. Raises if it is not this wire's JSON."""
        return False

    def skim(self, _cut: Cut, _name: bytes, /) -> bool:
        """The same for an event of which only the ends are known. Never raises."""
        return False

    def done(self) -> None:
        """A `[DONE]` came. Only the wires that define it let it finish the stream."""

    @property
    def terminal(self) -> bool:
        """The wire's own end was seen."""
        return self.finished

    @property
    def usage(self) -> Usage | None:
        found = usage_of(self._usage, self.wire) or (self._figures and self._figures.usage)
        return found or usage_of_timings(self.timings)

    @property
    def timings(self) -> Timings | None:
        return timings_of(self._timings) or (self._figures.timings if self._figures else None)

    def _skim_figures(self, cut: Cut) -> None:
        self._figures = figures_of_ends(cut.head, cut.tail, self.wire)


class _Delta(msgspec.Struct, gc=False):
    content: Any = None
    reasoning_content: Any = None
    reasoning: Any = None
    tool_calls: Any = None
    function_call: Any = None
    refusal: Any = None
    thinking: Any = None
    reasoning_items: Any = None
    reasoning_details: Any = None
    audio: Any = None


class _Choice(msgspec.Struct, gc=False):
    index: Any = 0
    delta: _Delta | None = None
    text: Any = None
    finish_reason: Any = None


class _Chunk(msgspec.Struct, gc=False):
    choices: list[_Choice] | None = None
    usage: Any = None
    timings: Any = None
    error: Any = None


class OpenAIReader(Reader):
    """chat.completions and completions. The stream ends when each choice seen has its finish_reason."""

    __slots__ = ("_done", "_ended", "_others")
    wire = Wire.CHAT
    _decode = msgspec.json.Decoder(_Chunk).decode

    def __init__(self) -> None:
        super().__init__()
        self._done = False
        self._others: set[int] = set()  # indexes seen beside 0
        self._ended: set[int] = set()  # indexes with a finish_reason

    def read(self, payload: bytes, _name: bytes, /) -> bool:
        chunk = self._decode(payload)
        content = False
        plain = True
        for choice in chunk.choices or ():
            delta = choice.delta
            if choice.text or (delta is not None and (delta.content or _has_more(delta))):
                content = True
            if choice.finish_reason or choice.index:
                self._mark(choice)
                plain = False
        if chunk.usage:
            self._usage = chunk.usage
            plain = False
        if chunk.timings:
            self._timings = chunk.timings
            plain = False
        if chunk.error or (chunk.choices is None and _is_flat_error(payload)):
            self.error = True
            plain = False
        self.plain = plain
        return content

    def skim(self, cut: Cut, _name: bytes, /) -> bool:
        self._skim_figures(cut)
        if _ERROR_FIRST.match(cut.head):
            self.error = True
            return False
        if _FINISH.search(cut.tail):
            self._ended.add(0)
        return True

    def done(self) -> None:
        self._done = True

    @property
    def terminal(self) -> bool:
        return self._done or (bool(self._ended) and self._others <= self._ended)

    def _mark(self, choice: _Choice) -> None:
        index = choice.index if isinstance(choice.index, int) else 0
        if index and len(self._others) < MOST_CHOICES:
            self._others.add(index)
        if choice.finish_reason and len(self._ended) <= MOST_CHOICES:
            self._ended.add(index)


def _has_more(delta: _Delta) -> bool:
    return bool(
        delta.reasoning_content
        or delta.reasoning
        or delta.tool_calls
        or delta.function_call
        or delta.refusal
        or delta.thinking
        or delta.reasoning_items
        or delta.reasoning_details
        or delta.audio
    )


class _Flat(msgspec.Struct):
    object: Any = None


def _is_flat_error(payload: bytes) -> bool:
    """SGLang's error object stands alone, without an `error` key around it (engines.md 4)."""
    return bool(msgspec.json.decode(payload, type=_Flat).object == "error")


class _Native(msgspec.Struct, gc=False):
    content: Any = None
    stop: Any = None
    error: Any = None
    timings: Any = None
    tokens_evaluated: Any = None
    tokens_predicted: Any = None


class NativeReader(Reader):
    """llama-server's /completion and /infill: `content` piece by piece, the last with `stop: true`."""

    __slots__ = ("_last",)
    wire = Wire.NATIVE
    _decode = msgspec.json.Decoder(_Native).decode

    def __init__(self) -> None:
        super().__init__()
        self._last: _Native | None = None

    def read(self, payload: bytes, _name: bytes, /) -> bool:
        chunk = self._decode(payload)
        if chunk.timings:
            self._timings = chunk.timings
        if chunk.error:
            self.error = True
        if chunk.stop is True:
            self.finished = True
            self._last = chunk
        return bool(chunk.content)

    def skim(self, cut: Cut, _name: bytes, /) -> bool:
        self._skim_figures(cut)
        self.finished = self.finished or bool(_STOP.search(cut.head) or _STOP.search(cut.tail))
        return True

    @property
    def usage(self) -> Usage | None:
        last = self._last
        found = last and native_usage(last.tokens_evaluated, last.tokens_predicted, self.timings)
        return found or super().usage


class _OllamaMessage(msgspec.Struct, gc=False):
    content: Any = None
    thinking: Any = None
    tool_calls: Any = None


class _OllamaRecord(msgspec.Struct, gc=False):
    message: _OllamaMessage | None = None
    response: Any = None
    thinking: Any = None
    done: Any = None
    error: Any = None
    prompt_eval_count: Any = None
    eval_count: Any = None


class OllamaReader(Reader):
    """Ollama's native NDJSON: a record a piece, the last with `done: true` and the counters."""

    __slots__ = ("_last",)
    wire = Wire.OLLAMA_NDJSON
    _decode = msgspec.json.Decoder(_OllamaRecord).decode

    def __init__(self) -> None:
        super().__init__()
        self._last: _OllamaRecord | None = None

    def read(self, payload: bytes, _name: bytes, /) -> bool:
        record = self._decode(payload)
        if record.error:
            self.error = True
        if record.done is True:
            self.finished = True
            self._last = record
        said = record.message
        if said is not None and (said.content or said.thinking or said.tool_calls):
            return True
        return bool(record.response or record.thinking)

    def skim(self, cut: Cut, _name: bytes, /) -> bool:
        self._skim_figures(cut)
        self.finished = self.finished or bool(_OLLAMA_DONE.search(cut.tail))
        return True

    @property
    def usage(self) -> Usage | None:
        last = self._last
        found = last and ollama_usage(last.prompt_eval_count, last.eval_count)
        return found or super().usage


# A quote inside a JSON string is escaped, so generated text cannot match these keys.
_ERROR_FIRST = re.compile(rb'[^{]*\{\s*"error"\s*:\s*[{"]')
_FINISH = re.compile(rb'"finish_reason"\s*:\s*"')
_STOP = re.compile(rb'"stop"\s*:\s*true')
_OLLAMA_DONE = re.compile(rb'"done"\s*:\s*true')
