"""Prometheus text, read for a handful of names.

Engines publish up to a megabyte of histograms; a full parser would hold the loop for it. This one looks for the
wanted names with `bytes.find` and parses only the lines that start with them. Whatever is not such a line (HTML,
half a line, other metrics) is passed over. An unfinished last line is dropped: "12" may be the start of "128".
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Final

from gateway.engines.base import Answer

_LINE: Final = re.compile(
    rb'(?:\{((?:[^"}\n]|"(?:[^"\\\n]|\\.)*+")*+)\})?[ \t]++([^\s]++)[^\n]*+\n'
)
_LABEL: Final = re.compile(rb'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\\n]|\\.)*+)"')
_MOST_SERIES: Final = 4096

Series = tuple[bytes, float]  # raw labels, value


def exposition(answer: Answer | None) -> bytes:
    """The text of a 200 answer; empty when there is none, or when it was too long to read whole."""
    if answer is None or answer.status != 200 or answer.cut:
        return b""
    return answer.body


def series(text: bytes, name: str) -> list[Series]:
    """The first 4,096 samples of this very name. A value that is not a number counts as NaN."""
    found: list[Series] = []
    for at in _starts(text, name.encode()):
        line = _LINE.match(text, at)
        if line is not None:
            found.append((line[1] or b"", _value(line[2])))
        if len(found) == _MOST_SERIES:
            break
    return found


def total(text: bytes, *aliases: str, where: bytes = b"") -> float | None:
    """The sum over all series (engines, models, ranks) of the first alias that is there.

    None when no alias is there, or when one of the figures is not one: half a sum would pass for the whole.
    `where` is a label pair, `name="value"`, that series with that label must have.
    """
    values = _values(text, aliases, where)
    return sum(values) if values else None


def mean(text: bytes, *aliases: str, where: bytes = b"") -> float | None:
    """As `total`, for ratios: the mean over all series."""
    values = _values(text, aliases, where)
    return sum(values) / len(values) if values else None


def whole(value: float | None, most: int = 1 << 50) -> int | None:
    """A count from a metric value; None beyond what is plausible."""
    return int(value) if value is not None and value <= most else None


def ratio(value: float | None) -> float | None:
    """A ratio from a metric value; rounding above 1 is forgiven, percentages are not guessed at."""
    return min(value, 1.0) if value is not None and value <= 1.01 else None


def labels(raw: bytes) -> dict[str, str]:
    """The label pairs of one series. Escapes stay as they are."""
    return {name.decode(): value.decode("utf-8", "replace") for name, value in _LABEL.findall(raw)}


def _starts(text: bytes, name: bytes) -> Iterator[int]:
    """Where the rest of a line begins that has this metric name and no longer one."""
    at = 0 if text.startswith(name) else _after(text, name, 0)
    while at >= 0:
        end = at + len(name)
        if text[end : end + 1] in (b"{", b" ", b"\t"):
            yield end
        at = _after(text, name, end)


def _after(text: bytes, name: bytes, at: int) -> int:
    found = text.find(b"\n" + name, at)
    return found + 1 if found >= 0 else -1


def _values(text: bytes, aliases: tuple[str, ...], where: bytes) -> list[float]:
    label = where.partition(b"=")[0] + b"="
    for alias in aliases:
        found = series(text, alias)
        rows = [value for raw, value in found if where in raw or label not in raw]
        if len(found) == _MOST_SERIES:
            return []
        if rows:
            return rows if all(math.isfinite(v) and v >= 0 for v in rows) else []
    return []


def _value(raw: bytes) -> float:
    try:
        return float(raw)
    except ValueError:
        return math.nan
