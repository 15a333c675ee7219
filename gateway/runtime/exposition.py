"""The text of `/metrics`: bounded in its series, and made in slices so that a scrape never holds the loop.

Laws of this file (law 10): at most MOST_SERIES lines with a value, whatever is configured; and between two slices of
at most SLICE_LINES lines (about 1 ms) the loop does what else is due. A thread would not do: it holds the
interpreter for 5 ms at a time, whenever the loop comes back from waiting for sockets.

Which label sets have series of their own is decided when they are first seen, the most used first, and stays so until
`forget`: a counter that moved in or out of `other` would look like one that was reset.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Generator, Iterator, Sequence

from prometheus_client import generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from gateway.core.catalog import OTHER
from gateway.runtime.families import PREFIX, Family, Histogram, Labels, Value

MOST_SERIES = 3_000
FOR_HISTOGRAMS = 1_700  # lines of label sets with histograms of their own
FOR_OTHERS = 1_000  # of all other metrics; what is left is for the rows named `other`
SLICE_LINES = 200
SLICE_ROWS = 100  # that are read, or looked at
FOLDED = ("model", "backend", "key")  # the labels that become `other`; the rest are closed sets
AGGREGATES = ("all", OTHER, "none")  # label sets of these names alone are always told

Row = tuple[Labels, Value]


class Exposition:
    """Owner of the choice of label sets that are told by name."""

    def __init__(self, families: Callable[[], Sequence[Family]]) -> None:
        self.families = families
        self._told: defaultdict[str, set[Labels]] = defaultdict(set)
        self._left = _full()

    async def render(self) -> bytes:
        """The whole text; other tasks run in between."""
        parts: list[bytes] = []
        for slice_ in self._slices():
            parts.append(slice_)
            await asyncio.sleep(0)
        return b"".join(parts)

    def text(self) -> str:
        """The whole text at once."""
        return b"".join(self._slices()).decode()

    def forget(self) -> None:
        """The configuration changed: choose anew."""
        self._told.clear()
        self._left = _full()

    def _slices(self) -> Iterator[bytes]:
        for family in self.families():
            rows: list[Row] = []
            for row in family.read():
                rows.append(row)
                if len(rows) % SLICE_ROWS == 0:
                    yield b""
            rows = yield from self._bounded(family, rows)
            at_once = SLICE_LINES if not rows else max(1, SLICE_LINES // _lines(rows[0][1]))
            for start in range(0, max(1, len(rows)), at_once):
                text = generate_latest(_One(_metric(family, rows[start : start + at_once])))
                yield text if start == 0 else text.split(b"\n", 2)[2]  # HELP and TYPE come once

    def _bounded(self, family: Family, rows: list[Row]) -> Generator[bytes, None, list[Row]]:
        """Those that have series of their own, and one `other` for the rest of each kind. Pauses by yielding nothing."""
        told = self._told[family.name]
        new = [row for row in rows if row[0] not in told and not _is_aggregate(family, row[0])]
        for labels, value in sorted(new, key=_use, reverse=True):
            budget, lines = family.kind == "histogram", _lines(value)
            if self._left[budget] >= lines:
                self._left[budget] -= lines
                told.add(labels)
        kept: dict[Labels, Value] = {}
        for number, (labels, value) in enumerate(rows, 1):
            if labels in told or _is_aggregate(family, labels):
                _join(kept, labels, value, family.fold)
            elif family.fold != "drop":
                _join(kept, _folded(family, labels), value, family.fold)
            if number % SLICE_ROWS == 0:
                yield b""
        return list(kept.items())


class _One(Collector):
    """A registry of one metric."""

    def __init__(self, metric: Metric) -> None:
        self._metric = metric

    def collect(self) -> Iterator[Metric]:
        yield self._metric


def _full() -> dict[bool, int]:
    return {True: FOR_HISTOGRAMS, False: FOR_OTHERS}


def _lines(value: Value) -> int:
    return len(value.counts) + 2 if isinstance(value, Histogram) else 1


def _use(row: Row) -> float:
    value = row[1]
    return value.count if isinstance(value, Histogram) else value


def _is_aggregate(family: Family, labels: Labels) -> bool:
    return all(
        value in AGGREGATES or label not in FOLDED
        for label, value in zip(family.labels, labels, strict=True)
    )


def _folded(family: Family, labels: Labels) -> Labels:
    pairs = zip(family.labels, labels, strict=True)
    return tuple(OTHER if label in FOLDED else value for label, value in pairs)


def _join(rows: dict[Labels, Value], labels: Labels, value: Value, fold: str) -> None:
    """Add a value to the row of these labels. A histogram is copied before others are added to it."""
    before = rows.get(labels)
    if before is None:
        rows[labels] = value
    elif isinstance(before, Histogram) and isinstance(value, Histogram):
        both = Histogram(before.bounds)
        both.add(before)
        both.add(value)
        rows[labels] = both
    elif not isinstance(before, Histogram) and not isinstance(value, Histogram):
        rows[labels] = max(before, value) if fold == "max" else before + value


def _metric(family: Family, rows: list[Row]) -> Metric:
    name, text, labels = PREFIX + family.name, family.help, family.labels
    if family.kind == "histogram":
        histograms = HistogramMetricFamily(name, text, labels=labels)
        for key, value in rows:
            if isinstance(value, Histogram):
                histograms.add_metric(key, value.buckets(), sum_value=value.total)
        return histograms
    if family.kind == "counter":
        numbers: CounterMetricFamily | GaugeMetricFamily = CounterMetricFamily(
            name, text, labels=labels
        )
    else:
        numbers = GaugeMetricFamily(name, text, labels=labels)
    for key, value in rows:
        if not isinstance(value, Histogram):
            numbers.add_metric(key, value)
    return numbers
