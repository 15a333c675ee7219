"""A key's limits, held for as long as its request lasts. The decisions are in `core.limits`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from gateway.core.errors import GatewayError
from gateway.core.fleet import BYTES_PER_TOKEN
from gateway.core.keys import Key
from gateway.core.limits import Limits
from gateway.core.request import ParsedRequest
from gateway.runtime.observe import Record

PRIOR_OUTPUT_TOKENS = 256.0
LEARN = 0.05


class Quota:
    """Owner of `Limits`, and of what an answer usually uses (a moving median, for the estimate)."""

    def __init__(self) -> None:
        self.limits = Limits()
        self._usual_output = PRIOR_OUTPUT_TOKENS

    def within(self, key: Key) -> AbstractContextManager[None]:
        """One more request of this key at once. Raises GatewayError(key_concurrency)."""
        return self._held(key) if key.max_in_flight is not None else nullcontext()

    def charged(
        self, now: float, key: Key, request: ParsedRequest, record: Record
    ) -> AbstractContextManager[None]:
        """Its requests and tokens of this minute. Raises GatewayError(key_rate_limit)."""
        if key.rpm is None and key.tpm is None:
            return nullcontext()
        usual = self._usual_output
        output = min(request.max_tokens, usual) if request.max_tokens is not None else usual
        tokens = request.prompt_bytes / BYTES_PER_TOKEN + output * request.permits
        return self._settled(now, key, tokens, record)

    @contextmanager
    def _held(self, key: Key) -> Iterator[None]:
        self.limits.enter(key)
        try:
            yield
        finally:
            self.limits.leave(key)

    @contextmanager
    def _settled(self, now: float, key: Key, tokens: float, record: Record) -> Iterator[None]:
        self.limits.charge(now, key, tokens)
        try:
            yield
        except GatewayError:
            if record.backend is None:  # it never ran
                self.limits.refund(key, tokens)
                raise
            self._settle(key, tokens, record)
            raise
        except BaseException:
            self._settle(key, tokens, record)
            raise
        else:
            self._settle(key, tokens, record)

    def _settle(self, key: Key, charged: float, record: Record) -> None:
        usage = record.usage
        if usage is None:
            return
        generated = usage.generated_tokens or 0
        # a moving median: a step towards each sample, whatever its distance
        step = max(1.0, self._usual_output * LEARN)
        self._usual_output += step if generated > self._usual_output else -step
        self.limits.settle(key, (usage.prompt_tokens or 0) + generated - charged)
