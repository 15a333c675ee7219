"""What gateways tell each other beside their leases: use of limited keys, what engines said of their load, and hold.

Law of this file: words that cannot be read are left out; they never stop a gateway.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final, NamedTuple

import msgspec

from gateway.core.lease_homes import Batch, Homes
from gateway.core.lease_limits import SharedLimits, Spent
from gateway.core.lease_reports import FIGURES, SPACED_S, Figures, who_asks
from gateway.runtime.backends import Backends
from gateway.runtime.cluster_ledger import Heard

AGAIN_S: Final = 1.0  # unchanged words are told again, for a Redis that forgot them
ACTIVE_S: Final = 5.0  # a backend counts as active for so long after its last traffic


class _Told(msgspec.Struct, array_like=True):
    """One gateway's words, as they are transmitted."""

    limits: dict[str, Spent]
    active: tuple[str, ...]  # backends to which it has traffic
    figures: dict[str, Figures]
    homes: Batch = Batch(0, {})


class _Look(NamedTuple):
    """What this gateway itself was told by an engine, and when."""

    at: float
    figures: Figures


class Words:
    """Owner of what was last told and heard. Times are monotonic seconds of this gateway."""

    def __init__(self, me: str, limits: SharedLimits, backends: Backends, homes: Homes) -> None:
        self._me = me
        self._limits = limits
        self._backends = backends
        self._homes = homes
        self._active: Mapping[str, frozenset[str]] = {}  # of the others
        self._heard_at: dict[str, float] = {}  # backend: when another gateway had looked
        self._numbers: dict[tuple[str, str], int] = {}  # gateway and backend: last figures taken
        self._own: dict[str, _Look] = {}
        self._taken: dict[str, float] = {}  # backend: when such a report came from another gateway
        self._last = b""
        self._last_at = -1e9

    def may_weigh(self, name: str, now: float) -> bool:
        """Is it this gateway that asks the engine about its load?"""
        if now < self._heard_at.get(name, -1e9) + SPACED_S:
            return False
        active = [who for who, names in self._active.items() if name in names]
        return who_asks(name, [*active, self._me]) == self._me

    def own(self, now: float) -> bytes:
        """What to tell; empty when it has been told."""
        limits, figures = self._limits.told(now), self._figures(now)
        told = _Told(limits, self._active_here(), figures, self._homes.told(now))
        words = msgspec.json.encode(told)
        if words == self._last and now < self._last_at + AGAIN_S:
            return b""
        self._last, self._last_at = words, now
        return words

    def hear(self, now: float, heard: Heard) -> None:
        """What the others told."""
        told = {who: words for who, raw in heard.told.items() if (words := _read(raw)) is not None}
        self._limits.hear(now, {who: one.limits for who, one in told.items()})
        self._homes.hear((who, one.homes) for who, one in told.items())
        self._active = {who: frozenset(one.active) for who, one in told.items()}
        self._numbers = {pair: n for pair, n in self._numbers.items() if pair[0] in told}
        for who, one in told.items():
            for name, figures in one.figures.items():
                self._take(now, who, name, figures)

    def lost(self) -> None:
        """Redis is away: limits are this gateway's own until it is back."""
        self._limits.alone()
        self._last_at = -1e9

    def _active_here(self) -> tuple[str, ...]:
        return tuple(
            name
            for name in sorted(self._backends.known)
            if (one := self._backends.activity(name)).in_flight
            or (one.last_traffic_age_s is not None and one.last_traffic_age_s < ACTIVE_S)
        )

    def _figures(self, now: float) -> dict[str, Figures]:
        """Own looks that are young enough to be of use."""
        for name, known in self._backends.known.items():
            at, own = known.reported_at, self._own.get(name)
            if at is None or known.report is None or known.report.running is None:
                continue
            if at == self._taken.get(name) or (own is not None and at == own.at):
                continue
            values = {one: getattr(known.report, one) for one in FIGURES}
            self._own[name] = _Look(
                at, Figures(1 if own is None else own.figures.number + 1, values)
            )
        return {name: one.figures for name, one in self._own.items() if now < one.at + ACTIVE_S}

    def _take(self, now: float, who: str, name: str, figures: Figures) -> None:
        known = self._backends.known.get(name)
        if known is None or known.report is None:
            return
        if self._numbers.get((who, name)) == figures.number:
            return
        self._numbers[who, name] = figures.number
        self._heard_at[name] = now
        values: dict[str, Any] = {one: figures.values.get(one) for one in FIGURES}
        self._backends.on_report(name, replace(known.report, age_s=0.0, **values))
        self._taken[name] = known.reported_at or now


def _read(raw: bytes) -> _Told | None:
    try:
        return msgspec.json.decode(raw, type=_Told)
    except msgspec.DecodeError:  # of another version of this program
        return None
