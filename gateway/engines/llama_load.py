"""Load figures of one llama-server process, from its /slots and /metrics (engines.md 1.4).

Both answers come from the inference thread, so they are asked for as a pair, and rarely (law 6).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from gateway.engines.base import Answer
from gateway.engines.body import count, objects, value_of
from gateway.engines.prom_text import exposition, total, whole

AUTOMATIC_SLOTS: Final = 4  # of a server started without --parallel (engines.md 0.4)
MOST_SLOTS: Final = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaLoad:
    """What the pair said. None: it did not."""

    slots: int | None
    context_per_slot: int | None
    busy_tokens: int | None  # resident tokens of the slots at work; idle ones keep theirs, for free
    idle_slots: int | None
    running: int | None
    waiting: int | None  # a lower bound: connections stuck in the HTTP pool are not in it
    prompt_tokens: int | None
    cached_tokens: int | None
    generated_tokens: int | None
    started: str | None

    def used_of(self, pool: int | None) -> float | None:
        """The share of a KV cache of so many tokens that slots at work hold."""
        if not pool or self.busy_tokens is None:
            return None
        return min(1.0, self.busy_tokens / pool)


def pool_of(slots: int | None, context: int | None, *, shared: bool) -> int | None:
    """Tokens that the whole KV cache holds, from the context that each slot reports."""
    if slots is None or context is None:
        return None
    return context if shared else context * slots


def load_of(slots: Answer | None, metrics: Answer | None) -> LlamaLoad:
    """Reads the pair; either may be missing or switched off (501)."""
    rows = list(objects(value_of(slots)))[:MOST_SLOTS]
    busy = [row for row in rows if row.get("is_processing") is True]
    text = exposition(metrics)
    fresh = whole(total(text, "llamacpp:prompt_tokens_total"))  # those not found in the cache
    cached = whole(total(text, "llamacpp:prompt_tokens_cached_total"))
    gauge = whole(total(text, "llamacpp:requests_processing"), most=1_000_000)
    return LlamaLoad(
        slots=len(rows) or None,
        context_per_slot=count(rows[0].get("n_ctx"), least=1) if rows else None,
        busy_tokens=sum(count(row.get("n_prompt_tokens")) or 0 for row in busy) if rows else None,
        idle_slots=len(rows) - len(busy) if rows else None,
        running=len(busy) if rows else gauge,
        waiting=whole(total(text, "llamacpp:requests_deferred"), most=1_000_000),
        prompt_tokens=None if fresh is None else fresh + (cached or 0),  # as others count them
        cached_tokens=cached,
        generated_tokens=whole(total(text, "llamacpp:tokens_predicted_total")),
        started=_start_of(metrics),
    )


def _start_of(metrics: Answer | None) -> str | None:
    """A number of the monotonic clock, whatever its name says: only its change means something."""
    if metrics is None or metrics.status != 200:
        return None
    return metrics.headers.get("process-start-time-unix")
