"""How the slots of one backend are divided between the gateways of a fleet.

Law of this file: the division is the same wherever it is worked out from the same table, never adds up to more than
the slots, and leaves none over while anybody may have it. What is asked for now goes before what was asked for lately,
and that before what somebody might ask for next; each of the three evenly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple


class Want(NamedTuple):
    """What one gateway has a use for on one backend, in permits."""

    need: int  # in flight, settling and waiting
    peak: int  # the most of it in the last second
    spare: bool  # may it hold slots in advance? Not while it drains, or the backend is unfit for it


def divide(slots: int, wants: Mapping[str, Want], turn: int) -> dict[str, int]:
    """Slots of each gateway, by its id. `turn` moves on with time, so that an odd slot is everybody's in turn."""
    order = sorted(wants)
    if not order:
        return {}
    shift = turn % len(order)
    shares = dict.fromkeys(order, 0)
    left = _give(
        shares, order[shift:] + order[:shift], [wants[n].need for n in order], slots, shift
    )
    eager = [name for name in order if wants[name].spare]
    left = _give(shares, eager, [wants[n].peak for n in eager], left)
    _give(shares, eager, [slots] * len(eager), left)
    return shares


def _give(
    shares: dict[str, int], order: Sequence[str], caps: Sequence[int], left: int, shift: int = 0
) -> int:
    """Raise all evenly, each up to its cap, those that come first by one more. Returns what is left."""
    most = dict(zip(order, [*caps[shift:], *caps[:shift]], strict=True))
    open_ = [name for name in order if shares[name] < most[name]]
    while left > 0 and open_:
        each = max(1, left // len(open_))
        for name in open_:
            more = min(each, most[name] - shares[name], left)
            shares[name] += more
            left -= more
        open_ = [name for name in open_ if shares[name] < most[name]]
    return left
