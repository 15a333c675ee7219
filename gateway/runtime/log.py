"""Log lines: one for each request, and one for what happens to backends and the configuration.

Lines are written by a thread of their own, so that a slow or full disk never holds the event loop; when it
cannot keep up, lines are dropped and counted rather than kept. They are formatted where they arise: to wake the
thread for each one costs the loop more than the line does, for then both want the interpreter at once. JSON lines
for machines, a console form for people.
"""

from __future__ import annotations

import logging
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from time import time_ns
from typing import TextIO

import msgspec

LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40}
MAX_PENDING = 10_000  # lines
GATHER_S = 0.05  # lines that come within it leave in one write


class RequestLine(msgspec.Struct, omit_defaults=True, gc=False, tag_field="event", tag="request"):
    """The line of one request, in the order of its fields; what is None is left out. No prompt, no key, no query.

    A struct, because one is written for each request: a dict took four times as long.
    """

    request_id: str
    key: str
    client: str | None = None
    method: str = ""
    path: str = ""
    model: str = ""
    backend: str | None = None
    outcome: str | None = None
    status: int | None = None
    queue_ms: float | None = None
    ttft_ms: float | None = None
    ms: float | None = None
    affinity: str | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    generated_tokens: int | None = None
    error: str | None = None


class LineLog:
    """Owner of the log stream. `log` may be called on the loop; `close` flushes."""

    def __init__(
        self, level: str = "info", form: str = "auto", stream: TextIO | None = None
    ) -> None:
        self._stream = stream or sys.stderr
        self.apply(level, form)
        self._encode = msgspec.json.Encoder().encode
        self._lines: deque[str] = deque()
        self._second = 0  # since 1970, and how the lines of it begin
        self._stamp = ""
        self._some = threading.Event()
        self._closing = threading.Event()
        self.dropped = 0
        self._thread = threading.Thread(target=self._run, name="log", daemon=True)
        self._thread.start()

    def apply(self, level: str, form: str) -> None:
        """From the next line on."""
        self._least = LEVELS[level]
        console = form == "console" or (form == "auto" and self._stream.isatty())
        self._write_line = self._console if console else self._json

    def request(self, line: RequestLine) -> None:
        """The line of one request."""
        self.log("info", line)

    def event(self, level: str, event: str, **fields: object) -> None:
        """Something happened that is no request."""
        self.log(level, {"event": event, **fields})

    def log(self, level: str, fields: Mapping[str, object] | RequestLine) -> None:
        if LEVELS[level] < self._least:
            return
        if len(self._lines) >= MAX_PENDING:
            self.dropped += 1
            return
        self._lines.append(self._write_line(level, fields))
        if not self._some.is_set():
            self._some.set()

    def take_over(self, name: str) -> Callable[[], None]:
        """Send what this stdlib logger and those below it say to the same stream. Returns how to stop."""
        handler, logger = _Lines(self), logging.getLogger(name)
        before = logger.propagate
        logger.addHandler(handler)
        logger.propagate = False

        def stop() -> None:
            logger.removeHandler(handler)
            logger.propagate = before

        return stop

    def close(self) -> None:
        """Write what is left; waits for at most two seconds."""
        self._closing.set()
        self._some.set()
        self._thread.join(timeout=2)

    def _run(self) -> None:
        while not self._closing.is_set():
            self._some.wait()
            self._closing.wait(GATHER_S)
            self._some.clear()
            self._write_out()

    def _write_out(self) -> None:
        lines = [self._lines.popleft() for _ in range(len(self._lines))]
        try:
            self._stream.write("".join(lines))
            self._stream.flush()
        except (OSError, ValueError):  # a full disk, a closed pipe: the gateway goes on
            self.dropped += len(lines)

    def _json(self, level: str, fields: Mapping[str, object] | RequestLine) -> str:
        second, rest = divmod(time_ns(), 1_000_000_000)
        if second != self._second:
            self._second = second
            self._stamp = f"{datetime.fromtimestamp(second, UTC):%Y-%m-%dT%H:%M:%S}"
        head = f'{{"time":"{self._stamp}.{rest // 1_000_000:03}+00:00","level":"{level}",'
        if not isinstance(fields, RequestLine):
            fields = {name: value for name, value in fields.items() if value is not None}
        return f"{head}{self._encode(fields)[1:].decode()}\n"

    def _console(self, level: str, fields: Mapping[str, object] | RequestLine) -> str:
        if isinstance(fields, RequestLine):
            fields = {"event": "request", **msgspec.structs.asdict(fields)}
        stamp = datetime.now().astimezone().strftime("%H:%M:%S.%f")[:-3]
        shown = " ".join(
            f"{name}={_plain(value)}"
            for name, value in fields.items()
            if value is not None and name != "event"
        )
        return f"{stamp} {level:<7} {fields.get('event', ''):<10} {shown}\n"


class _Lines(logging.Handler):
    """A record of the stdlib's logging as one line; a traceback is one field of it."""

    def __init__(self, log: LineLog) -> None:
        super().__init__()
        self._log = log

    def emit(self, record: logging.LogRecord) -> None:
        level = record.levelname.lower()
        fields: dict[str, object] = {"message": record.getMessage()}
        if record.exc_info:
            fields["traceback"] = "".join(traceback.format_exception(*record.exc_info))
        self._log.event(level if level in LEVELS else "error", record.name, **fields)


def _plain(value: object) -> str:
    """A value on one line: nothing a client sends can start a line of its own or steer a terminal."""
    text = str(value)
    if text.isprintable() and " " not in text:
        return text
    return repr(text)
