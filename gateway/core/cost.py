"""What starting a request on a backend now would cost: expected time to first token, and what it costs others.

    cost(b) = wait + load + backlog left / rate + own / rate x (1 + Q_b + in flight)   seconds; design.md section 4

wait     0 with a free slot, else (who waits for b and is ahead + 1/2) x learned time of an answer after its first token /
         slots: slots come free at one in that time, and the next one is half of it away on average. What is prefilled
         before is in the backlog; a time of the whole service remembers the queues of a crowd that is gone
load     0 where its model is ready, else the learned time to load it, or to wake
backlog  uncached tokens of others sent to b that have not reached their first token; they are computed while it waits,
         so only what is left after `wait` counts
own      tokens of this prompt that b does not have cached
rate     b's learned prefill rate, tokens/s
Q_b      other waiting requests whose own best backend is b: a cold prefill on b delays them
in flight  on b: a prefill there delays each of their tokens, or their first one

Measured with `bench.simulate` (mean TTFT against the best other policy; A, B, C of the agents; geometric mean of 60
cells of traces): with wait + backlog and no term for what is in flight C was x 1.83, as every cold prefill looked free
on a backend where nobody waited; with half of the term 1.05, with it 1.00, and the traces moved from 0.847 to 0.842. The whole service time in place of
the answer's: 0.842 against 0.841 here, but over HTTP, where a first crowd had taught 6 s, C was x 1.13 to 1.20.
"""

from __future__ import annotations

from zlib import crc32

import msgspec

from gateway.core.fleet import Backend

TIE_S = 0.010
TIE_RATIO = 1.05


class Price(msgspec.Struct, frozen=True, eq=False, gc=False):
    """The terms of one cost, in seconds, kept so that a choice can be explained."""

    backend: Backend
    total_s: float
    wait_s: float
    backlog_s: float
    own_s: float
    crowd: int
    own_tokens: int
    matched: int  # bytes of the prompt that it has cached
    load_s: float = 0.0


def price(
    backend: Backend,
    now: float,
    prompt_bytes: int,
    matched: int,
    *,
    permits: int,
    promised: int,
    ahead: int,
    free: int,
    must_load: bool = False,
) -> Price:
    """The cost of this request on this backend now. `promised` is Q_b: others who wait for it; `ahead`: those before it.

    `free`: permits that it could have there now; what is kept for somebody else is not free to it.
    """
    wait = 0.0
    if free < permits:
        slots = max(1, backend.lendable)
        wait = (ahead + 0.5 + backend.others(now)) * backend.answer_s.value / slots
    own_tokens = 0  # max() would cost more than all the rest
    if matched < prompt_bytes:
        own_tokens = round((prompt_bytes - matched) / backend.bytes_per_token.value)
    rate = backend.prefill_rate.value
    backlog = backend.backlog_tokens / rate
    backlog = backlog - wait if backlog > wait else 0.0
    own = own_tokens / rate * (1 + promised + backend.in_flight)
    load = backend.load_s.value if must_load else 0.0
    total = wait + load + backlog + own
    return Price(backend, total, wait, backlog, own, promised, own_tokens, matched, load)


def cheapest(prices: list[Price], conversation: int) -> Price:
    """The least cost. Within 10 ms or 5 % of it: the lowest share of slots in use, then a rendezvous hash.

    The hash of conversation and name makes several gateways agree (Thaler and Ravishankar, 1998).
    """
    if len(prices) == 1:
        return prices[0]
    least = min(one.total_s for one in prices)
    bound = max(least + TIE_S, least * TIE_RATIO)
    tied = [one for one in prices if one.total_s <= bound]
    if len(tied) == 1:
        return tied[0]
    shares = [_share_in_use(one.backend) for one in tied]
    least = min(shares)
    tied = [one for one, share in zip(tied, shares, strict=True) if share == least]
    return max(tied, key=lambda one: crc32(b"%d %s" % (conversation, one.backend.name.encode())))


def _share_in_use(backend: Backend) -> float:
    return (backend.in_flight + backend.settling_permits) / (backend.slots or 1)
