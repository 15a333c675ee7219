"""What dispatch is asked, what it answers, and what it remembers of a request in between.

What is made for every request is a msgspec Struct: a frozen dataclass takes six times as long to make.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Literal, TypeAlias

import msgspec

from gateway.core.cost import Price
from gateway.core.fairness import Line
from gateway.core.fleet import Backend
from gateway.core.prefix import EMPTY, Chain

Reason: TypeAlias = Literal[
    "gateway_queue_full", "gateway_queue_timeout", "no_backend", "too_many_choices", "exhausted"
]
Affinity: TypeAlias = Literal["hit", "miss", "moved", "none"]

NO_IDS: Final[Mapping[str, str]] = MappingProxyType({})


class Offer(msgspec.Struct, frozen=True, eq=False, gc=False):
    """What dispatch needs to know of a request."""

    ticket: int
    key: str
    pool: frozenset[str]  # names of the backends that can serve it
    model: str = ""  # for the caller's own use: its metric label
    permits: int = 1
    weight: float = 1.0
    batch: bool = False
    prompt_bytes: int = 0
    conversation: int = 0  # seed of the rendezvous hash
    chain: Chain = EMPTY  # its prompt, for the caches; empty: no affinity
    max_tokens: int | None = None  # of its answer, for each permit; None: not said
    ids: Mapping[str, str] = NO_IDS  # what each backend calls its model, where that is not `model`

    def model_on(self, backend: str) -> str:
        """What this backend calls the model."""
        return self.ids.get(backend, self.model)


class Used(msgspec.Struct, frozen=True, gc=False):
    """What an engine reports of one answer. None: it does not say.

    `prefill_s`: how long it took to compute what was not cached; told only of answers that were no streams.
    """

    prompt_tokens: int
    cached_tokens: int | None
    generated_tokens: int | None = None
    prefill_s: float | None = None


class Start(msgspec.Struct, frozen=True, gc=False):
    ticket: int
    backend: str
    price: Price
    affinity: Affinity = "none"
    prices: list[Price] = []  # of all backends that it could have gone to, to explain the choice


class Refuse(msgspec.Struct, frozen=True):
    ticket: int
    reason: Reason
    retry_after_s: float  # how long until a place is likely to be free; not yet clamped or spread


class Wait(msgspec.Struct, frozen=True):
    ticket: int


Decision: TypeAlias = Start | Refuse | Wait


@dataclass(slots=True)
class Limits:
    """How many may wait, and for how long. `queue` None: as many as the pool has slots."""

    queue: int | None = None
    max_wait_s: float = 30.0


class Waiting(msgspec.Struct, eq=False):
    """A request in line. Owned by dispatch."""

    offer: Offer
    line: Line
    arrival: float
    deadline: float
    expected_s: float = 0.0
    pool_slots: int = 0
    tried: frozenset[str] = frozenset()
    best: str | None = None  # its own cheapest backend at the last look
    overdue: bool = False
    reserves: bool = False  # freed slots of a backend are kept for it
    prices: list[Price] = []  # at the last look


class Held(msgspec.Struct, eq=False):
    """A request that has its permits. Owned by dispatch."""

    offer: Offer
    backend: Backend
    line: Line
    since: float
    deadline: float  # of its queueing, for another attempt
    expected_s: float
    tokens: int  # uncached prompt tokens still counted in the backend's backlog
    work_tokens: int  # uncached prompt tokens, as predicted at the start
    ahead_tokens: int  # the backend's backlog at the start
    matched: int  # bytes of the prompt that were believed to be cached
    tried: frozenset[str]
    promised_tokens: int = 0  # of a KV cache that slots share
    loads: bool = False  # its model had to be loaded for it
    first_token_at: float | None = None
