"""How many slots fit, and how many are wanted.

KV bytes of a token = layers x KV heads x (key size + value size) x bytes of a number. Requests in flight = users x
seconds generating / seconds between turns (Little's law). Slots wanted: the fewest with which at most one request in
ten finds them all busy, by the Erlang C formula (arrivals at random; A. K. Erlang, 1917).

Law of this file: slots are counted against less memory than there is, so that an engine filled to its last slot
has no reason to preempt.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from gateway.cli.ops.shape import ModelShape

# Bytes of one number. The quantised ones are blocks of 32 with a 16-bit scale (ggml's q8_0 and q4_0).
CACHE_BYTES: Final = {
    "f32": 4.0,
    "f16": 2.0,
    "bf16": 2.0,
    "fp8": 1.0,
    "q8_0": 34 / 32,
    "q4_0": 18 / 32,
}
USABLE: Final = 0.9  # of memory: the rest is for buffers of the computation and what else is there
MAY_WAIT: Final = 0.1  # of the requests


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What people do. All three in the same breath, or none."""

    users: int
    gen_seconds: float  # that one answer takes
    turn_seconds: float  # from one question of a person to the next

    @property
    def in_flight(self) -> float:
        """Requests at work at one moment, on average."""
        return self.users * self.gen_seconds / self.turn_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizing:
    """What fits and what is wanted. None: not asked for."""

    kv_bytes_a_token: float
    context: int
    kv_bytes_a_slot: float
    kv_room_bytes: float | None  # memory for KV caches
    fit: int | None  # slots that memory holds
    in_flight: float | None
    wanted: int | None  # slots
    slots: int | None  # to set: what is wanted, as far as it fits


def size(
    shape: ModelShape,
    *,
    cache: str,
    context: int,
    memory_bytes: float | None = None,
    weights_bytes: int | None = None,
    demand: Demand | None = None,
) -> Sizing:
    """Count it. `cache`: a key of CACHE_BYTES; memory and weights in bytes, context in tokens."""
    token = kv_bytes_a_token(shape, cache)
    slot = token * context
    room = None if memory_bytes is None else max(0.0, memory_bytes * USABLE - (weights_bytes or 0))
    fit = None if room is None else int(room // slot)
    in_flight = demand.in_flight if demand is not None else None
    wanted = (
        slots_wanted(in_flight, most=demand.users) if demand and in_flight is not None else None
    )
    told = [number for number in (fit, wanted) if number is not None]
    return Sizing(
        kv_bytes_a_token=token,
        context=context,
        kv_bytes_a_slot=slot,
        kv_room_bytes=room,
        fit=fit,
        in_flight=in_flight,
        wanted=wanted,
        slots=min(told) if told else None,
    )


def kv_bytes_a_token(shape: ModelShape, cache: str) -> float:
    """Keys and values of one token in all layers, in bytes."""
    return shape.kv_heads * (shape.key_size + shape.value_size) * CACHE_BYTES[cache]


def slots_wanted(in_flight: float, *, most: int) -> int:
    """The fewest slots with which at most one request in ten waits; never more than there are people."""
    slots = max(1, math.floor(in_flight) + 1)
    while slots < most and chance_to_wait(in_flight, slots) > MAY_WAIT:
        slots += 1
    return max(1, min(slots, most))


def chance_to_wait(in_flight: float, slots: int) -> float:
    """Erlang C: the share of requests that find every slot busy. 1 when there are no more slots than work."""
    if in_flight >= slots:
        return 1.0
    blocked = 1.0  # Erlang B, by its recursion: no factorials, so no overflow
    for number in range(1, slots + 1):
        blocked = in_flight * blocked / (number + in_flight * blocked)
    return blocked / (1 - in_flight / slots * (1 - blocked))
