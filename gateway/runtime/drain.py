"""Coming to an end: what is in flight may finish, within a time; then it is told why it ends here.

Law of this file: nobody is cut off without the last words of their protocol, unless they do not read them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from typing import Final

from gateway.core.errors import GatewayError
from gateway.runtime.disconnect import ClientPresent

PARTING_S: Final = 5.0  # for the last words of streams that `drain_s` has cut


class Drain:
    """The requests that are in the line, seen from the end."""

    def __init__(
        self, active: Callable[[], Collection[ClientPresent]], idle: asyncio.Event
    ) -> None:
        """`idle` is set while none is `active`."""
        self._active = active
        self._idle = idle

    async def within(self, seconds: float) -> None:
        """Wait until all have ended; stop those that have not by then."""
        if not await self._until_idle(seconds):
            self.cut()
            await self._until_idle(PARTING_S)

    def cut(self) -> None:
        """Streams end with their family's error event; who waits is refused."""
        for present in list(self._active()):
            present.stop(GatewayError("draining", "The gateway is shutting down.", retry_after_s=2))

    async def _until_idle(self, seconds: float) -> bool:
        try:
            async with asyncio.timeout(seconds):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True
