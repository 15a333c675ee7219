"""A gateway that reads its file again, and what tests of that write and ask.

Law of this file: the configuration is on disk, as an operator's is; only `reload` and the watcher read it.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from pathlib import Path
from typing import Any, Self

import httpx2

from gateway.app import Gateway, Source
from gateway.runtime.configfile import load
from tests.fakes import invariants
from tests.fakes.connection import Connection, Script
from tests.fakes.gateway import _listening_log
from tests.fakes.running import eventually
from tests.fakes.scripts import events_of

CHAT = "/v1/chat/completions"


def write(file: Path, *backends: str | dict[str, Any], **sections: Any) -> None:
    """Backends as URLs (named b1, b2, ...) or as sections."""
    listed = [
        {"name": f"b{n}", **(one if isinstance(one, dict) else {"url": one})}
        for n, one in enumerate(backends, 1)
    ]
    document = {"listen": {"port": 0}, "backends": listed, "log": {"format": "json"}, **sections}
    file.write_text(json.dumps(document))


def key_record(name: str, secret: str, **rest: Any) -> dict[str, Any]:
    return {"name": name, "hash": "sha256:" + hashlib.sha256(secret.encode()).hexdigest(), **rest}


def body(model: str = "m", **fields: Any) -> dict[str, Any]:
    return {"model": model, "messages": [{"role": "user", "content": "hello"}], **fields}


def held_stream(release: asyncio.Event) -> Script:
    """A streamed chat that begins at once and ends when it is let."""
    *begun, last = events_of(CHAT)

    async def script(connection: Connection) -> None:
        await connection.begin(200, content_type="text/event-stream", framing="chunked")
        for event in begun:
            await connection.body(event)
        await release.wait()
        await connection.body(last)
        await connection.end()

    return script


class Reloading:
    """`async with Reloading(file) as slotgate`."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.gateway = Gateway(load(file), Source(lambda: load(file), str(file)))

    async def __aenter__(self) -> Self:
        await self.gateway.start()
        self.client = httpx2.AsyncClient(
            base_url=self.gateway.base_url, trust_env=False, timeout=None, verify=False
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.client.aclose()
        await self.gateway.stop()

    async def ask(self, model: str = "m", **fields: Any) -> httpx2.Response:
        return await self.client.post(CHAT, json=body(model, **fields))

    async def models(self, **headers: str) -> set[str]:
        answer = await self.client.get("/v1/models", headers=headers)
        return {one["id"] for one in answer.json().get("data", [])}

    def metric(self, name: str, **labels: str) -> float:
        series = invariants.series_of(self.gateway.metrics_text())
        return invariants.total(series, f"slotgate_{name}", **labels)

    async def until(self, name: str, value: float, **labels: str) -> None:
        await eventually(lambda: self.metric(name, **labels) == value, why=f"{name} is not {value}")


class Heard:
    """What the log said while the block ran, as JSON lines."""

    def __enter__(self) -> Self:
        self._listening = _listening_log()
        self._stream = self._listening.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._listening.__exit__(None, None, None)

    @property
    def text(self) -> str:
        return self._stream.getvalue()

    def lines(self, event: str) -> list[dict[str, Any]]:
        """Of this event; after the gateway has ended they are complete."""
        found = [json.loads(x) for x in self._stream.getvalue().splitlines() if x.startswith("{")]
        return [line for line in found if line.get("event") == event]
