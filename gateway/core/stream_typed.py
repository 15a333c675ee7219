"""What one stream event means on the wires whose events have a type: Responses and Messages.

The law of `stream_wires` holds here too. The type is read from the JSON; the `event:` line stands in for a
missing one. Shapes: engines.md 1.11 and 3.10, and the public API references of the wires.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

from gateway.core.stream_blocks import Cut
from gateway.core.stream_wires import Reader
from gateway.core.wire import Wire

_ENDS = frozenset(
    ("response.completed", "response.incomplete", "response.failed", "response.cancelled")
)
_TYPE = re.compile(rb'"type"\s*:\s*"([a-z_.]+)"')
_TOOL_CALL = re.compile(r"_(call|use)$")  # function_call, mcp_call, tool_use, server_tool_use…


class _Response(msgspec.Struct, gc=False):
    usage: Any = None


class _ResponseEvent(msgspec.Struct, gc=False):
    type: Any = None
    delta: Any = None
    item: msgspec.Raw = msgspec.Raw()
    response: msgspec.Raw = msgspec.Raw()
    text: Any = None
    arguments: Any = None
    error: Any = None
    timings: Any = None


class _Item(msgspec.Struct, gc=False):
    type: Any = None


class ResponsesReader(Reader):
    """/v1/responses. Ends with one of four `response.*` events; `[DONE]` means nothing here."""

    __slots__ = ("_begun",)
    wire = Wire.RESPONSES
    _decode = msgspec.json.Decoder(_ResponseEvent).decode

    def __init__(self) -> None:
        super().__init__()
        self._begun = False  # content was seen

    def read(self, payload: bytes, name: bytes, /) -> bool:
        event = self._decode(payload)
        kind = event.type if isinstance(event.type, str) else name.decode("utf-8", "replace")
        if event.error or kind == "error":
            self.error = True
        if event.timings:
            self._timings = event.timings
        if kind in _ENDS:
            self._end(kind, event.response)
        content = self._is_content(kind, event)
        self._begun = self._begun or content
        return content

    def skim(self, cut: Cut, name: bytes, /) -> bool:
        self._skim_figures(cut)
        kind = name.decode("utf-8", "replace") or _type_in(cut)
        if kind in _ENDS:
            self._end(kind, msgspec.Raw())
        return kind.endswith(".delta")

    def _end(self, kind: str, response: msgspec.Raw) -> None:
        self.finished = True
        self.error = self.error or kind == "response.failed"
        if response:
            self._usage = msgspec.json.decode(response, type=_Response).usage

    def _is_content(self, kind: str, event: _ResponseEvent) -> bool:
        """1. a delta with something in it; 2. a tool call that begins; 3. a whole text whose deltas never came."""
        if kind.endswith(".delta"):
            return bool(event.delta)
        if kind == "response.output_item.added" and event.item:
            return bool(_TOOL_CALL.search(_text(msgspec.json.decode(event.item, type=_Item).type)))
        return not self._begun and kind.endswith(".done") and bool(event.text or event.arguments)


class _MessageDelta(msgspec.Struct, gc=False):
    text: Any = None
    thinking: Any = None
    partial_json: Any = None


class _Message(msgspec.Struct, gc=False):
    usage: Any = None


class _Block(msgspec.Struct, gc=False):
    type: Any = None
    text: Any = None
    thinking: Any = None


class _MessageEvent(msgspec.Struct, gc=False):
    type: Any = None
    delta: _MessageDelta | None = None
    content_block: _Block | None = None
    message: _Message | None = None
    usage: Any = None
    error: Any = None
    timings: Any = None


class MessagesReader(Reader):
    """/v1/messages. Ends with `message_stop`; usage comes in two parts of which the later wins."""

    __slots__ = ()
    wire = Wire.MESSAGES
    _decode = msgspec.json.Decoder(_MessageEvent).decode

    def read(self, payload: bytes, name: bytes, /) -> bool:
        event = self._decode(payload)
        kind = event.type if isinstance(event.type, str) else name.decode("utf-8", "replace")
        if kind == "content_block_delta":
            delta = event.delta
            return delta is not None and bool(delta.text or delta.thinking or delta.partial_json)
        self._note(kind, event)
        block = event.content_block
        if kind != "content_block_start" or block is None:
            return False
        return bool(block.text or block.thinking or _TOOL_CALL.search(_text(block.type)))

    def skim(self, cut: Cut, name: bytes, /) -> bool:
        return (name.decode("utf-8", "replace") or _type_in(cut)).startswith("content_block_")

    def _note(self, kind: str, event: _MessageEvent) -> None:
        if event.error or kind == "error":
            self.error = True
        if kind == "message_stop":
            self.finished = True
        for part in (event.message.usage if event.message else None, event.usage):
            if isinstance(part, dict):
                known = {key: value for key, value in part.items() if value is not None}
                self._usage = (self._usage or {}) | known
        if event.timings:
            self._timings = event.timings


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""


def _type_in(cut: Cut) -> str:
    """The type of an event without a name line: first key of llama-server's, last key of vLLM's."""
    found = _TYPE.search(cut.head[:256]) or next(
        iter(_TYPE.finditer(cut.tail[-256:])), _TYPE.search(cut.head)
    )
    return found.group(1).decode() if found else ""
