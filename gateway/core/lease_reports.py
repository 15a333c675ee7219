"""One gateway asks an engine about its load, and tells the others.

Law of this file (law 6, for all gateways together): of those that have traffic there, one asks; whoever just heard
its answer does not ask again before the engine may be asked at all.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple
from zlib import crc32

SPACED_S: Final = 2.0  # between two looks at an engine's load, whoever looks
FIGURES: Final = (
    "running",
    "waiting",
    "kv_used_ratio",
    "preemptions",
    "idle_slots",
    "prompt_tokens",
    "cached_tokens",
    "generated_tokens",
)


class Figures(NamedTuple):
    """What a gateway learnt of an engine's load. `number` grows with each look of that gateway."""

    number: int
    values: Mapping[str, Any]


def who_asks(backend: str, active: Iterable[str]) -> str | None:
    """Which of the gateways that have traffic there asks: the same in all of them (rendezvous hash)."""
    return max(active, key=lambda one: (crc32(f"{one} {backend}".encode()), one), default=None)
