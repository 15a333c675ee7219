"""One streamed chat as a client feels it.

Law of this file: the clock starts before the first byte is sent and, when the answer is a 503, goes on over the wait that
Retry-After asks for: a person waits from the first attempt. Content is told from the rest by the gateway's own tap, and a read
that carries k events counts as k gaps of 1/k, so that both sides count alike. Times in seconds.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import httpx2

from gateway.core.figures import Usage
from gateway.core.sse import Tap
from gateway.core.wire import Wire
from gateway.runtime.probe import base_of

CHAT: Final = "/v1/chat/completions"
_REFUSALS: Final = (503, 529)
_MOST_ATTEMPTS: Final = 20
_LONGEST_PAUSE_S: Final = 60.0
_STALE: Final = "closed without an answer"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """What became of one request. `started_s`, `first_s`, `ended_s` are moments of one clock: time.monotonic()."""

    started_s: float
    ended_s: float
    first_s: float | None = None  # the first content; None: none came
    gaps: tuple[float, ...] = ()  # between contents
    events: int = 0  # with content
    usage: Usage | None = None
    refusals: tuple[float, ...] = ()  # how long each 503 took
    error: str | None = None  # None: a whole answer
    detail: str = ""  # what the server said of the error

    @property
    def seconds(self) -> float:
        """From the first attempt to the last byte."""
        return self.ended_s - self.started_s

    @property
    def ttft_s(self) -> float | None:
        """From the first attempt to the first content."""
        return None if self.first_s is None else self.first_s - self.started_s

    @property
    def generated(self) -> int:
        """Tokens, by the engine's count, else events."""
        return self.usage.generated_tokens if self.usage else self.events


@dataclass(slots=True)
class _Attempt:
    """An answer while it comes. Owned by the call that made it."""

    tap: Tap = field(default_factory=lambda: Tap(Wire.CHAT))
    first_s: float | None = None
    last_s: float = 0.0
    gaps: list[float] = field(default_factory=list)

    def feed(self, data: bytes) -> None:
        count = self.tap.feed(data)
        if not count:
            return
        now = time.monotonic()
        if self.first_s is None:
            self.first_s = now
        else:
            self.gaps += [(now - self.last_s) / count] * count
        self.last_s = now


def client_of(
    url: str, key: str | None, timeout_s: float, *, ca: str | None = None
) -> httpx2.AsyncClient:
    """A client with as many connections as it wants. No proxy of the environment comes between.

    `timeout_s`: of one silence; `ca`: file of the certificates to trust, for https.
    """
    return httpx2.AsyncClient(
        verify=ssl.create_default_context(cafile=ca) if ca is not None else True,
        base_url=base_of(url),
        headers={"Authorization": f"Bearer {key}"} if key else {},
        trust_env=False,
        timeout=timeout_s,
        # llama-server and vLLM close idle connections after 5 s (engines.md 0.8).
        limits=httpx2.Limits(
            max_connections=None, max_keepalive_connections=None, keepalive_expiry=3.0
        ),
    )


async def stream_chat(
    client: httpx2.AsyncClient,
    body: Mapping[str, Any],
    *,
    patient: bool = True,
    on_first: asyncio.Event | None = None,
) -> Sample:
    """Ask and read to the end. Never raises for the server's sake. `patient`: come again after a 503, as it says.

    `on_first` is set at the first content, and at the end in any case.
    """
    started_s = time.monotonic()
    refusals: list[float] = []
    try:
        while True:
            began_s = time.monotonic()
            sample, pause_s = await _fresh(client, body, on_first)
            if pause_s is None:
                break
            refusals.append(sample.ended_s - began_s)
            if not patient or len(refusals) >= _MOST_ATTEMPTS:
                break
            await asyncio.sleep(pause_s)
    finally:
        if on_first is not None:
            on_first.set()
    return Sample(
        started_s=started_s,
        ended_s=sample.ended_s,
        first_s=sample.first_s,
        gaps=sample.gaps,
        events=sample.events,
        usage=sample.usage,
        refusals=tuple(refusals),
        error=sample.error,
        detail=sample.detail,
    )


async def _fresh(
    client: httpx2.AsyncClient, body: Mapping[str, Any], on_first: asyncio.Event | None
) -> tuple[Sample, float | None]:
    """One attempt; once more when a kept connection turned out to be closed already, which is no fault of the answer."""
    sample, pause_s = await _once(client, body, on_first)
    if sample.error == _STALE:
        sample, pause_s = await _once(client, body, on_first)
    return sample, pause_s


async def _once(
    client: httpx2.AsyncClient, body: Mapping[str, Any], on_first: asyncio.Event | None
) -> tuple[Sample, float | None]:
    """One attempt; with how long to wait before the next when it was refused."""
    started_s = time.monotonic()
    attempt = _Attempt()
    answered = False
    try:
        async with client.stream("POST", CHAT, json=body) as answer:
            answered = True
            if answer.status_code != 200:
                detail = (await answer.aread()).decode("utf-8", "replace")[:300]
                refused = answer.status_code in _REFUSALS
                kind = "refused" if refused else f"HTTP {answer.status_code}"
                failed = _sample(attempt, started_s, kind, detail)
                return failed, _pause(answer) if refused else None
            async for data in answer.aiter_raw():
                attempt.feed(data)
                if on_first is not None and attempt.first_s is not None:
                    on_first.set()
        attempt.tap.finish()
    except httpx2.ConnectError:
        return _sample(attempt, started_s, "unreachable", str(client.base_url)), None
    except httpx2.TimeoutException:
        return _sample(attempt, started_s, "timeout", ""), None
    except (httpx2.HTTPError, httpx2.InvalidURL, OSError) as error:
        kind = "broken" if answered else _STALE
        return _sample(attempt, started_s, kind, str(error)), None
    return _sample(attempt, started_s, _ending(attempt.tap), ""), None


def _ending(tap: Tap) -> str | None:
    if tap.saw_error:
        return "error in the stream"
    return None if tap.saw_terminal else "cut short"


def _sample(attempt: _Attempt, started_s: float, error: str | None, detail: str) -> Sample:
    return Sample(
        started_s=started_s,
        ended_s=time.monotonic(),
        first_s=attempt.first_s,
        gaps=tuple(attempt.gaps),
        events=attempt.tap.content_events,
        usage=attempt.tap.usage,
        error=error,
        detail=detail,
    )


def _pause(answer: httpx2.Response) -> float:
    """Seconds, as the server says; a second when it does not."""
    for name, unit in (("retry-after-ms", 0.001), ("retry-after", 1.0)):
        try:
            return min(_LONGEST_PAUSE_S, max(0.0, float(answer.headers[name]) * unit))
        except (KeyError, ValueError):
            continue
    return 1.0
