"""A key's limits, held for as long as its request lasts. The decisions are in `core.limits`."""

from __future__ import annotations

from types import TracebackType
from typing import Final, Self

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

    def of(self, key: Key, record: Record) -> Account:
        """What one request of this key may use."""
        limited = key.max_in_flight is not None or key.rpm is not None or key.tpm is not None
        return Metered(self, key, record) if limited else UNLIMITED

    def estimate(self, request: ParsedRequest) -> float:
        """Tokens that it is likely to use, its answer too."""
        usual = self._usual_output
        output = min(request.max_tokens, usual) if request.max_tokens is not None else usual
        return request.prompt_bytes / BYTES_PER_TOKEN + output * request.permits

    def learn(self, generated: int) -> None:
        """The length of an answer."""
        # a moving median: a step towards each sample, whatever its distance
        step = max(1.0, self._usual_output * LEARN)
        self._usual_output += step if generated > self._usual_output else -step


class Account:
    """`with quota.of(key, record) as account`: a key without limits. Nothing is counted."""

    __slots__ = ()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        pass

    def charge(self, now: float, request: ParsedRequest) -> None:
        """Take its requests and tokens of this minute. Raises GatewayError(key_rate_limit)."""


UNLIMITED: Final = Account()


class Metered(Account):
    """A key with limits. Entering raises GatewayError(key_concurrency); the exit settles what was charged."""

    __slots__ = ("_charged", "_key", "_quota", "_record")

    def __init__(self, quota: Quota, key: Key, record: Record) -> None:
        self._quota = quota
        self._key = key
        self._record = record
        self._charged: float | None = None  # tokens

    def __enter__(self) -> Self:
        if self._key.max_in_flight is not None:
            self._quota.limits.enter(self._key)
        return self

    def charge(self, now: float, request: ParsedRequest) -> None:
        if self._key.rpm is None and self._key.tpm is None:
            return
        tokens = self._quota.estimate(request)
        self._quota.limits.charge(now, self._key, tokens)
        self._charged = tokens

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        if self._charged is not None:
            self._settle(self._charged, error)
        if self._key.max_in_flight is not None:
            self._quota.limits.leave(self._key)

    def _settle(self, charged: float, error: BaseException | None) -> None:
        quota, usage = self._quota, self._record.usage
        if isinstance(error, GatewayError) and self._record.backend is None:  # it never ran
            quota.limits.refund(self._key, charged)
        elif usage is not None:
            generated = usage.generated_tokens or 0
            quota.learn(generated)
            quota.limits.settle(self._key, (usage.prompt_tokens or 0) + generated - charged)
