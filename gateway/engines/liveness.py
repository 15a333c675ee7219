"""Busy is not dead (law 6): what a probe without an answer says about a backend.

A llama-server in a burst lets /health wait for many seconds (engines.md 0.3), and a single-threaded server
answers nothing while it generates. Only a refused connection is proof; silence must last, and bytes on one of
our own streams outweigh it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from gateway.engines.base import State

PROOF_OF_LIFE_S: Final = 10.0  # how long a byte on a live stream speaks for its backend


class Silence(StrEnum):
    """Why there was no answer."""

    REFUSED = "refused"  # nobody listens
    TIMEOUT = "timeout"
    BROKEN = "broken"  # cut off, not HTTP, unknown host, an answer that no engine gives


@dataclass(frozen=True, slots=True)
class Activity:
    """What our own requests to a backend show. Ages in seconds; None: never. A settling slot is traffic."""

    in_flight: int = 0
    last_traffic_age_s: float | None = None  # 0 while anything is in flight
    bytes_age_s: float | None = None  # since a byte of an answer came


@dataclass(frozen=True, slots=True)
class Verdict:
    """The state after a round without an answer."""

    state: State
    busy: bool = False


def judge(
    silence: Silence, failures: int, patience: int, activity: Activity, was: State | None
) -> Verdict:
    """Decides on a silent round. `failures` counts this one too; `was` is the state before it."""
    if silence is Silence.REFUSED or was in (None, State.DOWN):
        return Verdict(State.DOWN)
    state = was or State.DOWN
    if has_proof_of_life(activity):
        return Verdict(state, busy=True)
    return Verdict(State.DOWN if failures >= patience else state)


def has_proof_of_life(activity: Activity) -> bool:
    """True when one of our streams moved lately."""
    age = activity.bytes_age_s
    return activity.in_flight > 0 and age is not None and age <= PROOF_OF_LIFE_S
