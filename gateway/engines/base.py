"""What the gateway knows of an engine, and the questions that found it out.

Law of this package: an engine is one pure file. It says which question comes next, and it turns the answers
into an EngineReport. It holds no socket, no clock and no memory; `runtime/poller.py` does the asking. What an
engine did not say is None. Missing is never zero.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

Document = dict[str, Any]
UNKNOWN: Final = "unknown"  # the engine of a report in which nobody answered


class State(StrEnum):
    """What a backend can do with a request now. The values are metric labels (`backend_state`)."""

    UP = "up"
    LOADING = "loading"  # the port is open, the model is not there yet: wait, do not eject
    SLEEPING = "sleeping"  # works, but the first request pays for loading the model again
    DOWN = "down"


@dataclass(frozen=True, slots=True)
class Ask:
    """One GET. The backend's own key goes with every one of them."""

    path: str  # with its query; the key under which the answer is filed
    timeout_s: float = 3.0  # of the whole answer. llama-server stalled for seconds in a burst


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back, at whatever status. `cut`: there was more of it than we read."""

    status: int
    headers: Mapping[str, str]  # names in lower case
    body: bytes
    cut: bool = False


Seen = Mapping[str, Answer | None]  # by Ask.path; None: asked, but there was no answer


@dataclass(frozen=True, slots=True)
class Look:
    """What this round may ask, beside the free questions."""

    weigh: bool = False  # questions about load: only while it has traffic, and spaced (law 6)
    full: bool = True  # the slow-moving facts too: models, version


@dataclass(frozen=True, slots=True)
class Model:
    """One model that a backend offers."""

    id: str
    loaded: bool | None = None  # None: the engine does not say
    aliases: tuple[str, ...] = ()  # other names that the engine accepts for it
    document: Document = field(default_factory=dict)  # its own /v1/models entry, extras kept


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineReport:
    """One round's findings. None: the engine did not say this time; what it said before still stands."""

    engine: str
    state: State
    age_s: float = 0.0  # how long ago its first question was asked when the report is delivered
    busy: bool = False  # the probe had no answer, but our streams show that the backend lives
    version: str | None = None
    models: tuple[Model, ...] | None = None
    slots: int | None = None  # most requests it runs at once
    slots_assumed: bool = False  # nobody said so: a stated guess
    slots_inferred: bool = False  # from what ran while others waited: it may run fewer by now
    context_per_slot: int | None = None  # tokens
    kv_tokens: int | None = None  # tokens that its whole KV cache holds
    kv_shared: bool = False  # the slots draw on one pool of kv_tokens
    max_loaded: int | None = None  # how many models it keeps loaded at once; a further one evicts
    swaps: bool = False  # it has more models than it keeps loaded; `Model.loaded` says which are
    swap_waits: bool = False  # it lets running requests end before it evicts their model
    running: int | None = None
    waiting: int | None = None
    kv_used_ratio: float | None = None  # 0..1
    preemptions: int | None = None  # counter
    idle_slots: int | None = None
    prompt_tokens: int | None = None  # counter, those from the cache included
    cached_tokens: int | None = None  # counter
    generated_tokens: int | None = None  # counter
    incarnation: str | None = None  # another value: the process restarted, its caches are gone
    warnings: tuple[str, ...] = ()  # for people; one text per kind, without figures that move
    capabilities: frozenset[str] = frozenset()  # API paths it is known to serve; empty: not said
    documents: Mapping[str, Document] = field(default_factory=dict)  # native lists, whole, by path


@dataclass(frozen=True, slots=True)
class Engine:
    """One kind of engine: pure functions and the pace at which it may be asked."""

    name: str
    next_ask: Callable[[Seen, Look], Ask | None]  # None: the round is over
    read: Callable[[Seen, EngineReport | None], EngineReport]  # with what was known before
    recognises: Callable[[Seen], bool]  # do these answers still come from this kind of engine?
    active_s: float  # at least between two looks at its load, while it has traffic
    patience: int = 3  # unanswered rounds in a row, without proof of life, that mean down


def unasked(seen: Seen, *asks: Ask) -> Ask | None:
    """The first of these questions that was not asked yet."""
    return next((ask for ask in asks if ask.path not in seen), None)


def unanswered(seen: Seen, ask: Ask) -> bool:
    """True when this question was asked and got no answer."""
    return ask.path in seen and seen[ask.path] is None


def refuses_key(seen: Seen) -> bool:
    """True when any answer is a 401: the backend wants a key, and not the one it got."""
    return any(answer is not None and answer.status == 401 for answer in seen.values())


def never_told_slots(known: EngineReport | None) -> bool:
    """True when nothing but a guess is known of its slots."""
    return known is None or known.slots_assumed or known.slots is None


def applying(*kinds: tuple[bool, str]) -> tuple[str, ...]:
    """The words of those warnings whose condition holds."""
    return tuple(words for applies, words in kinds if applies)
