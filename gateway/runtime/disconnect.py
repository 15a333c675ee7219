"""The client that leaves. Its request's own task is cancelled, in whatever phase it is (law 3).

The edge calls back at the FIN or RST. A server without that extension is watched through a pending `receive()`.
"""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Any, Self

import msgspec
from starlette.types import Receive

EXTENSION = "slotgate.edge"


class ClientGone(Exception):  # noqa: N818  (an ending, not an error)
    """The client left before the answer was complete."""


class ClientPresent(msgspec.Struct, eq=False):
    """`with ClientPresent(...)`: runs its body while the client is there, and raises ClientGone when it left.

    `body_read` is called once the whole request body has been read, so that a pending `receive()` can only
    mean that the client left.
    """

    _receive: Receive
    _edge: Any  # of the scope's extensions; None behind another server
    _task: asyncio.Task[Any] | None = None
    _watch: asyncio.Task[None] | None = None
    _stopped: Exception | None = None
    gone: bool = False

    def __enter__(self) -> Self:
        if self._edge is None:
            self._task = asyncio.current_task()
        else:
            self._task = self._edge.task
            self._edge.on_gone(self._left)
        return self

    def body_read(self) -> None:
        """From now on a message from the server can only be the client's leaving."""
        if self._edge is None and self._watch is None:
            self._watch = asyncio.create_task(self._pending_receive())

    def __exit__(
        self,
        kind: type[BaseException] | None,
        _value: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        task, self._task = self._task, None
        if self._watch is not None:
            self._watch.cancel()
        if self.gone and task is not None:
            task.uncancel()
            if kind is asyncio.CancelledError:
                refused = self._stopped or getattr(self._edge, "refusal", None)
                raise refused or ClientGone from None

    def stop(self, error: Exception) -> None:
        """End the request for the gateway's own reason: `error` is raised in place of its wait."""
        if not self.gone:
            self._stopped = error
            self._left()

    def _left(self) -> None:
        self.gone = True
        if self._task is not None:
            self._task.cancel()

    async def _pending_receive(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._left()
