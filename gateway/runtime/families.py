"""What `/metrics` is made of: histograms, and families that know where their values are.

A family holds no values. It is read at the scrape, on the loop's own thread, so what it reads needs no lock.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from gateway.core.latency import tally

PREFIX = "slotgate_"


class Histogram:
    """Counts by bucket. Cumulative only when told."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, sample: float) -> None:
        self.counts[bisect_left(self.bounds, sample)] += 1
        self.total += sample

    def observe_all(self, samples: Sequence[float]) -> None:
        """Take samples in ascending order."""
        for bucket, count in tally(samples, self.bounds):
            self.counts[bucket] += count
        self.total += sum(samples)

    @property
    def count(self) -> int:
        return sum(self.counts)

    def add(self, other: Histogram) -> None:
        """Take in all samples of another one with the same bounds."""
        self.counts = [one + more for one, more in zip(self.counts, other.counts, strict=True)]
        self.total += other.total

    def buckets(self) -> list[tuple[str, float]]:
        running, out = 0, []
        for bound, count in zip((*self.bounds, None), self.counts, strict=True):
            running += count
            out.append(("+Inf" if bound is None else str(bound), float(running)))
        return out


Labels: TypeAlias = tuple[str, ...]
Value: TypeAlias = float | Histogram
Rows: TypeAlias = Iterable[tuple[Labels, Value]]


@dataclass(frozen=True, slots=True)
class Family:
    """One metric. `name` is without the prefix, and for counters without `_total`.

    `read` gives the rows; others run between them, so it walks over a copy of what may change meanwhile.

    `fold`: what becomes of rows beyond the bound on series: their sum or their greatest value is told as `other`, or
    they are not told at all.
    """

    name: str
    help: str
    labels: Labels
    read: Callable[[], Rows]
    kind: Literal["counter", "gauge", "histogram"] = "gauge"
    fold: Literal["sum", "max", "drop"] = "sum"

    @property
    def full_name(self) -> str:
        """As it stands in the text and in queries; histograms without `_bucket`, `_sum`, `_count`."""
        return f"{PREFIX}{self.name}{'_total' if self.kind == 'counter' else ''}"
