"""p50 and p95 of the last minute and the last five, in fixed memory.

Law of this file: from LEAST_S to MOST_S the answer is within ERROR of the exact quantile of the samples in the
window, whatever their distribution, and the windows of several models add up to that of all of them.

Samples are counted in buckets whose bounds grow by GAMMA, as in DDSketch (Masson, Rim and Lee: "DDSketch: a fast
and fully-mergeable quantile sketch with relative-error guarantees", VLDB 2019). Bucket i holds the values in
(LEAST_S x GAMMA^(i-1), LEAST_S x GAMMA^i] and answers 2 x GAMMA^i x LEAST_S / (GAMMA + 1), which is off by at most
(GAMMA - 1) / (GAMMA + 1) = ERROR of the value. Counts can be subtracted, so a window forgets by slices.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Final

ERROR: Final = 0.025
GAMMA: Final = (1 + ERROR) / (1 - ERROR)
LEAST_S: Final = 1e-4  # seconds; what is shorter counts as this long
MOST_S: Final = 2000.0  # seconds; what is longer counts as this long
SLICE_S: Final = 5.0
WINDOWS_S: Final = (60, 300)

_BUCKETS: Final = math.ceil(math.log(MOST_S / LEAST_S) / math.log(GAMMA)) + 1
_BOUNDS: Final = tuple(
    LEAST_S * GAMMA**bucket for bucket in range(_BUCKETS - 1)
)  # the last has none


class Window:
    """The recent samples of one series. Owned by whoever observes them.

    A sample leaves a window at the latest when it is as old as the window, and at most SLICE_S earlier.
    `now` is in monotonic seconds; one that goes back counts as no time passed.
    """

    __slots__ = ("_counts", "_current", "_slices", "_totals", "_until")

    def __init__(self) -> None:
        self._current = -1  # number of the slice of `now`
        self._until = 0.0  # its end
        self._counts: dict[int, int] = {}  # its samples by bucket
        self._slices: deque[tuple[int, dict[int, int]]] = deque()  # those before it
        self._totals = {window_s: [0] * _BUCKETS for window_s in WINDOWS_S}  # of those

    def observe(self, now: float, seconds: float) -> None:
        """Take one sample."""
        if now >= self._until:
            self._advance(int(now // SLICE_S))
        bucket = bisect_left(_BOUNDS, seconds)
        self._counts[bucket] = self._counts.get(bucket, 0) + 1

    def observe_all(self, now: float, samples: Sequence[float]) -> None:
        """Take samples in ascending order: for tens of them, in half of the time."""
        if now >= self._until:
            self._advance(int(now // SLICE_S))
        counts = self._counts
        for bucket, count in tally(samples, _BOUNDS):
            counts[bucket] = counts.get(bucket, 0) + count

    def counts(self, now: float, window_s: int) -> list[int]:
        """Samples by bucket in the window (one of WINDOWS_S) that ends now."""
        if now >= self._until:
            self._advance(int(now // SLICE_S))
        totals = self._totals[window_s].copy()
        for bucket, count in self._counts.items():
            totals[bucket] += count
        return totals

    def _keep(self) -> None:
        """The current slice has ended: count it in."""
        counts, self._counts = self._counts, {}
        if not counts:
            return
        self._slices.append((self._current, counts))
        for totals in self._totals.values():
            for bucket, count in counts.items():
                totals[bucket] += count

    def _advance(self, number: int) -> None:
        """Makes this slice the current one, and takes from each window the slices it leaves behind."""
        self._keep()
        for window_s, totals in self._totals.items():
            length = int(window_s / SLICE_S)
            left, leaves = self._current - length, number - length
            for at, counts in self._slices:
                if left < at <= leaves:
                    for bucket, count in counts.items():
                        totals[bucket] -= count
        self._current = number
        self._until = (number + 1) * SLICE_S
        oldest = number - int(max(WINDOWS_S) / SLICE_S)
        while self._slices and self._slices[0][0] <= oldest:
            self._slices.popleft()


def tally(samples: Sequence[float], bounds: Sequence[float]) -> list[tuple[int, int]]:
    """How many of these samples, in ascending order, are in which bucket; `bounds` are the highest values of buckets.

    Searched for bucket by bucket, not sample by sample: many samples are in few buckets.
    """
    found: list[tuple[int, int]] = []
    at, size = 0, len(samples)
    while at < size:
        bucket = bisect_left(bounds, samples[at])
        past = bisect_right(samples, bounds[bucket], at) if bucket < len(bounds) else size
        found.append((bucket, past - at))
        at = past
    return found


def quantile(windows: Iterable[Window], now: float, q: float, window_s: int) -> float | None:
    """The q-quantile (0 < q <= 1) in seconds of all samples of these series together; None without any.

    Nearest rank: the least sample that at least a share q of the samples does not exceed (the inverse of the
    empirical distribution; numpy calls it `inverted_cdf`).
    """
    columns = [window.counts(now, window_s) for window in windows]
    counts = columns[0] if len(columns) == 1 else [sum(row) for row in zip(*columns, strict=True)]
    rank = max(1, math.ceil(q * sum(counts) - 1e-9))  # 0.07 x 100 is 7.000000000000001 in floats
    seen = 0
    for bucket, count in enumerate(counts):
        seen += count
        if seen >= rank:
            return _seconds(bucket)
    return None


def _seconds(bucket: int) -> float:
    if bucket == 0:
        return LEAST_S
    return float(LEAST_S * GAMMA**bucket * 2 / (GAMMA + 1))
