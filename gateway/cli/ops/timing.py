"""A few small requests to one backend, timed: alone, repeated, and in company.

Law of this file: at most MOST_REQUESTS requests of at most TOKENS tokens each, never more than two at once, to one backend at
a time. Whoever calls announces it. Prompts are new each time, so that no cache left over from before takes part.
"""

from __future__ import annotations

import asyncio
import random
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

import httpx2

from gateway.cli.ops.percentile import spread
from gateway.cli.ops.streamed import Sample, stream_chat

MOST_REQUESTS: Final = 8
TOKENS: Final = 64
_LONG_WORDS: Final = 350
_OBEY_EOS: Final = ("ollama", "openai", "unknown")  # engines that may refuse `ignore_eos`


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """What the requests came to; None: not sent, because an earlier one failed."""

    warm: Sample  # the very first: may load the model
    short: Sample | None = None  # alone
    long: Sample | None = None  # alone, with a long prompt
    again: Sample | None = None  # the same once more
    first: Sample | None = (
        None  # two at once: the second is sent when the first has begun to answer
    )
    second: Sample | None = None
    beside: Sample | None = None  # one that streams while a long prompt is read
    intruder: Sample | None = None  # the one with the long prompt

    @property
    def failed(self) -> Sample | None:
        """The first that was not answered."""
        everyone = (self.warm, self.short, self.long, self.again, self.first, self.second)
        return next((one for one in everyone if one is not None and one.error is not None), None)

    @property
    def itl_s(self) -> float | None:
        """Seconds from token to token when alone (median)."""
        gaps = spread(self.short.gaps) if self.short else None
        return gaps.p50 if gaps else None

    @property
    def prefill_tokens_per_s(self) -> float | None:
        """Prompt tokens a second, from the long prompt alone."""
        if self.long is None or self.long.usage is None or not self.long.ttft_s:
            return None
        usage = self.long.usage
        return (usage.prompt_tokens - (usage.cached_tokens or 0)) / self.long.ttft_s


async def take_times(
    client: httpx2.AsyncClient, model: str | None, engine: str, context: int | None
) -> Timing:
    """Send the requests. `context`: tokens of a slot; a long prompt keeps well within it."""
    ask = _Asking(client, model, engine)
    words = min(_LONG_WORDS, (context or 4096) // 5)
    warm = await ask.one(_short(), most=1)
    if warm.error is not None:
        return Timing(warm=warm)
    short = await ask.one(_short())
    text = _long(words)
    long = await ask.one(text, most=8)
    again = await ask.one(text, most=8)
    alone = Timing(warm=warm, short=short, long=long, again=again)
    if alone.failed is not None:
        return alone
    first, second = await ask.two(_short(), _short())
    beside = intruder = None
    if first.error is None and second.error is None and is_serial(first, second) is False:
        beside, intruder = await ask.two(_short(), _long(words))
    return Timing(
        warm=warm, short=short, long=long, again=again,
        first=first, second=second, beside=beside, intruder=intruder,
    )  # fmt: skip


def is_serial(first: Sample, second: Sample) -> bool | None:
    """Whether the second produced nothing until the first had ended. None: that cannot be told, the first was too short."""
    if first.events < 4 or second.first_s is None:
        return None
    last_s = (first.first_s or 0.0) + sum(first.gaps)  # its end reaches us a little later
    if second.first_s < last_s:
        return False
    return True if second.started_s < last_s else None


def gaps_within(sample: Sample, from_s: float, until_s: float) -> list[float]:
    """Its gaps that ended in this span of the clock."""
    moments = list(_moments(sample))
    return [later - earlier for earlier, later in pairwise(moments) if from_s < later <= until_s]


def _moments(sample: Sample) -> Iterator[float]:
    if sample.first_s is None:
        return
    at = sample.first_s
    yield at
    for gap in sample.gaps:
        at += gap
        yield at


class _Asking:
    """How a probe is sent to this engine."""

    def __init__(self, client: httpx2.AsyncClient, model: str | None, engine: str) -> None:
        self._client = client
        self._fixed: dict[str, Any] = {"model": model} if model else {}
        self._fixed |= {"stream": True, "stream_options": {"include_usage": True}, "temperature": 0}
        if engine not in _OBEY_EOS:
            self._fixed["ignore_eos"] = True

    async def one(
        self, text: str, *, most: int = TOKENS, on_first: asyncio.Event | None = None
    ) -> Sample:
        messages = [{"role": "user", "content": text}]
        body = self._fixed | {"messages": messages, "max_tokens": most}
        return await stream_chat(self._client, body, patient=False, on_first=on_first)

    async def two(self, first: str, second: str) -> tuple[Sample, Sample]:
        begun = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            one = group.create_task(self.one(first, on_first=begun))
            await begun.wait()
            other = group.create_task(self.one(second))
        return one.result(), other.result()


def _short() -> str:
    return f"{secrets.token_hex(3)}: count from 1 to 100, with commas between the numbers."


def _long(words: int) -> str:
    mark = secrets.token_hex(3)
    rng = random.Random(mark)  # noqa: S311 - filler
    known = ("river", "stone", "lamp", "winter", "paper", "garden", "signal", "table", "harbor")
    text = " ".join(rng.choice(known) for _ in range(words))
    return f"{mark}: {text}. How many words are these?"
