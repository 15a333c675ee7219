"""Why recent requests went where they went: the last thousand placements, with the terms of their cost.

No prompt and no secret is kept, and nothing of the request but its id, so the ring is small whatever clients send.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Final

import msgspec

from gateway.core.cost import Price

MOST: Final = 1_000


class Attempt(msgspec.Struct, frozen=True):
    """One backend that a request was given to, and what that was expected to cost."""

    backend: str
    affinity: str
    queued_s: float  # in line, until this attempt
    price: Price
    prices: list[Price]  # of all that it was chosen from, this one too


class Decision(msgspec.Struct, eq=False):
    """One request that was placed. Owned by its `Record`, which fills in how it ended."""

    request_id: str
    at: float  # loop seconds, of the first placement
    key: str
    model: str
    attempts: list[Attempt] = []
    outcome: str | None = None  # None: it is still running
    ttft_s: float | None = None
    seconds: float | None = None  # from its first byte to its end
    prompt_tokens: int | None = None  # as the engine reports
    cached_tokens: int | None = None


class Decisions:
    """Owner of the ring."""

    def __init__(self) -> None:
        self._ring: deque[Decision] = deque(maxlen=MOST)

    def __len__(self) -> int:
        return len(self._ring)

    def __iter__(self) -> Iterator[Decision]:
        """The newest first."""
        return reversed(self._ring)

    def keep(self, decision: Decision) -> None:
        self._ring.append(decision)

    def find(self, request_id: str) -> Decision | None:
        """The newest of that id: clients may use one twice."""
        return next((one for one in self if one.request_id == request_id), None)
