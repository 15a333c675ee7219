"""What the engine or the gateway says of its load while a step runs.

Law of this file: a gateway is asked for its /status, which is free; an engine for what its file in `engines/` asks, and
never more often than every 2.1 s (law 6). What says nothing of its load is not asked again.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from typing import Any, Final

import httpx2

from gateway.cli.ops.tally import Load
from gateway.engines.base import Engine, EngineReport, Look
from gateway.runtime.probe import PollTarget, Probe, base_of

EVERY_S: Final = 2.1
_FIRST_S: Final = 0.7  # after the start of a step: its first requests are then at work


class Watch:
    """Looks at one address. Owns the most that was seen since `begin`."""

    def __init__(self, url: str, key: str | None) -> None:
        self._url = base_of(url)
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._probe = Probe(PollTarget("watched", url, api_key=key))
        self._engine: Engine | None = None
        self.what = "does not tell its load"  # how it is called in the output
        self.seen = Load()

    async def begin(self) -> None:
        """Find out what is there."""
        self.seen = Load()
        answer = await self._ask()
        if _document(answer) is not None:
            self.what = "a Slotgate gateway"
            return
        if answer is not None and b'"admin_required"' in answer.content:
            self.what = "a Slotgate gateway (its line is told to an admin key only)"
            return
        findings = await self._probe.ask_round(Look(), None)
        if findings.engine is not None and findings.report(None) is not None:
            self._engine = findings.engine
            self.what = findings.engine.name

    @contextlib.asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        """Look now and then; `seen` holds the most."""
        self.seen = Load()
        task = asyncio.create_task(self._look_on())
        try:
            yield
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    async def _look_on(self) -> None:
        await asyncio.sleep(_FIRST_S)
        while True:
            found = await self._look()
            if found is None:
                return
            self.seen = self.seen.joined(found)
            await asyncio.sleep(EVERY_S)

    async def _look(self) -> Load | None:
        if self._engine is None:
            document = _document(await self._ask())
            return None if document is None else load_of_status(document)
        findings = await self._probe.ask_round(Look(weigh=True, full=False), self._engine)
        report = findings.report(None)
        return Load() if report is None else load_of_report(report)

    async def _ask(self) -> httpx2.Response | None:
        try:
            async with httpx2.AsyncClient(trust_env=False, timeout=3.0) as client:
                return await client.get(f"{self._url}/status", headers=self._headers)
        except (httpx2.HTTPError, httpx2.InvalidURL, OSError):
            return None


def load_of_report(report: EngineReport) -> Load:
    """What an engine said."""
    return Load(running=report.running, waiting=report.waiting, kv_used_ratio=report.kv_used_ratio)


def load_of_status(document: Mapping[str, Any]) -> Load:
    """What a gateway says: its own line and what waits in the engines; the fullest KV cache."""
    rows = [row for row in document.get("backends", ()) if isinstance(row, dict)]
    ratios = [row["kv_used_ratio"] for row in rows if row.get("kv_used_ratio") is not None]
    return Load(
        running=sum(row.get("in_flight") or 0 for row in rows),
        waiting=int(document.get("queued") or 0) + sum(row.get("waiting") or 0 for row in rows),
        kv_used_ratio=max(ratios, default=None),
    )


def _document(answer: httpx2.Response | None) -> Mapping[str, Any] | None:
    """The answer, if it is a gateway's /status."""
    try:
        document = answer.json() if answer is not None and answer.status_code == 200 else None
    except ValueError:
        return None
    return document if isinstance(document, dict) and "backends" in document else None
