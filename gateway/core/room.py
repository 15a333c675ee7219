"""The KV cache that all slots of one backend share, and who has been promised how much of it.

Law of this file: what was promised never exceeds the pool, except to a request that is alone there. A llama-server
whose running sequences outgrow their one pool ends all of them in the middle of their streams (engines.md 0.4).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

FIRST_OUTPUT_TOKENS = 1_024  # what an answer is taken to need before enough of them were seen
SEEN_ENOUGH = 8  # answers, before their 90th percentile counts
REMEMBERED = 64


@dataclass(slots=True, eq=False)
class Room:
    """The promises of one backend, in tokens. Owned by `core.fleet`'s Backend."""

    tokens: int | None = None  # that the pool holds; None: slots have room of their own
    promised: int = 0  # to requests in flight; what settles is counted beside it
    _outputs: deque[int] = field(default_factory=lambda: deque(maxlen=REMEMBERED))

    def need(self, prompt_tokens: int, permits: int, max_tokens: int | None) -> int:
        """What a request of so many permits is promised: each has the prompt, and an answer of likely length."""
        likely = self.output_p90
        answer = likely if max_tokens is None else min(max_tokens, likely)
        return permits * (prompt_tokens + answer)

    def has(self, need: int, settling: int, *, alone: bool) -> bool:
        """Would it fit beside what is promised? Who is alone always fits: the engine is the judge of its size."""
        return alone or self.tokens is None or self.promised + settling + need <= self.tokens

    @property
    def output_p90(self) -> int:
        """Tokens that nine of the last answers in ten kept to."""
        if len(self._outputs) < SEEN_ENOUGH:
            return FIRST_OUTPUT_TOKENS
        return sorted(self._outputs)[len(self._outputs) * 9 // 10]

    def learn(self, generated: int) -> None:
        """The length of a whole answer."""
        self._outputs.append(generated)
