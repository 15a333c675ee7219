"""Something to read for a client whose engine is still silent: long prefills outlast the patience of SDKs.

Law of this file: nothing is added once a byte of the engine's body has passed, so never inside an event, and never
behind an `id:` line, after which a blank comment makes one SDK fail. Until then a stream may begin with a head and
comments of ours; the status is then given away, and a later refusal becomes the family's error event.
"""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Final, Self

from gateway.core.wire import Wire
from gateway.runtime.exchange import EVENT_STREAM, NDJSON, Exchange

EVERY_S: Final = 15.0  # between comments; the shortest idle limit met in proxies is 30 s
COMMENT: Final = b": keep-alive\n\n"


class EarlyHead:
    """`with EarlyHead(...)`: while the block runs, a silent stream is begun `after_s` after its request came.

    `after_s` 0: never. Owner of one timer. NDJSON has no comments, so there only the head goes out.
    """

    __slots__ = ("_every_s", "_exchange", "_timer", "_type")

    def __init__(
        self, exchange: Exchange, wire: Wire, after_s: float, *, every_s: float = EVERY_S
    ) -> None:
        self._exchange = exchange
        self._type = NDJSON if wire is Wire.OLLAMA_NDJSON else EVENT_STREAM
        self._every_s = every_s
        self._timer: asyncio.TimerHandle | None = None
        if after_s > 0 and wire is not Wire.JSON and exchange.can_put:
            due = exchange.received_at + after_s
            self._timer = asyncio.get_running_loop().call_at(due, self._on_time)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _on_time(self) -> None:
        exchange = self._exchange
        if exchange.answered or exchange.ended:
            return  # the engine speaks
        if not exchange.started:
            exchange.start_early(self._type)
        if exchange.streams == EVENT_STREAM:
            exchange.insert(COMMENT)
        self._timer = asyncio.get_running_loop().call_later(self._every_s, self._on_time)
