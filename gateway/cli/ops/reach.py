"""Who else can reach an engine without a key.

Law of this file: no key is sent, and no request that could generate anything: a chat without messages is refused by every
engine, with 401 or 403 where a key is wanted and with another status where none is.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

import httpx2

from gateway.core.config import is_loopback
from gateway.runtime.probe import base_of

_PAGES: Final = ("/slots", "/props", "/metrics", "/api/ps", "/v1/loads")
_TAKEN: Final = (200, 400, 422, 500)  # what a chat without messages gets where no key is asked for
_PATIENCE_S: Final = 2.0


@dataclass(frozen=True, slots=True)
class Opening:
    """What answers without a key at an address that others may reach too."""

    address: str
    chat: bool  # generations
    pages: tuple[str, ...]  # of monitoring


async def openings(url: str, addresses: Sequence[str] | None = None) -> tuple[Opening, ...]:
    """What is open at this engine. `addresses`: of this machine, for an engine that runs on it; found out unless given."""
    parts = urlsplit(base_of(url))
    host = parts.hostname or ""
    if not is_loopback(host):
        others: Sequence[str] = (host,)
    else:
        others = addresses if addresses is not None else await asyncio.to_thread(own_addresses)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    found = [
        await _ask(f"{parts.scheme}://{_written(one)}:{port}{parts.path}", one) for one in others
    ]
    return tuple(one for one in found if one.chat or one.pages)


def own_addresses() -> tuple[str, ...]:
    """Addresses of this machine that are not loopback ones. Nothing is sent for it."""
    found: dict[str, None] = {}
    with suppress(OSError):
        for _, _, _, _, address in socket.getaddrinfo(socket.gethostname(), None):
            found[str(address[0])] = None
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # a datagram socket: this only asks for the route
        found[str(probe.getsockname()[0])] = None
    return tuple(one for one in found if not is_loopback(one) and "%" not in one)


async def _ask(base: str, address: str) -> Opening:
    async with httpx2.AsyncClient(
        base_url=base,
        trust_env=False,
        timeout=_PATIENCE_S,
        verify=False,  # no secret is sent, and the certificate may be of another name
    ) as client:
        try:
            answer = await client.post("/v1/chat/completions", json={})
            pages = [page for page in _PAGES if (await client.get(page)).status_code == 200]
        except (httpx2.HTTPError, httpx2.InvalidURL, OSError):
            return Opening(address, chat=False, pages=())
    return Opening(address, chat=answer.status_code in _TAKEN, pages=tuple(pages))


def _written(address: str) -> str:
    return f"[{address}]" if ":" in address else address
