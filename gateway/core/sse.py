"""The tap on a stream: looks at the bytes on their way past and says what they were.

Law of this file: the tap never alters, holds back or delays a byte, and never raises. What it cannot understand
it counts as an event and otherwise ignores. Its answers do not depend on how the stream was split into reads.
"""

from __future__ import annotations

from gateway.core.figures import WHOLE, Timings, Usage
from gateway.core.json_scan import UNREADABLE, tolerable
from gateway.core.stream_alike import Alike
from gateway.core.stream_blocks import CR, Blocks, Cut
from gateway.core.stream_typed import MessagesReader, ResponsesReader
from gateway.core.stream_wires import NativeReader, OllamaReader, OpenAIReader, Reader
from gateway.core.wire import Wire

__all__ = ["Tap", "Timings", "Usage", "Wire"]

LF = 10  # as a number: `in` is then a plain memchr, six times faster than for a bytes operand


class Tap:
    """Watches one streamed answer. One owner: the relay of that answer.

    For Wire.JSON, whose answers are not streams of events, it stays quiet: no content, never terminal.
    """

    __slots__ = (
        "_alike",
        "_blocks",
        "_read",
        "_reader",
        "_records",
        "_usual",
        "content_events",
        "events",
    )

    def __init__(self, wire: Wire) -> None:
        self._records = wire is Wire.OLLAMA_NDJSON
        self._reader = _reader(wire)
        self._read = self._reader.read
        self._alike = Alike()
        self._blocks = Blocks(events=not self._records)
        self._usual: bytes | tuple[()] = () if self._records else b"data: {"  # () is never met
        self.events = 0  # whole events seen; a block without data (a comment) is none
        self.content_events = 0

    def feed(self, data: bytes) -> int:
        """Look at one read. Returns how many content events it completed."""
        if self._alike.knows(data) and self._blocks.fresh:
            self.events += 1
            self.content_events += 1
            return 1
        payload = data[6:-2]
        # Nearly every read is one whole `data: {…}` line and its blank line.
        if (
            data.startswith(self._usual)
            and data.endswith(b"\n\n")
            and LF not in payload
            and CR not in payload
            and self._blocks.fresh
            and len(data) <= WHOLE
        ):
            self.events += 1
            try:
                content: int = self._read(payload, b"")
            except UNREADABLE:
                content = self._second_look(payload, b"")
            if content and self._reader.plain:
                self._alike.learn(data)
        else:
            content = sum(map(self._block, self._blocks.feed(data)))
        self.content_events += content
        return content

    @property
    def usual(self) -> tuple[bytes, bytes] | None:
        """What stands before and after the text of an event with content, as the last ones were; see `stream_alike`.

        Who meets one more of these may pass it by the tap. None while no event is known, or one has come in part.
        """
        return self._alike.shape if self._blocks.fresh else None

    def finish(self) -> int:
        """The stream ended cleanly: what came without a last blank line is looked at too."""
        content = int(self._block(self._blocks.rest))
        self.content_events += content
        return content

    @property
    def at_boundary(self) -> bool:
        """The last event is whole: an event or a comment may be inserted here."""
        return self._blocks.at_boundary

    @property
    def saw_terminal(self) -> bool:
        """The wire's own end was seen. An error seen before it (`saw_error`) outweighs it."""
        return self._reader.terminal

    @property
    def saw_error(self) -> bool:
        """The engine reported a failure inside the stream."""
        return self._reader.error

    @property
    def complete(self) -> bool:
        """The answer is whole: it ended as its wire ends, and no error was among it."""
        return self._reader.terminal and not self._reader.error

    @property
    def usage(self) -> Usage | None:
        """The last usage the engine stated, or what its timings amount to."""
        return self._reader.usage

    @property
    def timings(self) -> Timings | None:
        """The last llama-server timings."""
        return self._reader.timings

    def _block(self, block: bytes | Cut) -> bool:
        if isinstance(block, Cut):
            if block.head.startswith(b":"):  # an endless comment
                return False
            self.events += 1
            return self._reader.skim(block, _name_of(block.head))
        if self._records:
            return bool(block.strip()) and self._event(block, b"")
        if block.startswith(b"data:") and LF not in block:
            return self._event(block[5:], b"")
        if block.startswith(b"event:"):
            end = block.find(LF)
            if block.startswith(b"data:", end + 1) and block.find(LF, end + 1) < 0:
                return self._event(block[end + 6 :], block[6:end].strip())
        return self._fields(block)

    def _fields(self, block: bytes) -> bool:
        """A block of several lines (or without data), by the event stream grammar."""
        data: list[bytes] = []
        name = b""
        for line in block.split(b"\n"):
            field, _, value = line.partition(b":")
            if field == b"data":
                data.append(value)
            elif field == b"event":
                name = value.strip()
            elif field == b"error":  # how old llama-server builds report one
                self._reader.error = True
        return bool(data) and self._event(b"\n".join(data), name)

    def _event(self, payload: bytes, name: bytes) -> bool:
        self.events += 1
        try:
            return self._read(payload, name)
        except UNREADABLE:
            return self._second_look(payload, name)

    def _second_look(self, payload: bytes, name: bytes) -> bool:
        """What is no strict JSON of this wire: `[DONE]`, a character cut in half, NaN. Else: go quiet."""
        if payload.strip() == b"[DONE]":
            self._reader.done()
            return False
        try:
            return self._read(tolerable(payload.decode("utf-8", "replace").encode()), name)
        except UNREADABLE:
            return False


def _reader(wire: Wire) -> Reader:
    if wire in (Wire.CHAT, Wire.COMPLETIONS):
        return OpenAIReader()
    if wire is Wire.RESPONSES:
        return ResponsesReader()
    if wire is Wire.MESSAGES:
        return MessagesReader()
    if wire is Wire.OLLAMA_NDJSON:
        return OllamaReader()
    return NativeReader() if wire is Wire.NATIVE else Reader()


def _name_of(head: bytes) -> bytes:
    """The `event:` line of a block whose data is too long to keep."""
    for line in head.split(b"\n")[:-1]:
        if line.startswith(b"event:"):
            return line[6:].strip()
    return b""
