"""One round of questions to one backend, over HTTP.

Law of this file: one question at a time, each bounded in time and bytes; the backend's own key on every one; the
environment's proxies on none; no redirect followed. A round opens its connections and closes them: an idle one
would hold a worker thread of llama-server, which has few (engines.md 0.3). What goes wrong becomes a Failure.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final

import httpx2

from gateway.core.config import Backend
from gateway.engines.base import UNKNOWN, Answer, Ask, Engine, EngineReport, Look, Seen, State
from gateway.engines.detect import ENGINES, is_certain, next_question, verdict
from gateway.engines.liveness import Activity, Silence, judge

MOST_BYTES: Final = 4 << 20  # of one answer; what is longer is not read
_MOST_ASKS: Final = 32


@dataclass(frozen=True, slots=True)
class PollTarget:
    """Where a backend is and what its config says of it. `engine`: auto, or a name of `ENGINES`."""

    name: str
    url: str  # with or without /v1
    engine: str = "auto"
    api_key: str | None = field(default=None, repr=False)
    ca: str | None = None  # file of certificates to trust, for https


def target_of(backend: Backend) -> PollTarget:
    """A backend of the configuration, as far as a probe needs it."""
    key = backend.api_key.reveal() if backend.api_key else None
    return PollTarget(backend.name, backend.url, backend.engine, key, backend.ca)


@dataclass(frozen=True, slots=True)
class Failure:
    """No answer to a question, and why in words for people."""

    silence: Silence
    words: str


@dataclass(slots=True)
class Findings:
    """What a round brought. Owned by the round; whoever gets it only reads."""

    engine: Engine | None = None  # None: could not be told
    certain: bool = True  # False: detected while some question went unanswered
    seen: dict[str, Answer | None] = field(default_factory=dict)
    failure: Failure | None = None  # the first of the round

    def report(self, known: EngineReport | None) -> EngineReport | None:
        """What the engine said; None when it said nothing, or nothing that such an engine says."""
        if self.engine is None or (self.failure and self.failure.silence is Silence.REFUSED):
            return None
        report = self.engine.read(self.seen, known)
        return None if report.state is State.DOWN else report


class Probe:
    """Asks one backend. Holds its certificates, nothing else that lasts."""

    def __init__(self, target: PollTarget) -> None:
        self._target = target
        self._base = base_of(target.url)
        self._trust: ssl.SSLContext | None = None
        self._headers = {b"accept-encoding": b"identity", b"user-agent": b"slotgate-probe"}
        if target.api_key:
            self._headers[b"authorization"] = b"Bearer " + target.api_key.encode()

    def trust_anew(self) -> None:
        """Read the `ca` file again before the next round."""
        self._trust = None

    async def ask_round(self, look: Look, engine: Engine | None) -> Findings:
        """One round: detects the engine first, unless it is known or configured."""
        findings = Findings(engine=ENGINES.get(self._target.engine, engine))
        try:
            if self._trust is None:
                self._trust = await asyncio.to_thread(_trust, self._target)
        except (OSError, ValueError):
            findings.failure = Failure(Silence.BROKEN, "its `ca` file holds no certificates")
            return findings
        async with self._client(self._trust) as client:
            if findings.engine is None:
                await self._converse(client, findings, next_question)
                findings.engine = verdict(findings.seen)
                findings.certain = is_certain(findings.seen)
            chosen = findings.engine
            if chosen is not None:
                await self._converse(client, findings, lambda seen: chosen.next_ask(seen, look))
        return findings

    async def _converse(
        self, client: httpx2.AsyncClient, findings: Findings, step: Callable[[Seen], Ask | None]
    ) -> None:
        """Asks until the engine's file has no further question, or nobody listens any more."""
        while len(findings.seen) < _MOST_ASKS and (ask := step(findings.seen)) is not None:
            answer = await self._ask(client, ask)
            if isinstance(answer, Answer):
                findings.seen[ask.path] = answer
                continue
            findings.seen[ask.path] = None
            findings.failure = findings.failure or answer
            if answer.silence is Silence.REFUSED:
                findings.failure = answer
                return

    async def _ask(self, client: httpx2.AsyncClient, ask: Ask) -> Answer | Failure:
        try:
            async with (
                asyncio.timeout(ask.timeout_s),
                client.stream("GET", self._base + ask.path) as response,
            ):
                return await _read(response)
        except (TimeoutError, httpx2.TimeoutException):
            return Failure(Silence.TIMEOUT, "it does not answer in time")
        except (httpx2.HTTPError, httpx2.InvalidURL, ValueError, OSError, ExceptionGroup) as error:
            return _translated(error)

    def _client(self, trust: ssl.SSLContext) -> httpx2.AsyncClient:
        return httpx2.AsyncClient(
            headers=self._headers,
            verify=trust,
            trust_env=False,  # HTTP_PROXY must not stand between us and a local engine
            follow_redirects=False,
            timeout=httpx2.Timeout(None),  # each question has its own, over all of it
            limits=httpx2.Limits(max_connections=1),
        )


async def probe_once(target: PollTarget) -> EngineReport:
    """Everything that may be found out without load or harm, now. Never raises for the backend's sake.

    A backend that does not answer is DOWN, with the reason among the warnings.
    """
    findings = await Probe(target).ask_round(Look(), None)
    report = findings.report(None)
    return report if report is not None else silent_report(findings, None, 1, Activity())


def silent_report(
    findings: Findings, known: EngineReport | None, failures: int, activity: Activity
) -> EngineReport:
    """The report of a round that brought none: busy, suspect or down. Figures stay unsaid."""
    engine = findings.engine
    reason = findings.failure or Failure(
        Silence.BROKEN, "it answers, but not as an engine would; is the URL right?"
    )
    ruling = judge(
        reason.silence,
        failures,
        engine.patience if engine else 3,
        activity,
        known.state if known else None,
    )
    words = "it is too busy to answer, but its streams move" if ruling.busy else reason.words
    name = engine.name if engine else known.engine if known else UNKNOWN
    return EngineReport(engine=name, state=ruling.state, busy=ruling.busy, warnings=(words,))


def base_of(url: str) -> str:
    """The address before any API path: without a trailing slash, and without /v1."""
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


async def _read(response: httpx2.Response) -> Answer:
    """At most MOST_BYTES, as they are: an answer that is compressed although we asked for none counts as cut."""
    headers = {name.lower(): value for name, value in response.headers.items()}
    body = bytearray()
    cut = headers.get("content-encoding", "identity") != "identity"
    async for chunk in response.aiter_raw():
        body += chunk
        if cut or len(body) > MOST_BYTES:
            return Answer(response.status_code, headers, b"", cut=True)
    return Answer(response.status_code, headers, bytes(body))


def _trust(target: PollTarget) -> ssl.SSLContext:
    """For plain http an empty context: reading the system's certificates takes 40 ms a backend."""
    if not target.url.lower().startswith("https:"):
        return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    return ssl.create_default_context(cafile=target.ca)


def _translated(error: Exception) -> Failure:
    causes = list(_causes(error))
    if any(isinstance(cause, ConnectionRefusedError) for cause in causes):
        return Failure(
            Silence.REFUSED, "the connection is refused; is it running, and the port right?"
        )
    if any(isinstance(cause, ssl.SSLCertVerificationError) for cause in causes):
        return Failure(Silence.BROKEN, "its certificate is not trusted; set `ca`")
    if any(isinstance(cause, OSError) and "name" in str(cause).lower() for cause in causes):
        return Failure(Silence.BROKEN, "its host name is unknown")
    return Failure(Silence.BROKEN, "the connection broke, or does not speak HTTP")


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """The error and what lies under it: httpx2, httpcore2 and anyio each wrap it once more."""
    while error is not None:
        yield error
        if isinstance(error, BaseExceptionGroup):
            for inner in error.exceptions:
                yield from _causes(inner)
        error = error.__cause__ or error.__context__
