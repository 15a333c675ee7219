"""Multi-turn agents in a closed loop against an OpenAI-compatible base URL.

Each keeps a growing conversation: a system prompt that all share, a context of its own, then turns. The clock of a turn
starts with its first attempt; Retry-After is obeyed; a turn that is given up counts as 60 s and is called lost.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from dataclasses import dataclass, field
from random import Random

import aiohttp

WORDS = (  # noqa: SIM905  (prose reads better than a list)
    "alpha beta gamma delta file module import return class def test build error stack trace value index list queue "
    "token cache slot prompt server client route header stream merge branch commit fix review lint type check deploy "
    "config schema table field query join node graph edge"
).split()
LOST_S = 60.0
RETRIES = 20


@dataclass(frozen=True, slots=True)
class Crowd:
    """How many, and what they talk about. Sizes in words; `gap_s`: they begin one after the other, so far apart."""

    agents: int = 16
    turns: int = 6
    shared: int = 500
    own: int = 2500
    max_tokens: int = 32
    think_s: float = 3.0
    gap_s: float = 0.0


@dataclass(slots=True)
class Seen:
    """What all agents of one run saw."""

    ttft: list[float] = field(default_factory=list)
    warm: list[float] = field(default_factory=list)
    prompt: int = 0
    cached: int = 0
    status: Counter[str] = field(
        default_factory=Counter
    )  # of attempts that did not end as they should
    lost: int = 0

    @property
    def cached_share(self) -> float:
        return self.cached / max(1, self.prompt)


def text(rng: Random, words: int) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(words))


async def run(base: str, key: str, crowd: Crowd, seed: int, model: str = "sim") -> Seen:
    """Let them all talk until they are done."""
    seen, shared = Seen(), text(Random(seed), crowd.shared)
    connector = aiohttp.TCPConnector(limit=0)
    patience = aiohttp.ClientTimeout(total=600)
    async with aiohttp.ClientSession(
        connector=connector, timeout=patience, headers={"authorization": f"Bearer {key}"}
    ) as session:
        agents = [Agent(session, base, model, crowd, seed, n, seen) for n in range(crowd.agents)]
        await asyncio.gather(*(agent.talk(shared) for agent in agents))
    return seen


class Agent:
    def __init__(
        self, session, base, model, crowd: Crowd, seed: int, number: int, seen: Seen
    ) -> None:
        self.session, self.url, self.model = session, base + "/chat/completions", model
        self.crowd, self.number, self.seen = crowd, number, seen
        self.rng = Random(seed * 1000 + number)
        self.again_s = 0.0

    async def talk(self, shared: str) -> None:
        crowd, rng = self.crowd, self.rng
        messages = [
            {"role": "system", "content": shared},
            {"role": "user", "content": text(rng, crowd.own)},
        ]
        await asyncio.sleep(
            self.number * crowd.gap_s if crowd.gap_s else rng.random() * crowd.think_s * 2
        )
        for turn in range(crowd.turns):
            reply = await self.ask(messages, warm=turn > 0)
            if reply is None:
                return
            messages += [
                {"role": "assistant", "content": reply},
                {"role": "user", "content": text(rng, 40)},
            ]
            if crowd.gap_s and not turn:  # they go on together
                await asyncio.sleep((crowd.agents - self.number) * crowd.gap_s)
            await asyncio.sleep(crowd.think_s * (0.5 + rng.random()))

    async def ask(self, messages: list[dict], *, warm: bool) -> str | None:
        """One turn, attempt after attempt."""
        since = time.monotonic()
        for attempt in range(RETRIES + 1):
            self.again_s = 0.0
            reply, first = await self.attempt(messages)
            if reply is not None:
                self.note((first or time.monotonic()) - since, warm=warm)
                return reply
            await asyncio.sleep(
                self.again_s or min(4, 0.5 * 2**attempt) * (0.75 + self.rng.random() / 2)
            )
        self.seen.lost += 1
        self.note(LOST_S, warm=warm)
        return None

    def note(self, seconds: float, *, warm: bool) -> None:
        self.seen.ttft.append(seconds)
        if warm:
            self.seen.warm.append(seconds)

    async def attempt(self, messages: list[dict]) -> tuple[str | None, float | None]:
        """The answer and when it began; None when it did not come whole."""
        body = {
            "model": self.model, "messages": messages, "max_tokens": self.crowd.max_tokens, "stream": True,
            "temperature": 0, "stream_options": {"include_usage": True},
        }  # fmt: skip
        first, usage, content, whole = None, {}, [], False
        try:
            async with self.session.post(self.url, json=body) as answer:
                if answer.status != 200:
                    self.seen.status[str(answer.status)] += 1
                    self.again_s = _retry_after(answer.headers)
                    await answer.read()
                    return None, None
                async for line in answer.content:
                    if not line.startswith(b"data:"):
                        continue
                    if line[5:].strip() == b"[DONE]":
                        whole = True
                        break
                    event = json.loads(line[5:])
                    if event.get("error"):
                        self.seen.status["error event"] += 1
                        return None, None
                    usage = event.get("usage") or usage
                    for choice in event.get("choices", []):
                        if piece := choice.get("delta", {}).get("content"):
                            first = first or time.monotonic()
                            content.append(piece)
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            self.seen.status[type(error).__name__] += 1
            return None, None
        if not whole:
            self.seen.status["cut short"] += 1
            return None, None
        self.seen.prompt += usage.get("prompt_tokens", 0)
        self.seen.cached += (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        return "".join(content) or "ok", first


def _retry_after(headers) -> float:
    exact = float(headers.get("retry-after-ms") or 0) / 1000
    return min(60.0, exact or float(headers.get("retry-after") or 0))
