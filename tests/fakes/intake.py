"""From accepted connections to answered requests: which script answers what, one request after another.

Law of this file: a peer that leaves is noticed in the same turn of the loop, and its script is cancelled (unless deaf).
"""

from __future__ import annotations

import asyncio
import socket
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tests.fakes.connection import Connection, Request, Script
from tests.fakes.http_reader import FramingError, RequestReader

if TYPE_CHECKING:
    from tests.fakes.engine import FakeEngine


@dataclass(slots=True, eq=False)
class Rule:
    """Which requests a script is for, and how often."""

    script: Script
    path: str | None  # None: any POST; "*": anything
    when: str  # whole | head | accept
    times: int | None  # None: always
    deaf: bool = False

    def fits(self, request: Request | None, when: str) -> bool:
        if self.when != when or self.times == 0:
            return False
        if request is None or self.path == "*":
            return True
        return request.method == "POST" if self.path is None else request.path == self.path


@dataclass(slots=True, eq=False)
class Line:
    """What is kept for one open connection."""

    reader: RequestReader | None = field(
        default_factory=RequestReader
    )  # None: a script took it over
    raw: bytearray = field(default_factory=bytearray)
    task: asyncio.Task[None] | None = None
    deaf: bool = False


class Intake:
    """Owns the engine's connections and the tasks that answer on them."""

    def __init__(self, engine: FakeEngine) -> None:
        self.engine = engine
        self.connections: list[Connection] = []
        self.received: list[Request] = []
        self.rules: list[Rule] = []
        self.bad_requests: list[FramingError] = []  # what was not well-framed HTTP
        self.errors: list[BaseException] = []  # what scripts raised
        self._lines: dict[Connection, Line] = {}

    def accept(self) -> Connection:
        return Connection(self, len(self.connections) + 1)

    async def end_tasks(self) -> None:
        """Cancels every answer in progress and waits for it."""
        tasks = [line.task for line in self._lines.values() if line.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # What connections tell

    def on_open(self, connection: Connection) -> None:
        self.connections.append(connection)
        line = self._lines[connection] = Line()
        if self.engine.receive_buffer is not None:
            connection.socket.setsockopt(
                socket.SOL_SOCKET, socket.SO_RCVBUF, self.engine.receive_buffer
            )
        if (rule := self._rule(None, "accept")) is not None:
            line.reader = None
            self._start(connection, line, None, rule)
        else:
            self._close_when_idle(connection)

    def on_data(self, connection: Connection, data: bytes) -> None:
        line = self._lines[connection]
        if line.reader is None:
            line.raw += data
            return
        line.reader.feed(data)
        self._advance(connection, line)

    def on_left(self, connection: Connection) -> None:
        line = self._lines.get(connection)
        if line is None or line.deaf:
            return
        if line.task is not None:
            line.task.cancel()
        elif connection.is_open:
            connection.fin()

    def on_lost(self, connection: Connection) -> None:
        line = self._lines.pop(connection, None)
        if line is not None and line.task is not None and not line.deaf:
            line.task.cancel()

    def raw(self, connection: Connection) -> bytearray:
        """The unparsed bytes of a connection that a script took over."""
        line = self._lines.get(connection)
        return line.raw if line is not None else bytearray()

    # From bytes to answers

    def _advance(self, connection: Connection, line: Line) -> None:
        try:
            self._take(connection, line)
        except FramingError as error:
            self.bad_requests.append(error)
            line.reader = None
            connection.write_now(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")
            connection.fin()

    def _take(self, connection: Connection, line: Line) -> None:
        assert line.reader is not None
        request = connection.request
        if request is None:
            if self._refuses_reuse(connection) or (head := line.reader.take_head()) is None:
                return
            request = self._begin(connection, line, Request(connection, head, time.monotonic()))
        if request.whole_at is not None:
            return
        piece, whole = line.reader.take_body()
        request.body += piece
        if not whole:
            return
        request.whole_at = time.monotonic()
        if request.ended_at is not None:
            self._next(connection, line)
        elif line.task is None:
            self._start(connection, line, request, self._rule(request, "whole"))

    def _begin(self, connection: Connection, line: Line, request: Request) -> Request:
        connection.request = request
        connection.requests.append(request)
        self.received.append(request)
        if (rule := self._rule(request, "head")) is not None:
            self._start(connection, line, request, rule)
        elif (request.head.get("expect") or "").lower() == "100-continue":
            connection.write_now(b"HTTP/1.1 100 Continue\r\n\r\n")
        return request

    def _refuses_reuse(self, connection: Connection) -> bool:
        how = self.engine.behaviour.reused
        if how == "serve" or not connection.requests:
            return False
        (connection.rst if how == "rst" else connection.fin)()
        return True

    def _rule(self, request: Request | None, when: str) -> Rule | None:
        rule = next((rule for rule in self.rules if rule.fits(request, when)), None)
        if rule is not None and rule.times is not None:
            rule.times -= 1
        return rule

    def _start(
        self, connection: Connection, line: Line, request: Request | None, rule: Rule | None
    ) -> None:
        line.deaf = rule is not None and rule.deaf
        line.task = asyncio.get_running_loop().create_task(
            self._run(connection, line, request, rule)
        )

    async def _run(
        self, connection: Connection, line: Line, request: Request | None, rule: Rule | None
    ) -> None:
        try:
            if request is None:
                assert rule is not None
                await rule.script(connection)
                connection.fin()
            else:
                await self.engine.answer(connection, request, rule)
                request.answered = True
        except asyncio.CancelledError:
            connection.fin()
        except Exception as error:  # noqa: BLE001 - FakeEngine.__aexit__ raises it in the test
            self.errors.append(error)
            connection.rst()
        line.task = None
        if request is not None:
            request.ended_at = time.monotonic()
            self._next(connection, line)

    def _next(self, connection: Connection, line: Line) -> None:
        """The connection is free for its next request, when the last one's body has been read."""
        assert connection.request is not None
        if connection.request.whole_at is None or not connection.is_open:
            return
        connection.request = None
        if connection.left.is_set():
            connection.fin()
        elif line.reader is not None:
            self._close_when_idle(connection)
            self._advance(connection, line)

    def _close_when_idle(self, connection: Connection) -> None:
        behaviour = self.engine.behaviour
        if behaviour.idle_close_s is None:
            return
        seen = len(connection.requests)

        def close() -> None:
            if len(connection.requests) == seen and connection.is_open:
                (connection.rst if behaviour.idle_close_by_rst else connection.fin)()

        asyncio.get_running_loop().call_later(behaviour.idle_close_s, close)
