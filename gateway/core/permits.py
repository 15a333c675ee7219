"""Permits that are lent: to whom, and what each teaches when it comes back.

Law of this file (law 1): a backend never has more of our permits in flight than its slots, and every permit that was
lent comes back. After a cancel a llama-server or Ollama slot settles before it is lent again.
"""

from __future__ import annotations

from gateway.core.cost import Price
from gateway.core.fairness import Lines
from gateway.core.fleet import BATCH_TOKENS, DECODE_SETTLE_S, Backend, Fitness
from gateway.core.prefix import BLOCK_BYTES, PrefixIndex
from gateway.core.tickets import Affinity, Held, Offer, Used, Waiting


class Permits:
    """All permits in flight, by ticket. Owned by `core.dispatch`."""

    def __init__(self, index: PrefixIndex, lines: Lines) -> None:
        self.held: dict[int, Held] = {}
        self._parted: dict[str, Backend] = {}  # removed, with permits that are still out
        self._index = index
        self._lines = lines

    def lend(self, now: float, waiting: Waiting, price: Price) -> Affinity:
        """Start a request on a backend. Says whether that is where most of its prefix is."""
        offer, backend = waiting.offer, price.backend
        expected = backend.service_s.value * offer.permits
        tokens = price.own_tokens
        affinity = self._affinity(offer, price)
        self.held[offer.ticket] = Held(
            offer,
            backend,
            waiting.line,
            now,
            waiting.deadline,
            expected,
            tokens,
            tokens,
            backend.backlog_tokens,
            price.matched,
            waiting.tried | {backend.name},
            0 if backend.room.tokens is None else self._promise(backend, offer),
            price.load_s > 0,
        )
        if backend.residence.start(now, offer.ticket, offer.model_on(backend.name)):
            self._index.forget(backend.name)
        self._index.start(backend.name, offer.ticket, offer.chain)
        backend.in_flight += offer.permits
        backend.backlog_tokens += tokens
        if backend.idle_wanted_since is not None:
            backend.end_idle(now)
        self._lines.started(waiting.line, expected, backend.name)
        return affinity

    def first_token(self, now: float, ticket: int) -> None:
        """Its prefill is over: it is nobody's backlog any more, and it teaches the prefill rate."""
        held = self.held.get(ticket)
        if held is None or held.first_token_at is not None:
            return
        held.first_token_at = now
        _drop_backlog(held)
        backend = held.backend
        backend.residence.arrived(now, ticket)
        if held.loads:
            prefill = (held.work_tokens + held.ahead_tokens) / backend.prefill_rate.value
            backend.load_s.learn(now - held.since - prefill)

    def take_back(self, now: float, ticket: int, *, cancelled: bool) -> Held | None:
        """The permits of this request are free again, or settling; None when it had none."""
        held = self.held.pop(ticket, None)
        if held is None:
            return None
        backend, permits = held.backend, held.offer.permits
        backend.in_flight -= permits
        backend.room.promised -= held.promised_tokens
        backend.residence.end(now, ticket, held.offer.model_on(backend.name))
        self._index.end(backend.name, held.offer.ticket)
        backend.released.append((now, permits))
        self._lines.released(held.line, (now - held.since) * permits - held.expected_s)
        if cancelled and backend.settles:
            others = backend.backlog_tokens - held.tokens
            rest = DECODE_SETTLE_S + backend.prefill_left_s(min(others, BATCH_TOKENS), 0.0)
            if held.first_token_at is None:
                tokens = held.ahead_tokens + held.work_tokens
                rest = max(rest, backend.prefill_left_s(tokens, now - held.since))
            backend.settle(now, rest, permits, held.promised_tokens)
        _drop_backlog(held)
        return held

    def learn(self, now: float, held: Held, used: Used | None) -> None:
        """What a whole answer teaches: service time, tokens in a byte, the truth about the cache, the prefill rate.

        Rate: what was ahead of it and its own uncached tokens were computed until its first token. When that came we see
        of a stream; of another answer llama-server tells in its `timings` (engines.md 1.11).
        """
        backend, offer, work = held.backend, held.offer, held.work_tokens
        backend.service_s.learn(now - held.since)
        if used is not None and used.prompt_tokens >= 16 and offer.prompt_bytes:
            per_token = offer.prompt_bytes / used.prompt_tokens
            backend.bytes_per_token.learn(per_token)
            if used.cached_tokens is not None:
                work = used.prompt_tokens - used.cached_tokens
                cached = round(used.cached_tokens * per_token)
                self._index.correct(backend.name, offer.ticket, cached)
        if used is not None and used.generated_tokens is not None and offer.permits == 1:
            backend.room.learn(used.generated_tokens)
        if held.loads:  # what it took says more about the load
            return
        work += held.ahead_tokens
        prefill_s = used.prefill_s if used is not None else None
        if held.first_token_at is not None:
            prefill_s = held.first_token_at - held.since
        # when nobody knows when its first token came: the whole, rather than too little
        backend.answer_s.learn(now - held.since - (prefill_s or 0.0))
        if prefill_s is not None and work >= 64:
            backend.prefill_rate.learn(work / max(prefill_s, 1e-3))

    def part_from(self, backend: Backend) -> None:
        """It is removed. What it has lent is remembered until it is back."""
        self._parted = {one.name: one for one in self._parted.values() if one.in_flight}
        if backend.in_flight or backend.settling:
            backend.fitness, backend.advice = Fitness.DOWN, None
            backend.reserved_by = backend.idle_wanted_since = None
            self._parted[backend.name] = backend

    def returning(self, name: str) -> Backend | None:
        """A removed backend of this name, if it may still be at work for us."""
        return self._parted.pop(name, None)

    @staticmethod
    def _promise(backend: Backend, offer: Offer) -> int:
        """Tokens of the shared KV cache that are its own until it ends."""
        room = backend.room
        need = room.need(backend.tokens_in(offer.prompt_bytes), offer.permits, offer.max_tokens)
        room.promised += need
        return need

    def _affinity(self, offer: Offer, price: Price) -> Affinity:
        """Did it go where most of its prefix is?"""
        if not offer.chain.hashes:
            return "none"
        if price.matched and price.matched + BLOCK_BYTES > offer.chain.size:
            return "hit"  # nobody can have more
        most = max(self._index.match(name, offer.chain, busy_too=True) for name in offer.pool)
        if most == 0:
            return "miss"
        return "hit" if price.matched + BLOCK_BYTES > most else "moved"


def others_for(held: Held, backends: dict[str, Backend]) -> list[Backend]:
    """Where this request may be tried again: not where it was, and never on what is down."""
    left = (backends.get(name) for name in held.offer.pool - held.tried)
    return [b for b in left if b and b.is_hopeful and b.slots >= held.offer.permits]


def _drop_backlog(held: Held) -> None:
    held.backend.backlog_tokens -= held.tokens
    held.tokens = 0
