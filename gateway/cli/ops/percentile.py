"""Percentiles by nearest rank: the least value that at least this share of the samples does not exceed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Spread:
    """Of one kind of sample, in seconds."""

    count: int
    mean: float
    p50: float
    p95: float
    p99: float


def spread(samples: Sequence[float]) -> Spread | None:
    """None without samples."""
    if not samples:
        return None
    ordered = sorted(samples)
    mean = math.fsum(ordered) / len(ordered)
    return Spread(len(ordered), mean, *(_rank(ordered, q) for q in (0.5, 0.95, 0.99)))


def _rank(ordered: Sequence[float], q: float) -> float:
    return ordered[max(0, math.ceil(q * len(ordered)) - 1)]
